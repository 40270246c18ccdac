"""Processes that outlive the server, told apart from later ones with the same pid by their start time."""

import asyncio
import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from skerry.core.errors import InternalError

KILL_DEADLINE_S = 20.0
"""A process that is still there this long after SIGKILL hangs in the kernel."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for all time on this boot of the machine."""

    pid: int
    started: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""


def start_time(pid: int) -> int | None:
    """Start time of a process in ticks, None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> ProcessId:
    """Raises InternalError if there is no such process."""
    started = start_time(pid)
    if started is None:
        raise InternalError(f"process {pid} is gone", step="vmm")
    return ProcessId(pid, started)


class Watched:
    """A process under watch through a pidfd: waiting and killing cannot hit another one that got its pid later."""

    def __init__(self, identity: ProcessId, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    @classmethod
    def open(cls, identity: ProcessId) -> "Watched | None":
        """None if the process is gone."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                return None
            raise InternalError(f"pidfd_open: {error.strerror}", step="vmm") from error
        if start_time(identity.pid) != identity.started:  # after the open, so that the fd is of the one we checked
            os.close(pidfd)
            return None
        return cls(identity, pidfd)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with contextlib.suppress(ChildProcessError):  # not our child: init reaps it
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self._gone.set()

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    def signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0 and self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> None:
        await self._gone.wait()

    async def kill(self) -> None:
        """SIGKILL, then wait until it is gone. Raises InternalError if the kernel does not let it go."""
        self.signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await self.wait()
        except TimeoutError:
            raise InternalError(
                f"process {self.identity.pid} does not end after SIGKILL", step="vmm_stop", pid=self.identity.pid
            ) from None

    def close(self) -> None:
        """Stop watching; the process runs on."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def working_below(root: Path) -> dict[int, Path]:
    """Pids whose working directory is a directory right below `root`, with that directory."""
    found: dict[int, Path] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                cwd = Path((entry / "cwd").readlink())
            except OSError:
                continue
            if cwd.parent == root:  # also where it was removed meanwhile: "… (deleted)" has the same parent
                found[int(entry.name)] = cwd
    return found
