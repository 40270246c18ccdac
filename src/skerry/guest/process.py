"""One process of the sandbox: its output as far as it is kept, who reads it, and how it ended."""

import _thread
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from skerry.guest import protocol
from skerry.guest.errors import GuestError
from skerry.guest.ring import Ring
from skerry.guest.tree import Tree

UNREAD_MAX = 1024 * 1024
"""Bytes of one stream that may wait for a reader (or for one to come back) before the program has to wait."""
KEEP_MAX = 2 * 1024 * 1024
"""Bytes of one stream that are kept, read or not."""
_CHUNK = 128 * 1024
_ARGV_SHOWN = _ENV_SHOWN = 16 * 1024

KIND_OF = {"stdout": protocol.STDOUT, "stderr": protocol.STDERR, "pty": protocol.PTY}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class Process:
    """State under `lock`. The pump (one thread per process) writes the rings; readers take from them."""

    def __init__(self, process_id: str, info: dict[str, Any], streams: tuple[str, ...], *, background: bool) -> None:
        self.id = process_id
        self.info = info
        self.background = background
        self.env: dict[str, str] = {}
        """The command's own variables, as lists show them."""
        self.lock = _thread.allocate_lock()
        self.rings = {name: Ring() for name in streams}
        self.sent = dict.fromkeys(streams, 0)
        """Per stream, how far the last reader that left had got."""
        self.readers: list[Reader] = []
        self.waiters: set[int] = set()
        """eventfds to be rung when the process ends."""
        self.pid = 0
        self.tree: Tree | None = None
        self.wait_status: int | None = None
        """Set under `lock` in the act of reaping: while it is None the pid is this process's."""
        self.exit: dict[str, Any] | None = None
        """Set when all output is in the rings."""
        self.told = False
        """Whether a reader has been sent the exit."""
        self.ended_at = 0.0
        self.started = time.monotonic()
        self.deadline_hit = False
        self.killed = False
        self.stdin: int | None = None
        self.on_end: Callable[[], None] | None = None
        """Done before its end can be seen."""
        self.stdin_state = "none"
        """none (never open), open, closed"""
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # ------------------------------------------------------------------------------------------------------- output

    def room(self, name: str) -> int:
        """How many bytes of this stream the program may write now. Call with `lock` held."""
        ring = self.rings[name]
        if self.readers:
            floor = min(r.cursors[name] for r in self.readers)
        elif self.background:
            return _CHUNK
        else:
            floor = self.sent[name]
        return UNREAD_MAX - (ring.end - floor)

    def append(self, name: str, data: bytes) -> int:
        """Keep it; the oldest goes where there is too much. Returns by how many bytes the kept output grew."""
        with self.lock:
            ring = self.rings[name]
            ring.append(data)
            floor = min((r.cursors[name] for r in self.readers), default=ring.end)
            grown = len(data) - ring.trim(KEEP_MAX, floor)
            self._ring_readers()
        return grown

    def _ring_readers(self) -> None:
        for reader in self.readers:
            if reader.wake is not None:
                os.eventfd_write(reader.wake, 1)

    def kept(self) -> int:
        return sum(len(r) for r in self.rings.values())

    # ---------------------------------------------------------------------------------------------------------- end

    def reap(self, options: int = os.WNOHANG) -> None:
        """Take its end in, if it has ended. Only by the thread that started it. Under the lock, so that whoever holds
        that and sees no status may send a signal to the pid."""
        with self.lock:
            pid, status = os.waitpid(self.pid, options)
            if pid != 0:
                self.wait_status = status

    def finish(self) -> None:
        """All output is in: from now on the exit can be seen."""
        if self.on_end is not None:
            self.on_end()
        status = self.wait_status or 0
        code = os.waitstatus_to_exitcode(status)
        reason = "exit" if code >= 0 else "signal"
        if self.deadline_hit:
            reason = "deadline"
        elif self.killed:
            reason = "killed"
        with self.lock:
            self.exit = {
                "reason": reason,
                "exit_code": code if code >= 0 else None,
                "signal": signal_name(-code) if code < 0 else None,
                "duration_ms": int((time.monotonic() - self.started) * 1000),
            }
            self.ended_at = time.monotonic()
            self.close_stdin()
            self._ring_readers()

    def close_stdin(self) -> None:
        """Call with `lock` held. Those who wait to write are told."""
        if self.stdin_state == "open":
            self.stdin_state = "closed"
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None
        for fd in self.waiters:
            os.eventfd_write(fd, 1)

    def __del__(self) -> None:
        os.close(self.wake)

    # ------------------------------------------------------------------------------------------------------ signals

    def signal_group(self, number: int) -> None:
        with self.lock:
            self._check_running()
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)

    def kill_tree(self) -> bool:
        """False if it was over. `killed` is set before the signal, so that the end is told as a kill."""
        with self.lock:
            if self.wait_status is not None or self.tree is None:
                return False
            self.killed = True
            tree = self.tree
        tree.kill()
        return True

    def _check_running(self) -> None:
        if self.wait_status is not None:
            raise exited(self.id)

    def describe(self) -> dict[str, Any]:
        return {**self.info, "exit": self.exit, "state": "running" if self.exit is None else "exited"}


