"""All processes of the sandbox, and the thread that reaps orphans."""

import _thread
import os
import threading
import time
from collections import deque
from itertools import islice

from skerry.guest.errors import GuestError
from skerry.guest.process import Process

RUNNING_MAX = 512
REMEMBERED_MAX = 64
"""Exited processes whose end somebody was told."""
UNTOLD_MAX = RUNNING_MAX
"""Exited processes in all: as many as run at once may end before anybody asks how."""
REMEMBERED_S = 600.0
KEPT_MAX = 64 * 1024 * 1024
"""Bytes of output kept over all processes; beyond it, exited processes lose theirs, the oldest first."""
_WNOTHREAD = 0x20000000
_LOOK_S = 1.0
"""How often to look for a first orphan while commands run. Nothing says when one comes."""


class Table:
    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._orphans = threading.Condition(threading.Lock())
        self._by_id: dict[str, Process] = {}
        self._done: deque[Process] = deque()
        """Those of `_by_id` that have ended, in that order."""
        self._kept = 0

    # ------------------------------------------------------------------------------------------------------- lookup

    def get(self, process_id: str) -> Process:
        with self._lock:
            self._forget()
            process = self._by_id.get(process_id)
        if process is None or process.tree is None:
            raise GuestError(
                "NotFound", "process_not_found", f"there is no process {process_id[:64]}", process_id=process_id[:64]
            )
        return process

    def all(self) -> list[Process]:
        with self._lock:
            self._forget()
            return [p for p in self._by_id.values() if p.tree is not None]

    # -------------------------------------------------------------------------------------------------------- start

    def reserve(self, process: Process) -> None:
        """Take the id before the start, so that a second start with it is refused and never runs twice."""
        with self._lock:
            self._forget()
            if process.id in self._by_id:
                raise GuestError(
                    "Conflict", "process_exists", f"process {process.id} was started before", process_id=process.id
                )
            if len(self._by_id) - len(self._done) >= RUNNING_MAX:
                raise GuestError(
                    "Unavailable", "process_limit", f"{RUNNING_MAX} commands run already", allowed=RUNNING_MAX
                )
            self._by_id[process.id] = process

    def unreserve(self, process: Process) -> None:
        with self._lock:
            self._by_id.pop(process.id, None)

    def ended(self, process: Process) -> None:
        """Its exit can be seen: from now on it is only remembered."""
        with self._lock:
            self._done.append(process)

    # ------------------------------------------------------------------------------------------------------ reaping

    def reap_orphans(self) -> None:
        """The first thread's work, for ever. Orphans become its children. Each command is the child of the thread that
        started it, which waits for it itself: a pid of a command is never reaped here."""
        while True:
            try:
                os.waitpid(-1, _WNOTHREAD)
            except ChildProcessError:
                with self._orphans:
                    self._orphans.wait(_LOOK_S if self._running() else None)

    def expect_orphans(self) -> None:
        """A command is over: it may have left some. Mostly it has not, and the first thread is left alone."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # no thread of the agent has a child
            return
        with self._orphans:
            self._orphans.notify()

    def _running(self) -> bool:
        return len(self._by_id) > len(self._done)

    # ------------------------------------------------------------------------------------------------------- memory

    def grew(self, size: int) -> None:
        with self._lock:
            self._kept += size
            if self._kept <= KEPT_MAX:
                return
            done = tuple(self._done)
        for process in done:
            with process.lock:
                freed = sum(ring.clear() for ring in process.rings.values()) if not process.readers else 0
            with self._lock:
                self._kept -= freed
                if self._kept <= KEPT_MAX:
                    return

    def forget_exited(self) -> None:
        """What ran before this machine was handed to its sandbox is nobody's business."""
        with self._lock:
            while self._done:
                self._drop(self._done.popleft())

    def _forget(self) -> None:
        """Call with the lock held."""
        done = self._done
        if not done:
            return
        horizon = time.monotonic() - REMEMBERED_S
        while done and (len(done) > UNTOLD_MAX or done[0].ended_at < horizon):
            self._drop(done.popleft())
        surplus = len(done) - REMEMBERED_MAX
        if surplus <= 0:
            return
        for process in tuple(islice((p for p in done if p.told), surplus)):
            done.remove(process)
            self._drop(process)

    def _drop(self, process: Process) -> None:
        del self._by_id[process.id]
        self._kept -= process.kept()
