"""What the face for E2B's clients adds: their released client beside our own, in turns, on one sandbox."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.measure import Row, p50, p95, times_ms
from skerry import Sandbox
from skerry.cli.serve import token_key
from skerry.control.live import LiveSandboxes
from skerry.control.tokens import SandboxTokens
from support.clients import command
from support.server import Server

CLIENT = "python-2.63"
ROUNDS, EACH = 8, 8


def rows(server: Server, sandbox: Sandbox) -> Iterator[Row]:
    live = LiveSandboxes(lambda: None, 1.0)  # type: ignore[arg-type,return-value]
    token = SandboxTokens(token_key(server.data_dir / "token-key"), live).access(sandbox.id)
    script = [*command(CLIENT, Path(__file__).with_name("faces_client.py")), sandbox.id, token]
    key = f"e2b_{server.api_key.encode('ascii').hex()}"
    env = {**os.environ, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": key}
    block = os.urandom(1 << 20)
    login = ["/bin/bash", "-l", "-c", "true"]  # what that client makes of every command
    pairs: list[tuple[str, str, Callable[[], object]]] = [
        ("command", "command in a login shell", lambda: sandbox.run(login)),
        ("write", "1 MiB written", lambda: sandbox.files.write("/home/user/native-block", block)),
        ("read", "1 MiB read", lambda: sandbox.files.read("/home/user/native-block")),
    ]
    with subprocess.Popen(script, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin
        assert client.stdout
        for name, what, own in pairs:
            theirs: list[float] = []
            ours: list[float] = []
            for turn in range(ROUNDS + 1):
                client.stdin.write(f"{name} {EACH}\n")
                client.stdin.flush()
                took = json.loads(client.stdout.readline())
                native = times_ms(own, EACH)
                if turn:  # the first warms up
                    theirs += took
                    ours += native
            added = p50(theirs) - p50(ours)
            count = ROUNDS * EACH
            yield Row(f"{what}, our client", p50(ours), "ms", count, p95=p95(ours))
            ratio = p50(theirs) / p50(ours)
            yield Row(f"{what}, E2B's", p50(theirs), "ms", count, ratio=ratio, against="our client", p95=p95(theirs))
            if name == "command":
                yield Row("added by E2B's client and face", added, "ms", count, target="<= 5 ms", met=added <= 5)
        client.stdin.close()