def exited(process_id: str) -> GuestError:
    return GuestError("Conflict", "process_exited", f"process {process_id} has exited", process_id=process_id)


def shown_argv(argv: list[str]) -> list[str]:
    """argv as lists show it: long ones cut, so that a list stays a list."""
    left = _ARGV_SHOWN
    out: list[str] = []
    for arg in argv:
        if left <= 0:
            out.append("…")
            break
        out.append(arg if len(arg) <= left else f"{arg[:left]}…")
        left -= len(arg)
    return out


def shown_env(env: dict[str, str]) -> dict[str, str]:
    """A command's own variables as lists show them: those that make a list too long are left out."""
    left = _ENV_SHOWN
    out: dict[str, str] = {}
    for name, value in env.items():
        left -= len(name) + len(value)
        if left < 0:
            break
        out[name] = value
    return out


class Reader:
    """One connection that reads a process. Never blocks: `flush` sends what the socket takes now.

    `wake` is the eventfd of the reader's own thread, None for the one that lives in the pump.
    """

    def __init__(self, process: Process, sock: Any, offsets: dict[str, int], wake: int | None) -> None:
        self.process = process
        self.sock = sock
        self.cursors = offsets
        self.wake = wake
        self.done = False
        self._out: memoryview | None = None
        self._last_queued = False
        self._first = b""
        self._until: dict[str, int] | None = None

    def attach(self, *, follow: bool = True, before: int = 0) -> dict[str, int]:
        """`follow` False: END after what there is now, unless the process's EXIT comes first. `before`: so many bytes
        that precede the offsets are given, too, where they are kept. Returns where the offsets are."""
        with self.process.lock:
            begins: dict[str, int] = {}
            for name, ring in self.process.rings.items():
                at = begins[name] = min(self.cursors.get(name, 0), ring.end)
                self.cursors[name] = min(at, max(at - before, ring.start))
            if not follow:
                self._until = {name: ring.end for name, ring in self.process.rings.items()}
            self.process.readers.append(self)
        return begins

    def detach(self) -> None:
        process = self.process
        with process.lock:
            if self in process.readers:
                process.readers.remove(self)
                if not process.readers:
                    process.sent.update(self.cursors)
        if self.wake is not None:  # the pump's own reader leaves in the pump
            os.eventfd_write(process.wake, 1)

    def flush(self) -> bool:
        """Send all there is. False: the socket is full. Raises OSError when the line is broken. `done` after EXIT."""
        import socket

        while True:
            out = self._out
            if out is None:
                data = self._collect()
                if not data:
                    self.done = self._last_queued
                    self._mark_told()
                    return True
                out = self._out = memoryview(data)
            try:
                sent = self.sock.send(out, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._out = out[sent:] if sent < len(out) else None

    def _mark_told(self) -> None:
        """Whoever starts something in the background does not stay to hear of its end, though it may be sent."""
        process = self.process
        if self.done and process.exit is not None and (self.wake is not None or not process.background):
            process.told = True

    def queue(self, data: bytes) -> None:
        """Send this first, with what there is by then."""
        self._first = data

    def _collect(self) -> bytes:
        if self._last_queued:
            return b""
        process = self.process
        parts: list[bytes] = []
        if self._first:
            parts.append(self._first)
            self._first = b""
        with process.lock:
            for name, ring in process.rings.items():
                at = self.cursors[name]
                if at < ring.start:
                    gap = {"stream": name, "offset": at, "missed": ring.start - at}
                    parts.append(protocol.frame(protocol.GAP, protocol.dump(gap)))
                    at = ring.start
                if at < ring.end:
                    data = ring.read(at, _CHUNK)
                    parts.append(protocol.HEADER.pack(8 + len(data), KIND_OF[name]) + protocol.OFFSET.pack(at))
                    parts.append(data)
                    at += len(data)
                self.cursors[name] = at
            caught_up = all(self.cursors[name] == ring.end for name, ring in process.rings.items())
            if process.exit is not None and caught_up:
                parts.append(protocol.frame(protocol.EXIT, protocol.dump(process.exit)))
                self._last_queued = True
            elif self._until is not None and all(self.cursors[name] >= end for name, end in self._until.items()):
                parts.append(protocol.frame(protocol.END, b"{}"))
                self._last_queued = True
        if parts and self.wake is not None:
            os.eventfd_write(process.wake, 1)
        return b"".join(parts)
