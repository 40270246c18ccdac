"""A file as E2B's clients see it: `EntryInfo`."""

from typing import Final

from protobuf.wkt import Timestamp

from skerry.api.e2b.gen import filesystem_pb as pb
from skerry.core.models import FileInfo, FileKind

METADATA: Final = "user.e2b."
"""What stands before a metadata key in the name of its extended attribute."""
_TYPES: Final = {FileKind.FILE: pb.FileType.FILE, FileKind.DIRECTORY: pb.FileType.DIRECTORY}
_LETTERS: Final = {
    FileKind.DIRECTORY: "d",
    FileKind.SYMLINK: "L",
    FileKind.FIFO: "p",
    FileKind.SOCKET: "S",
    FileKind.BLOCK_DEVICE: "D",
    FileKind.CHAR_DEVICE: "Dc",
}


def plain(text: str) -> str:
    """A text as protobuf can carry it: bytes that are not UTF-8 become replacement characters."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def entry(info: FileInfo) -> pb.EntryInfo:
    """`info` is in detail. A link has the type of what it leads to, and everything else of itself."""
    link = info.kind is FileKind.SYMLINK
    kind = info.resolved_kind if link else info.kind
    seconds, nanos = divmod(info.mtime_ns, 1_000_000_000)
    told = pb.EntryInfo(
        name=plain(info.name),
        type=pb.FileType.UNSPECIFIED if kind is None else _TYPES.get(kind, pb.FileType.UNSPECIFIED),
        path=plain(info.path),
        size=info.size,
        mode=info.mode & 0o777,
        permissions=permissions(info.kind, info.mode),
        owner=info.owner,
        group=info.group,
        modified_time=Timestamp(seconds=seconds, nanos=nanos),
        metadata=metadata(info),
        is_symlink=link,
    )
    if link:
        told.symlink_target = plain(info.resolved or "")
    return told


def metadata(info: FileInfo) -> dict[str, str]:
    found = info.xattrs or {}
    return {name.removeprefix(METADATA): plain(value) for name, value in found.items() if name.startswith(METADATA)}


def permissions(kind: FileKind, mode: int) -> str:
    """As Go writes them: "-rw-r--r--", "drwxr-xr-x", "dtrwxrwxrwx"."""
    letters = _LETTERS.get(kind, "")
    head, device, character = letters[:1], letters == "Dc", letters[1:]
    special = "".join(letter for bit, letter in ((0o4000, "u"), (0o2000, "g")) if mode & bit)
    special += character if device else ""
    special += "t" if mode & 0o1000 else ""
    bits = "".join(letter if mode & (1 << (8 - at)) else "-" for at, letter in enumerate("rwxrwxrwx"))
    return f"{head + special or '-'}{bits}"
