"""Watches that go on without a connection, and what they saw, with offsets.

A watch has a thread of its own, which reads the kernel's queue and adds to the watch's events; a connection only reads
them. So a watch outlives a broken line, a server and, with the rest of the guest's memory, a pause: whoever comes back
with the offset it has got to misses nothing. What is no longer kept is `watch_overflow`, never a silent gap.
"""

import _thread
import errno
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from skerry.guest import args, linux, paths, protocol
from skerry.guest.conn import Conn, HostGone
from skerry.guest.errors import GuestError, from_os
from skerry.guest.identity import Context
from skerry.guest.watch import Watcher, limit_or

WATCHES_MAX = 512
UNATTENDED_S = 300.0
"""A watch that nobody reads for so long is ended. The guest's clock: time at rest does not count."""
UNREAD_MAX = 64 * 1024
"""Bytes that wait for a reader. Beyond it the kernel's own queue fills, and its overflow is told."""
KEPT_MAX = 512 * 1024
"""Bytes that were sent and are kept for a reader that comes back: more than can be under way on a connection."""
KEPT_ALL = 32 * 1024 * 1024
SETTLE_S = 25.0
_SEND_BUFFER = 64 * 1024
_FRAME = 32 * 1024


class Ended(Exception):
    """The watch was ended, or nobody came back to it."""


class Reader:
    """A connection's place in a watch's events."""

    __slots__ = ("at", "seen", "wake")

    def __init__(self, at: int, seen: int, wake: int) -> None:
        self.at = at
        """Offset of the next event that it gets."""
        self.seen = seen
        """Bytes of all events before that."""
        self.wake = wake


