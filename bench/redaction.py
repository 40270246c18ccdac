"""What taking secrets out of a stream costs: bytes through the redactor on one CPU, by how many secrets there are."""

import random
import string
import time
from collections.abc import Iterator

from bench.measure import Row
from skerry.core.redact import Redactor

LETTERS = string.ascii_letters + string.digits
SIZE_MB = 16
PIECE = 64 * 1024


def rows() -> Iterator[Row]:
    rng = random.Random(5)
    text = "".join(rng.choices(LETTERS + " ./:-\n", k=1 << 20)).encode()
    for count in (1, 20):
        secrets = ["".join(rng.choices(LETTERS + "/+!@", k=40)).encode() for _ in range(count)]
        stream = Redactor(secrets).stream()
        began = time.perf_counter()
        for _ in range(SIZE_MB):
            for at in range(0, len(text), PIECE):
                stream.feed(text[at : at + PIECE])
        rate = SIZE_MB / (time.perf_counter() - began)
        yield Row(f"redaction of output, {count} secret{'s' * (count > 1)}", rate, "MiB/s", SIZE_MB)
