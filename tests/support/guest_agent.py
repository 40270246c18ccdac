"""A real guest agent as an ordinary process of this machine, and a link to it over the loopback."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry import images
from skerry.core.ids import new_id
from skerry.core.models import Exited, ExitStatus, Gap, Identity, Output, ProcessSpec, Stream
from skerry.images.cache import Cache
from skerry.images.compiled import birth
from skerry.images.model import Silent
from skerry.node.contract import ProcessStream
from skerry.node.guestlink import GuestLink

SOURCE = Path(__file__).resolve().parents[2] / "src"
TOKEN = "a token that is long enough"
GUEST_PYTHON = Path(os.environ.get("SKERRY_TEST_GUEST_PYTHON", sys.executable))
"""The agent's interpreter; the guest's own is newer than what the host may have."""
SOMEONE = "41234"
"""A numeric uid that no passwd entry names."""


def identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "sandbox_id": "sb0",
        "generation": 1,
        "token": TOKEN,
        "hostname": "sb0",
        "machine_id": "0" * 32,
        "wall_clock_ns": time.time_ns(),
        "entropy": os.urandom(64),
        "env": {},
        "default_user": "root",
        "default_cwd": None,
    }
    return Identity(**{**values, **changes})


@dataclass
class Result:
    """What one command gave. Streams keep their order within themselves."""

    stdout: bytes = b""
    stderr: bytes = b""
    pty: bytes = b""
    gaps: list[Gap] = field(default_factory=list)
    status: ExitStatus | None = None


@dataclass
class RunningAgent:
    link: GuestLink
    port: int
    process: subprocess.Popen[bytes]

    def new_link(self, **changes: Any) -> GuestLink:
        values: dict[str, Any] = {"address": ("127.0.0.1", self.port), "token": TOKEN, "generation": 1}
        return GuestLink("sb0", socket.socket, **{**values, **changes})

    async def start(self, shell: str | None = None, **spec: Any) -> ProcessStream:
        return await self.link.start(ProcessSpec(new_id("pr"), shell=shell, **spec))

    async def run(self, shell: str | None = None, *, within: float = 30, **spec: Any) -> Result:
        async with asyncio.timeout(within):
            return await collect(await self.start(shell, **spec))

    def rss_kb(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])


async def collect(stream: ProcessStream) -> Result:
    """All events to the end; checks that offsets leave no hole and that the exit is the last word."""
    result = Result()
    at = dict.fromkeys(Stream, 0)
    parts: dict[Stream, list[bytes]] = {stream: [] for stream in Stream}
    async for event in stream:
        assert result.status is None
        if isinstance(event, Output):
            assert event.data
            assert event.offset >= at[event.stream]
            at[event.stream] = event.offset + len(event.data)
            parts[event.stream].append(event.data)
        elif isinstance(event, Gap):
            result.gaps.append(event)
        else:
            assert isinstance(event, Exited)
            result.status = event.status
    assert result.status is not None
    result.stdout, result.stderr, result.pty = (
        b"".join(parts[name]) for name in (Stream.STDOUT, Stream.STDERR, Stream.PTY)
    )
    return result


def compiled_half() -> Path:
    """The agent's compiled half, from the images' cache; made if it is not there."""
    cache = Cache(images.default_cache_dir())
    cache.prepare()
    apt = images.guest_apt(cache)
    apt.update()
    return birth().build(cache, apt, Silent())


@contextmanager
def agent_process(*options: str, wrapper: Iterable[str] = (), python: Path = GUEST_PYTHON) -> Any:
    """An agent that listens on the loopback, as (process, port). Its descendants end with it."""
    command = [*wrapper, str(python), "-S", "-E", "-s", "-B", "-m", "skerry.guest.agent"]
    command += ["--listen", "127.0.0.1:0", "--allow", "127.0.0.1", "--birth", str(compiled_half()), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=SOURCE, env={"PATH": os.environ["PATH"]}) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            end_tree(process.pid)
            process.wait()


def end_tree(root: int) -> None:
    """SIGKILL for a process and all below it, by pid, until none is left."""
    import psutil

    try:
        top = psutil.Process(root)
    except psutil.NoSuchProcess:
        return
    for _ in range(50):
        below = top.children(recursive=True)
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if not any(_lives(process) for process in below):
            break
    top.kill()


def _lives(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def running_agent(*options: str, wrapper: Iterable[str] = (), **changes: Any) -> AsyncIterator[RunningAgent]:
    with agent_process(*options, wrapper=wrapper) as (process, port):
        link = GuestLink("sb0", socket.socket, address=("127.0.0.1", port))
        assert await link.identify(identity(**changes)) == []
        agent = RunningAgent(link, port, process)
        try:
            yield agent
        finally:
            link.abort()


def cgroup2() -> Path | None:
    """Where this machine has cgroup v2 mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK):
            return Path(fields[1])
    return None


@contextmanager
def own_cgroup() -> Any:
    """A cgroup of our own, removed with all below it."""
    root = cgroup2()
    assert root is not None, "cgroup v2 is not mounted"
    path = root / f"skerry-test-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    try:
        yield path
    finally:
        for below in (*sorted((p for p in path.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)), path):
            remove_cgroup(below)


def remove_cgroup(path: Path) -> None:
    """Those that were killed in it take a moment to be gone."""
    for attempt in range(250):
        try:
            path.rmdir()
        except OSError:
            if attempt == 249:
                raise
            time.sleep(0.02)
        else:
            return


def python3() -> str:
    """One that every user may run."""
    found = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    assert found is not None
    return found