class Watch:
    """One watch. Its own thread adds; others attach, read, and end it."""

    def __init__(self, watch_id: str, keep: Callable[[], int]) -> None:
        self.id = watch_id
        self._keep = keep
        self._changed = threading.Condition(threading.Lock())
        self._events: deque[bytes] = deque()
        self._start = 0  # offset of the first event that is kept
        self._kept = 0
        self._total = 0  # bytes of all events there ever were
        self._delivered = 0  # bytes that the last reader had when it left
        self._readers: set[Reader] = set()
        self._left_at: float | None = time.monotonic()
        self._wake: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._over = False
        self._error: GuestError | None = None
        self._asked = 0  # how often somebody wanted to know that all is told
        self._settled = 0  # and how often it was so

    # --------------------------------------------------------------------------------------------- the watch's thread

    @property
    def wake(self) -> int:
        """Readable once something changed that `patience` depends on."""
        assert self._wake is not None  # noqa: S101 - its thread closes it as its last act
        return self._wake

    def patience(self) -> float | None:
        """Seconds that its thread may wait, None: as long as it likes. Raises Ended."""
        with self._changed:
            return self._patience()

    def _patience(self) -> float | None:
        if self._over:
            raise Ended
        if self._left_at is None:
            return None
        left = self._left_at + UNATTENDED_S - time.monotonic()
        if left <= 0:
            raise Ended
        return left

    def asked(self) -> int:
        """0 where nobody waits for all to be told."""
        with self._changed:
            return self._asked if self._asked > self._settled else 0

    def settled(self, asked: int) -> None:
        """What had changed when `asked` was read has been added."""
        with self._changed:
            self._settled = max(self._settled, asked)
            self._changed.notify_all()

    def add(self, event: dict[str, Any]) -> None:
        """Keep an event. Waits while too much is unread: the kernel's queue goes on filling. Raises Ended."""
        with self._changed:
            while self._total - self._floor() >= UNREAD_MAX:
                self._changed.wait(self._patience())
            data = protocol.dump({**event, "offset": self._start + len(self._events)})
            self._events.append(data)
            self._kept += len(data)
            self._total += len(data)
            self._trim()
            for reader in self._readers:
                os.eventfd_write(reader.wake, 1)

    def _floor(self) -> int:
        """So many bytes every reader has."""
        return min((reader.seen for reader in self._readers), default=self._delivered)

    def _trim(self) -> None:
        keep, floor = self._keep(), self._floor()
        while self._kept > keep and self._total - self._kept + len(self._events[0]) <= floor:
            self._kept -= len(self._events.popleft())
            self._start += 1

    def finish(self, error: GuestError | None) -> None:
        """Its thread is over. `error`: what its readers are told after the last event."""
        with self._changed:
            self._over = True
            self._error = error or self._error
            self._left_at = self._left_at or time.monotonic()
            self._changed.notify_all()
            if self._wake is not None:
                os.close(self._wake)
                self._wake = None
            for reader in self._readers:
                os.eventfd_write(reader.wake, 1)

    # --------------------------------------------------------------------------------------------------------- others

    def end(self) -> None:
        """Nobody wants it any more; its thread ends."""
        with self._changed:
            self._over = True
            self._tell()
            for reader in self._readers:
                os.eventfd_write(reader.wake, 1)

    def settle(self) -> int:
        """The offset after everything that has changed by now. Raises GuestError `guest_busy` where a reader that does
        not read keeps it from being known."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._tell()
            end = time.monotonic() + SETTLE_S
            while self._settled < mine and not self._over:
                left = end - time.monotonic()
                if left <= 0:
                    raise GuestError("Unavailable", "guest_busy", f"watch {self.id} is not being read")
                self._changed.wait(left)
            return self._start + len(self._events)

    def _tell(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def alone_since(self) -> float | None:
        """Since when nobody reads it; None where somebody does."""
        with self._changed:
            return None if self._readers else self._left_at

    def is_forgotten(self) -> bool:
        """It is over, and nobody came to hear how."""
        with self._changed:
            alone = not self._readers and self._left_at is not None
            return self._over and alone and time.monotonic() - (self._left_at or 0.0) > UNATTENDED_S

    def attach(self, offset: int, wake: int) -> Reader:
        """Raises GuestError `watch_overflow` where what came from `offset` on is no longer all kept."""
        with self._changed:
            end = self._start + len(self._events)
            if offset > end:
                raise GuestError(
                    "InvalidRequest", "invalid_request", f"offset: watch {self.id} is at {end}", field="offset"
                )
            if offset < self._start:
                raise overflow(f"watch {self.id} keeps what came from {self._start} on")
            later = sum(map(len, islice(self._events, offset - self._start, None)))
            reader = Reader(offset, self._total - later, wake)
            self._readers.add(reader)
            self._left_at = None
            self._tell()
            return reader

    def detach(self, reader: Reader) -> None:
        with self._changed:
            self._readers.discard(reader)
            if not self._readers:
                self._delivered = reader.seen
                self._left_at = time.monotonic()
            self._tell()

    def next(self, reader: Reader) -> list[bytes]:
        """What the reader has not got yet, a frame's worth at most. Raises GuestError once all was given and it is
        over."""
        with self._changed:
            found: list[bytes] = []
            size = 0
            for event in islice(self._events, reader.at - self._start, None):
                if found and size + len(event) >= _FRAME:
                    break
                found.append(event)
                size += len(event) + 1
            if not found and self._over:
                raise self._error or not_found(self.id)
            return found

    def sent(self, reader: Reader, events: list[bytes]) -> None:
        with self._changed:
            reader.at += len(events)
            reader.seen += sum(map(len, events))
            self._changed.notify_all()


class Watches:
    """All of the sandbox, and the operations on them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = _thread.allocate_lock()
        self._by_id: dict[str, Watch] = {}

    # ------------------------------------------------------------------------------------------------------- operations

    def watch(self, conn: Conn, request: dict[str, Any]) -> None:
        account = self._context.account(args.opt_text(request, "user"))
        hand = self._context.hand(account, request)
        path = paths.resolve(args.text(request, "path"), account)
        recursive = args.flag(request, "recursive")
        watch = self._reserve(args.text(request, "watch_id"))
        try:
            fd = _inotify(path)
            try:
                watcher = Watcher(fd, path, watch, recursive=recursive)
                with linux.acting_as(hand.uid, hand.gid, hand.groups):
                    watcher.arm()
                _thread.start_new_thread(self._run, (watch, watcher, fd, hand))
            except BaseException:
                os.close(fd)
                raise
        except BaseException as e:
            watch.finish(None)
            self._drop(watch)
            if isinstance(e, RuntimeError):
                raise limit_or(OSError(errno.ENOMEM, "no more threads"), path) from None
            raise
        self._serve(conn, watch, 0)

    def attach(self, conn: Conn, request: dict[str, Any]) -> None:
        watch = self._find(args.text(request, "watch_id"))
        self._serve(conn, watch, args.integer({"offset": 0, **request}, "offset"))

    def end(self, conn: Conn, request: dict[str, Any]) -> None:
        watch = self._find(args.text(request, "watch_id"))
        watch.end()
        self._drop(watch)
        conn.ok()

    def settle(self, conn: Conn, request: dict[str, Any]) -> None:
        conn.ok({"offset": self._find(args.text(request, "watch_id")).settle()})

    def end_all(self) -> None:
        """This machine begins a life of its own: what another one watches is not its business."""
        with self._lock:
            watches = list(self._by_id.values())
            self._by_id.clear()
        for watch in watches:
            watch.end()

    # ----------------------------------------------------------------------------------------------------------- inside

    def _keep(self) -> int:
        return min(KEPT_MAX, KEPT_ALL // max(1, len(self._by_id)))

    def _reserve(self, watch_id: str) -> Watch:
        if not 0 < len(watch_id) <= 64 or not watch_id.isascii():
            raise GuestError("InvalidRequest", "invalid_request", "watch_id must be 1 to 64 ASCII characters")
        with self._lock:
            self._purge()
            if watch_id in self._by_id:
                raise GuestError("Conflict", "watch_exists", f"watch {watch_id} was begun before", watch_id=watch_id)
            if len(self._by_id) >= WATCHES_MAX:
                self._make_room()
            try:
                watch = self._by_id[watch_id] = Watch(watch_id, self._keep)
            except OSError as e:
                raise limit_or(e, watch_id) from None
            return watch

    def _make_room(self) -> None:
        """The one that nobody has read for longest goes. Call with the lock held."""
        alone = [(since, w) for w in self._by_id.values() if (since := w.alone_since()) is not None]
        if not alone:
            raise GuestError(
                "Unavailable", "watch_limit", f"{WATCHES_MAX} watches are read already", allowed=WATCHES_MAX
            )
        _, longest = min(alone, key=lambda pair: pair[0])
        longest.end()
        del self._by_id[longest.id]

    def _purge(self) -> None:
        for watch in tuple(self._by_id.values()):
            if watch.is_forgotten():
                del self._by_id[watch.id]

    def _find(self, watch_id: str) -> Watch:
        with self._lock:
            self._purge()
            watch = self._by_id.get(watch_id)
        if watch is None:
            raise not_found(watch_id[:64])
        return watch

    def _drop(self, watch: Watch) -> None:
        with self._lock:
            if self._by_id.get(watch.id) is watch:
                del self._by_id[watch.id]

    def _run(self, watch: Watch, watcher: Watcher, fd: int, hand: Any) -> None:
        """The watch's own thread."""
        error: GuestError | None = GuestError("InternalError", "guest_error", "the watch failed")
        try:
            with linux.acting_as(hand.uid, hand.gid, hand.groups):
                watcher.run()
        except Ended:
            error = None
            self._drop(watch)
        except GuestError as e:
            error = e
        except OSError as e:
            error = from_os(e)
        except Exception:  # noqa: BLE001 - its readers are told; the agent goes on
            traceback.print_exc()
        finally:
            os.close(fd)
            watch.finish(error)

    def _serve(self, conn: Conn, watch: Watch, offset: int) -> None:
        """What the watch saw from `offset` on, as it comes, until it is over or the host has gone."""
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            reader = watch.attach(offset, wake)
            try:
                conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
                conn.ok({"watch_id": watch.id, "offset": offset})
                _read_on(conn, watch, reader)
            except GuestError:
                self._drop(watch)  # its end has been told
                raise
            finally:
                watch.detach(reader)
        finally:
            os.close(wake)


def _read_on(conn: Conn, watch: Watch, reader: Reader) -> None:
    poller = select.poll()
    poller.register(reader.wake, select.POLLIN)
    poller.register(conn.sock.fileno(), select.POLLIN | select.POLLRDHUP)
    while True:
        while events := watch.next(reader):
            conn.send_frame(protocol.ITEMS, b"[" + b",".join(events) + b"]")
            watch.sent(reader, events)
        for fd, _ in poller.poll():
            if fd != reader.wake:
                raise HostGone("reader left")
            os.eventfd_read(fd)


def _inotify(path: str) -> int:
    try:
        return linux.inotify_open()
    except OSError as e:
        raise limit_or(e, path) from None


def overflow(said: str) -> GuestError:
    return GuestError("Conflict", "watch_overflow", f"changes came faster than they were read: look again ({said})")


def not_found(watch_id: str) -> GuestError:
    return GuestError("NotFound", "watch_not_found", f"there is no watch {watch_id}", watch_id=watch_id)
