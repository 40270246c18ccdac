"""What taking secrets out of output costs: bytes through the redactor, and a command's output with and without."""

import random
import string
import time
from collections.abc import Iterator

import psutil

from bench.measure import Row, p50
from skerry import Client, Sandbox, secret
from skerry.core.redact import Redactor
from support.server import Server

LETTERS = string.ascii_letters + string.digits
SIZE_MB = 16
PIECE = 64 * 1024
OUTPUT_MB, OUTPUT_ROUNDS = 16, 5
NAME = "bench-redaction"


def rows(server: Server, client: dict[str, str]) -> Iterator[Row]:
    yield from redactor_rows()
    yield from output_rows(server, client)


def output_rows(server: Server, client: dict[str, str]) -> Iterator[Row]:
    """The server's CPU for a command's output, in turns with a sandbox that was never given a secret. Not the time it
    takes: that is the guest's."""
    assert server.process
    process = psutil.Process(server.process.pid)
    with Client(**client) as opened:
        opened.secrets.set(NAME, "bench/Xq7-a-value-of-forty-bytes-or-so")
        with Sandbox.create(client=opened) as plain, Sandbox.create(env={"S": secret(NAME)}, client=opened) as lent:
            costs: dict[str, list[float]] = {plain.id: [], lent.id: []}
            for _ in range(OUTPUT_ROUNDS):
                for sandbox in (plain, lent):
                    before = sum(process.cpu_times()[:2])
                    seen = sandbox.run(f"yes 'a line of some build, with paths/and=words' | head -c {OUTPUT_MB << 20}")
                    costs[sandbox.id].append((sum(process.cpu_times()[:2]) - before) * 1000 / OUTPUT_MB)
                    assert len(seen.stdout) == OUTPUT_MB << 20
        opened.secrets.delete(NAME)
    base, with_one = p50(costs[plain.id]), p50(costs[lent.id])
    yield Row("server's CPU for a MiB of output, no secret", base, "ms", OUTPUT_ROUNDS)
    yield Row(
        "server's CPU for a MiB of output, one secret", with_one, "ms", OUTPUT_ROUNDS,
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
