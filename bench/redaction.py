"""What taking secrets out of output costs: bytes through the redactor, and a command's output with and without."""

import random
import string
import time
from collections.abc import Iterator

from bench.measure import Row, p50
from skerry import Client, Sandbox, secret
from skerry.core.redact import Redactor

LETTERS = string.ascii_letters + string.digits
SIZE_MB = 16
PIECE = 64 * 1024
OUTPUT_MB, OUTPUT_ROUNDS = 16, 5


def rows(client: dict[str, str]) -> Iterator[Row]:
    yield from redactor_rows()
    yield from output_rows(client)


def output_rows(client: dict[str, str]) -> Iterator[Row]:
    """A command's output through the SDK, in turns with a sandbox that was never given a secret."""
    name = "bench-redaction"
    with Client(**client) as opened:
        opened.secrets.set(name, "bench/Xq7-a-value-of-forty-bytes-or-so")
        with Sandbox.create(client=opened) as plain, Sandbox.create(env={"S": secret(name)}, client=opened) as lent:
            rates: dict[str, list[float]] = {plain.id: [], lent.id: []}
            for _ in range(OUTPUT_ROUNDS):
                for sandbox in (plain, lent):
                    began = time.perf_counter()
                    seen = sandbox.run(f"yes 'a line of some build, with paths/and=words' | head -c {OUTPUT_MB << 20}")
                    rates[sandbox.id].append(OUTPUT_MB / (time.perf_counter() - began))
                    assert len(seen.stdout) == OUTPUT_MB << 20
        opened.secrets.delete(name)
    base, with_one = p50(rates[plain.id]), p50(rates[lent.id])
    yield Row(f"{OUTPUT_MB} MiB of a command's output, no secret", base, "MiB/s", OUTPUT_ROUNDS)
    yield Row(
        f"{OUTPUT_MB} MiB of a command's output, one secret", with_one, "MiB/s", OUTPUT_ROUNDS,
        ratio=with_one / base, against="no secret",
    )  # fmt: skip


def redactor_rows() -> Iterator[Row]:
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
