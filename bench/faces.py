"""What the face for E2B's clients adds: their released client beside our own, in turns, on one sandbox."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import Row, p50, p95, times_ms
from skerry import Sandbox
from skerry.cli.serve import token_key
from skerry.control.live import LiveSandboxes
from skerry.control.tokens import SandboxTokens
from support.clients import command
from support.server import Server

CLIENT = "python-2.63"
ROUNDS, EACH = 8, 8
REFILL_S = 2.0


@contextmanager
def their_client(server: Server, sandbox: Sandbox) -> Iterator[Callable[[str, int], list[Any]]]:
    """A process of E2B's client: does what it is told by name, so often, and gives the milliseconds of each."""
    live = LiveSandboxes(lambda: None, 1.0)  # type: ignore[arg-type,return-value]
    token = SandboxTokens(token_key(server.data_dir / "token-key"), live).access(sandbox.id)
    script = [*command(CLIENT, Path(__file__).with_name("faces_client.py")), sandbox.id, token]
    key = f"e2b_{server.api_key.encode('ascii').hex()}"
    env = {**os.environ, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": key}
    with subprocess.Popen(script, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        tell, said = client.stdin, client.stdout
        assert tell
        assert said

        def told(name: str, count: int) -> list[Any]:
            tell.write(f"{name} {count}\n")
            tell.flush()
            return json.loads(said.readline())

        yield told
        tell.close()


def rows(server: Server, sandbox: Sandbox) -> Iterator[Row]:
    block = os.urandom(1 << 20)
    login = ["/bin/bash", "-l", "-c", "true"]  # what that client makes of every command
    pairs: list[tuple[str, str, Callable[[], object]]] = [
        ("command", "command in a login shell", lambda: sandbox.run(login)),
        ("write", "1 MiB written", lambda: sandbox.files.write("/home/user/native-block", block)),
        ("read", "1 MiB read", lambda: sandbox.files.read("/home/user/native-block")),
    ]
    with their_client(server, sandbox) as client:
        yield from create_rows(server, client)
        for name, what, own in pairs:
            theirs: list[float] = []
            ours: list[float] = []
            for turn in range(ROUNDS + 1):
                took = client(name, EACH)
                native = times_ms(own, EACH)
                if turn:  # the first warms up
                    theirs += took
                    ours += native
            added = p50(theirs) - p50(ours)
            yield from both(what, ours, theirs)
            if name == "command":
                yield Row("added by E2B's client and face", added, "ms", len(ours), target="<= 5 ms", met=added <= 5)


def create_rows(server: Server, client: Callable[[str, int], list[Any]]) -> Iterator[Row]:
    """One at a time, and with time for the pool to fill again after each."""

    def own() -> tuple[float, float]:
        start = time.perf_counter()
        with Sandbox.create("base", timeout=120, **server.client) as made:
            there = time.perf_counter()
            made.run(["/bin/bash", "-l", "-c", "true"])
            first = time.perf_counter()
        return (there - start) * 1000, (first - start) * 1000

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        time.sleep(REFILL_S)
        theirs += client("create", 1)
        time.sleep(REFILL_S)
        ours.append(own())
    for n, what in enumerate(("create from the pool", "create -> first output, a login shell's")):
        yield from both(what, [pair[n] for pair in ours[1:]], [pair[n] for pair in theirs[1:]])


def both(what: str, ours: list[float], theirs: list[float]) -> Iterator[Row]:
    yield Row(f"{what}, our client", p50(ours), "ms", len(ours), p95=p95(ours))
    ratio = p50(theirs) / p50(ours)
    yield Row(f"{what}, E2B's", p50(theirs), "ms", len(theirs), ratio=ratio, against="our client", p95=p95(theirs))
