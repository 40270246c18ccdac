"""Changes below a directory, by inotify.

Where they go to may make us wait; the kernel's queue fills meanwhile, and its overflow ends the watch with
`watch_overflow`. New directories are watched as they appear, and what is in them by then is told as created.
"""

import errno
import os
import select
from struct import Struct
from typing import Any, Protocol

from skerry.guest import linux
from skerry.guest.errors import GuestError, from_os
from skerry.guest.trees import is_temporary

_MODIFY, _ATTRIB, _FROM, _TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_MASK = _MODIFY | _ATTRIB | _FROM | _TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _EXCL_UNLINK
_KIND = {_MODIFY: "write", _ATTRIB: "chmod", _CREATE: "create", _DELETE: "remove"}
_EVENT = Struct("iIII")
_READ = 32 * 1024
_PARTNER_MS = 20
"""How long the second half of a rename may take to follow the first."""

Event = tuple[int, int, int, str]


class Sink(Protocol):
    """Where a watcher puts what it sees. Its own kind of end is an exception that passes through the watcher."""

    @property
    def wake(self) -> int: ...

    def patience(self) -> float | None: ...

    def asked(self) -> int: ...

    def settled(self, asked: int) -> None: ...

    def add(self, event: dict[str, Any]) -> None: ...


class Watcher:
    """Paths are relative to the root; the root's own is ""."""

    def __init__(self, fd: int, root: str, sink: Sink, *, recursive: bool) -> None:
        self._fd = fd
        self._root = root
        self._sink = sink
        self._recursive = recursive
        self._paths: dict[int, str] = {}
        self._told: dict[str, int] = {}
        """What was told as created because it was found in a new directory, with the batch it was found in."""
        self._batch = 0
        self._root_wd = -1

    def arm(self) -> None:
        try:
            self._root_wd = linux.inotify_add(self._fd, os.fsencode(self._root), _MASK)
        except OSError as e:
            raise limit_or(e, self._root) from None
        self._paths[self._root_wd] = ""
        if self._recursive:
            self._descend("", tell=False)

    def run(self) -> None:
        """For ever: it ends by what the sink raises, or by GuestError."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._sink.wake, select.POLLIN)
        while True:
            patience = self._sink.patience()
            for fd, _ in poller.poll(None if patience is None else patience * 1000 + 1):
                if fd == self._fd:
                    self._handle(self._read())
                else:
                    os.eventfd_read(fd)
                    asked = self._sink.asked()
                    while asked and (events := self._read()):
                        self._handle(events)
                    self._sink.settled(asked)

    # ------------------------------------------------------------------------------------------------------- reading

    def _read(self) -> list[Event]:
        events = self._parse()
        open_halves = {c for _, m, c, _ in events if m & _FROM} - {c for _, m, c, _ in events if m & _TO}
        if open_halves:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            if poller.poll(_PARTNER_MS):
                events += self._parse()
        return events

    def _parse(self) -> list[Event]:
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return []
        events: list[Event] = []
        at = 0
        while at < len(data):
            wd, mask, cookie, size = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            events.append((wd, mask, cookie, os.fsdecode(data[at : at + size].rstrip(b"\0"))))
            at += size
        return events

    # ------------------------------------------------------------------------------------------------------ handling

    def _handle(self, events: list[Event]) -> None:
        self._batch += 1
        self._told = {p: b for p, b in self._told.items() if b >= self._batch - 2}
        hidden = {c for _, m, c, n in events if m & (_FROM | _TO) and is_temporary(n)}
        pairs = ({c for _, m, c, _ in events if m & _FROM} & {c for _, m, c, _ in events if m & _TO}) - hidden
        left: dict[int, str] = {}
        for wd, mask, cookie, name in events:
            if mask & _OVERFLOW:
                raise GuestError("Conflict", "watch_overflow", "changes came faster than they were read: look again")
            if wd == self._root_wd and mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED):
                raise GuestError("NotFound", "path_not_found", f"{self._root} is gone", path=self._root)
            if mask & (_IGNORED | _UNMOUNT):
                self._paths.pop(wd, None)
                continue
            folder = self._paths.get(wd)
            if folder is None or not name or is_temporary(name):
                continue  # a directory speaks for itself only through its parent
            path = f"{folder}/{name}" if folder else name
            self._tell(path, mask, cookie if cookie in pairs else 0)
            if mask & _ISDIR and self._recursive:
                self._follow(path, mask, cookie, left, paired=cookie in pairs)

    def _tell(self, path: str, mask: int, cookie: int) -> None:
        is_dir = bool(mask & _ISDIR)
        if mask & _FROM:
            kind = "rename_from"
        elif mask & _TO:
            kind = "rename_to"
        else:
            kind = _KIND[mask & (_MODIFY | _ATTRIB | _CREATE | _DELETE)]
            if kind == "create" and self._told.pop(path, None) is not None:
                return
        self._sink.add({"kind": kind, "path": path, "is_dir": is_dir, "cookie": cookie})

    def _follow(self, path: str, mask: int, cookie: int, left: dict[int, str], *, paired: bool) -> None:
        """A directory came, went or was renamed: watch it, forget it, or know it by its new path."""
        if mask & _FROM:
            if paired:
                left[cookie] = path
            else:
                self._forget(path)
        elif mask & _TO and cookie in left:
            self._rename(left.pop(cookie), path)
        elif mask & (_CREATE | _TO):
            self._adopt(path)
        elif mask & _ATTRIB and not self._watched(path):
            self._adopt(path)  # it may be readable by now

    def _watched(self, path: str) -> bool:
        """Whether it is, by asking the kernel for the same watch again: its number is then a known one."""
        try:
            wd = linux.inotify_add(self._fd, os.fsencode(f"{self._root}/{path}"), _MASK | _DONT_FOLLOW)
        except OSError:
            return True  # there is nothing to be had of it now either
        known = wd in self._paths
        if not known:
            self._paths[wd] = path
        return known

    def _rename(self, old: str, new: str) -> None:
        for wd, path in self._paths.items():
            if path == old or path.startswith(f"{old}/"):
                self._paths[wd] = new + path[len(old) :]

    def _forget(self, old: str) -> None:
        for wd, path in tuple(self._paths.items()):
            if path == old or path.startswith(f"{old}/"):
                del self._paths[wd]
                linux.inotify_remove(self._fd, wd)

    def _adopt(self, path: str) -> None:
        if self._add(path):
            self._descend(path, tell=True)

    def _descend(self, path: str, *, tell: bool) -> None:
        stack = [path]
        while stack:
            folder = stack.pop()
            for name, is_dir in _entries(f"{self._root}/{folder}" if folder else self._root):
                if is_temporary(name):
                    continue
                inner = f"{folder}/{name}" if folder else name
                if tell:
                    self._told[inner] = self._batch
                    self._sink.add({"kind": "create", "path": inner, "is_dir": is_dir, "cookie": 0})
                if is_dir and self._add(inner):
                    stack.append(inner)

    def _add(self, path: str) -> bool:
        """False where it is gone again or may not be read: then there is nothing to be told of it."""
        try:
            wd = linux.inotify_add(self._fd, os.fsencode(f"{self._root}/{path}"), _MASK | _DONT_FOLLOW)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.ENOMEM):
                raise limit_or(e, self._root) from None
            return False
        self._paths[wd] = path
        return True


def _entries(path: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(path) as entries:
            return sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
    except OSError:
        return []


def limit_or(e: OSError, path: str) -> GuestError:
    if e.errno in (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return GuestError(
            "Unavailable", "watch_limit", f"{path}: the guest has no more inotify watches", path=path,
            errno=errno.errorcode[e.errno or 0],
        )  # fmt: skip
    return from_os(e, path)
