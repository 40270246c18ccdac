"""The loop of one running process: its pipes into the rings, the rings to the reader that started it, its deadline.

One thread, one poll(2), no timer that runs while nothing is due. The program waits when its reader is slow; the loop
never does. When the leader has exited, what is in the pipes at that moment is read and the exit can be seen; children
that hold the pipes open are not waited for: their pipes go to the Drain.
"""

import _thread
import errno
import fcntl
import os
import select
import signal
import time
from struct import unpack
from typing import TYPE_CHECKING, Any

from skerry.guest.plumbing import Plumbing
from skerry.guest.process import Process, Reader

if TYPE_CHECKING:
    from skerry.guest.table import Table

GRACE_S = 1.0
_READ = 64 * 1024
_TERMINAL_DRAIN = 1024 * 1024
_FIONREAD = 0x541B
_IN = select.POLLIN | select.POLLHUP | select.POLLERR
_GRACE_TICK_MS = 50


class Pump:
    def __init__(
        self,
        table: "Table",
        process: Process,
        pipes: Plumbing,
        reader: Reader,
        deadline: float | None,
        drain: "Drain",
        pidfd: int,
    ) -> None:
        """`pidfd` is the process's, and closed here."""
        self._table = table
        self._process = process
        self._pipes = pipes
        self._fds = pipes.outputs
        self._reader: Reader | None = reader
        self._deadline = deadline
        self._drain = drain
        self._grace_end: float | None = None
        self._killed_rest = False
        self._polled: Any = None
        self._armed: dict[int, int] = {}
        self._terminal = "pty" in process.rings
        self._blocked = False
        self._pidfd: int | None = pidfd

    def run(self) -> None:
        """Until the exit has been told, or can be told and nobody listens here."""
        process = self._process
        try:
            while True:
                if process.exit is None and process.wait_status is not None and self._over():
                    self._final_read()
                    process.finish()
                    self._table.ended(process)
                self._flush()
                if process.exit is not None and self._reader is None:
                    return
                self._arm()
                for fd, event in self._poll.poll(self._timeout()):
                    self._handle(fd, event)
                self._check_deadline()
        finally:
            self._forget_pid()
            if self._reader is not None:
                self._reader.detach()
            self._drain.adopt(tuple(self._fds))
            self._fds.clear()

    @property
    def _poll(self) -> Any:
        """Made when there is something to wait for: most commands are over by then."""
        if self._polled is None:
            self._polled = select.poll()
        return self._polled

    def _forget_pid(self) -> None:
        if self._pidfd is not None:
            if self._armed.pop(self._pidfd, None) is not None:
                self._poll_forget(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    # ------------------------------------------------------------------------------------------------------- events

    def _arm(self) -> None:
        process = self._process
        wanted = {process.wake: select.POLLIN}
        if self._pidfd is not None:
            wanted[self._pidfd] = select.POLLIN
        if process.exit is None:
            with process.lock:
                for fd, name in self._fds.items():
                    if process.room(name) > 0:
                        wanted[fd] = select.POLLIN
        if self._reader is not None:
            pending = select.POLLOUT if self._blocked else 0
            wanted[self._reader.sock.fileno()] = select.POLLIN | select.POLLRDHUP | pending
        if wanted == self._armed:
            return
        for fd in self._armed:
            if fd not in wanted:
                self._poll.unregister(fd)
        for fd, mask in wanted.items():
            self._poll.register(fd, mask)
        self._armed = wanted

    def _handle(self, fd: int, event: int) -> None:
        if fd == self._pidfd:
            self._process.reap()
            self._forget_pid()
        elif fd == self._process.wake:
            os.eventfd_read(fd)
        elif fd in self._fds:
            self._read(fd)
        elif self._reader is not None and event & ~select.POLLOUT:
            # The host has nothing to say on this connection but that it is gone.
            self._drop_reader()

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.detach()
            self._reader = None
            self._blocked = False

    def _flush(self) -> None:
        if self._reader is None:
            return
        try:
            self._blocked = not self._reader.flush()
        except OSError:
            self._drop_reader()
            return
        if self._reader.done:
            self._drop_reader()

    def _read(self, fd: int) -> None:
        name = self._fds[fd]
        with self._process.lock:
            room = self._process.room(name)
        if room > 0:
            self._take(fd, min(room, _READ))

    def _take(self, fd: int, limit: int) -> int:
        """Read once. 0 at the end of the stream (the descriptor is then closed) and where nothing is there now."""
        try:
            data = os.read(fd, limit)
        except BlockingIOError:
            return 0
        except OSError as e:
            if e.errno not in (errno.EIO, errno.EINTR):  # EIO: the terminal has no other side any more
                raise
            data = b""
        if not data:
            del self._fds[fd]
            if self._armed.pop(fd, None) is not None:
                self._poll_forget(fd)
            os.close(fd)
            return 0
        self._table.grew(self._process.append(self._fds[fd], data))
        return len(data)

    def _poll_forget(self, fd: int) -> None:
        try:
            self._poll.unregister(fd)
        except KeyError:
            return

    def _final_read(self) -> None:
        """What is in the pipes now; a child that goes on writing cannot make this endless. Those that nobody holds any
        more are closed."""
        self._pipes.let_go()
        if not self._fds:
            return
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        for fd, event in poll.poll(0):
            left = _TERMINAL_DRAIN if self._terminal else _readable(fd) if event & select.POLLIN else 0
            while left > 0:
                got = self._take(fd, min(left, _READ))
                if got == 0:
                    break
                left -= got
            if event & select.POLLHUP and left <= 0 and fd in self._fds:
                self._take(fd, _READ)  # nobody is left to write: its end, or what came between the two calls

    # ----------------------------------------------------------------------------------------------------- deadline

    def _timeout(self) -> int | None:
        if self._grace_end is not None:
            return _GRACE_TICK_MS
        if self._deadline is None or self._process.wait_status is not None:
            return None
        return max(0, int((self._deadline - time.monotonic()) * 1000) + 1)

    def _check_deadline(self) -> None:
        process = self._process
        if self._deadline is None or process.tree is None:
            return
        now = time.monotonic()
        if self._grace_end is not None:
            if now >= self._grace_end and not self._killed_rest:
                process.tree.kill()
                self._killed_rest = True
            return
        if now < self._deadline:
            return
        with process.lock:
            if process.wait_status is not None:
                return
            process.deadline_hit = True
        self._grace_end = now + GRACE_S
        process.tree.signal(signal.SIGTERM)
        process.tree.signal(signal.SIGCONT)

    def _over(self) -> bool:
        """The leader has exited. After a deadline its children have the rest of the grace to go as well."""
        if self._grace_end is None or self._killed_rest:
            self._grace_end = None
            return True
        tree = self._process.tree
        if tree is None or tree.empty():
            self._grace_end = None
            return True
        return False


def _readable(fd: int) -> int:
    return unpack("i", fcntl.ioctl(fd, _FIONREAD, b"\0\0\0\0"))[0]


class Drain:
    """Reads and forgets what is written after a command is over, so that its surviving children neither block nor
    get SIGPIPE. One thread, started with the first pipe."""

    def __init__(self) -> None:
        self._epoll: Any = None
        self._lock = _thread.allocate_lock()

    def adopt(self, fds: tuple[int, ...]) -> None:
        """Take over these descriptors; they are closed when the other side is."""
        if not fds:
            return
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                _thread.start_new_thread(self._run, (self._epoll,))
        for fd in fds:
            self._epoll.register(fd, select.EPOLLIN)

    def _run(self, epoll: Any) -> None:
        while True:
            for fd, _event in epoll.poll():
                try:
                    data = os.read(fd, _READ)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    epoll.unregister(fd)
                    os.close(fd)
