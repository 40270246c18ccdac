"""The processes of kernels: Python's are forked by the zygote, others are programs."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

PYTHON: Final = "/usr/bin/python3"
READY_S: Final = 120.0
"""For all that the zygote imports, emulated."""


class Process(Protocol):
    """The process of a kernel: a leader of its own session and group."""

    pid: int
    ended: "asyncio.Future[str]"
    """How it ended, once it has."""


class Started:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def finish(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


def said(status: int) -> str:
    """How a process ended, of what `wait` gives."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"its process was ended by {name}" + (" (perhaps short of memory)" if name == "SIGKILL" else "")


def signal_group(process: Process, number: signal.Signals) -> None:
    if not process.ended.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class Zygote:
    """The zygote, as the service sees it. One that ended is started anew when the next kernel is wanted."""

    def __init__(self, python: str = PYTHON, script: Path | None = None) -> None:
        self._argv = [python, str(script or Path(__file__).with_name("zygote.py"))]
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._births: dict[int, asyncio.Future[Started]] = {}
        self._kernels: dict[int, Started] = {}
        self._next = 0
        self._turn = asyncio.Lock()

    async def fork(
        self, connection_file: str, cwd: str, env: Mapping[str, str], descriptors: tuple[int, int, int]
    ) -> Process:
        """A kernel that writes to the first two descriptors and reads from the third what was taken.

        Raises OSError or TimeoutError where no zygote comes up, or it goes away.
        """
        async with self._turn:
            if self._reader is None or self._reader.done():
                await self._start()
        assert self._control is not None  # noqa: S101 - it is started
        self._next += 1
        birth = self._births[self._next] = asyncio.get_running_loop().create_future()
        order = Path(connection_file).with_name("order.json")
        order.write_text(json.dumps({"connection_file": connection_file, "cwd": cwd, "env": dict(env)}))
        socket.send_fds(self._control, [json.dumps({"id": self._next, "order": str(order)}).encode()], descriptors)
        async with asyncio.timeout(READY_S):
            return await birth

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # noqa: FBT003
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdin=theirs.fileno(), stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
            )
        self._control = ours
        async with asyncio.timeout(READY_S):
            if not await asyncio.get_running_loop().sock_recv(ours, 65_536):
                raise OSError("the process that kernels are forked from ended while it started")
        self._reader = asyncio.create_task(self._read(ours), name="zygote")

    async def _read(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(control, 65_536):
                message: dict[str, Any] = json.loads(packet)
                if "pid" in message:
                    started = self._kernels[message["id"]] = Started(message["pid"])
                    self._births.pop(message["id"]).set_result(started)
                else:
                    self._kernels.pop(message["id"]).finish(said(message["status"]))
        finally:
            control.close()
            for birth in self._births.values():
                birth.set_exception(OSError("the process that kernels are forked from ended"))
            self._births.clear()
            for kernel in self._kernels.values():  # nobody would hear of their end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(kernel.pid, signal.SIGKILL)
                kernel.finish("the process that kernels are forked from ended")
            self._kernels.clear()


async def spawn(
    argv: list[str],
    cwd: str,
    env: Mapping[str, str],
    descriptors: tuple[int, int],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    more: tuple[int, ...] = (),
) -> Process:
    """Start a program, its output to `descriptors`; `more` are handed to it under the same numbers. Raises OSError."""
    stdout, stderr = descriptors
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=more,
        cwd=cwd,
        env={**os.environ, **env},
        start_new_session=True,
    )
    started = Started(child.pid)
    with contextlib.suppress(OSError):  # short of memory, the code of users goes before what serves it
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("500")

    async def wait() -> None:
        code = await child.wait()
        started.finish(said(code << 8 if code >= 0 else -code))

    _waits.add(task := asyncio.create_task(wait()))
    task.add_done_callback(_waits.discard)
    return started


_waits: set[asyncio.Task[None]] = set()
