"""The code interpreter's service as a process on this machine, on the tests' own Python: what needs no sandbox."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from support.server import free_port

START_S = 90.0


class Interpreter:
    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.life = directory / "sandbox.json"
        self.home.mkdir()
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self._log = directory / "service.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        argv = [
            sys.executable, "-m", "skerry.interpreter", "--port", str(self.port), "--home", str(self.home),
            "--python", sys.executable, "--life", str(self.life),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the service did not start:\n{self._log.read_text()}")
            time.sleep(0.1)
        return self

    def _ready(self) -> bool:
        try:
            return self.http.get("/ready").text == "OK"
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.http.close()

    def run(self, code: str, **options: Any) -> "Told":
        with self.stream(code, **options) as lines:
            return Told([json.loads(line) for line in lines])

    @contextmanager
    def stream(self, code: str, **options: Any) -> Iterator[Iterator[str]]:
        with self.http.stream("POST", "/execute", json={"code": code, **options}) as response:
            assert response.status_code == 200, response.read()
            yield response.iter_lines()

    def hang_up_on(self, code: str, **options: Any) -> None:
        """Run code that says something first, and leave then."""
        with self.stream(code, **options) as lines:
            for line in lines:
                if json.loads(line)["type"] == "stdout":
                    return


class Told:
    """What an execution told."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def stdout(self) -> str:
        return "".join(event["text"] for event in self.of("stdout"))

    @property
    def stderr(self) -> str:
        return "".join(event["text"] for event in self.of("stderr"))

    @property
    def text(self) -> str | None:
        """Of the main result."""
        return next((event.get("text") for event in self.of("result") if event["is_main_result"]), None)

    @property
    def error(self) -> dict[str, Any]:
        (error,) = self.of("error")
        return error
