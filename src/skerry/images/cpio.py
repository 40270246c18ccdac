"""A cpio archive (newc, what the kernel unpacks as initramfs) from bytes, the same for the same input."""

import stat
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One member. Owned by root, with a time of zero."""

    path: str
    """Relative, without a leading slash."""
    mode: int
    """Type and permission bits."""
    data: bytes = b""
    device: tuple[int, int] = (0, 0)
    """Major and minor, for device nodes."""


def directory(path: str, mode: int = 0o755) -> Entry:
    return Entry(path, stat.S_IFDIR | mode)


def regular(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def symlink(path: str, target: str) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def char_device(path: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(path, stat.S_IFCHR | mode, device=(major, minor))


def _member(entry: Entry, inode: int) -> bytes:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (
        inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0,
    )  # fmt: skip
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    return _padded(head) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def archive(entries: Iterable[Entry]) -> bytes:
    """The archive, members in the order of their paths, so that a directory comes before what is in it."""
    members = [_member(entry, inode) for inode, entry in enumerate(sorted(entries, key=lambda e: e.path), start=1)]
    return b"".join(members) + _member(Entry("TRAILER!!!", 0), 0)
