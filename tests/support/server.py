"""A real `skerry serve` in a process of its own, on a data directory and a port of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

from skerry import Sandbox
from support.machine import Leftovers, instance, vms

START_DEADLINE_S = 90.0
ALIVE = ["creating", "running", "pausing", "paused", "resuming"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """Ended with `stop` (gracefully) or `kill` (SIGKILL). May be started again on the same data."""

    def __init__(self, data_dir: Path, **settings: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.settings = settings
        self.log = data_dir / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def root_key(self) -> Path:
        return Path(self.settings.get("SKERRY_ROOT_KEY_FILE") or f"{self.data_dir}-root-key")

    @property
    def client_file(self) -> Path:
        return self.data_dir / "client.json"

    @property
    def api_key(self) -> str:
        return json.loads(self.client_file.read_text())["api_key"]

    @property
    def client(self) -> dict[str, str]:
        """Arguments that lead the SDK to it."""
        return {"url": self.url, "api_key": self.api_key}

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SKERRY_EGRESS_DISCOVER": "false",  # asking package managers takes seconds
            "SKERRY_DATA_DIR": str(self.data_dir),
            "SKERRY_PORT": str(self.port),
            "SKERRY_CLIENT_FILE": str(self.client_file),
            **self.settings,
        }

    def start(self) -> Self:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "skerry"), "serve"],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)
        return self

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """As a crash would: nothing is told, nothing is cleaned up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def finish(self) -> None:
        """Kill its sandboxes, stop it, and destroy it. Raises AssertionError if anything was left to be destroyed."""
        try:
            for sandbox in Sandbox.list(state=ALIVE, **self.client):
                Sandbox.connect(sandbox.id, **self.client).kill()
            self.stop()
            left = Leftovers.of(self.data_dir)
        finally:
            self.destroy()
        assert left == Leftovers(), "something of the tests' sandboxes is left on this machine"

    def destroy(self) -> None:
        """End the server and whatever of its sandboxes is left, however the test went."""
        self.stop()
        for process in vms(self.data_dir):
            process.kill()
            process.wait()
        tag = instance(self.data_dir)
        self.root_key.unlink(missing_ok=True)
        for name in Path("/run/netns").glob(f"sk-{tag}-*"):
            subprocess.run(["ip", "netns", "delete", name.name], check=False)
        for cgroup in sorted(Path("/sys/fs/cgroup").glob(f"*/skerry-{tag}/*/"), reverse=True):
            cgroup.rmdir()

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None
