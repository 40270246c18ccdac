"""What the agent says when it cannot do a thing: the names are those of `skerry.core.errors`, resolved by the host."""

import errno
from typing import Any

ERROR_NAMES = frozenset(
    {"InvalidRequest", "Forbidden", "NotFound", "Conflict", "TooLarge", "Unavailable", "NoSpace", "InternalError"}
)


class GuestError(Exception):
    """One typed refusal. `name` is a class of `skerry.core.errors`."""

    def __init__(self, name: str, code: str, message: str, **context: Any) -> None:
        super().__init__(message)
        self.name = name
        self.code = code
        self.message = message
        self.context = context

    def as_dict(self) -> dict[str, Any]:
        context = {k: v if isinstance(v, (int, float, bool)) else str(v)[:512] for k, v in self.context.items()}
        return {"error": self.name, "code": self.code, "message": self.message[:2000], "context": context}


_BY_ERRNO: dict[int, tuple[str, str, str]] = {
    errno.ENOENT: ("NotFound", "path_not_found", "does not exist"),
    errno.EACCES: ("Forbidden", "permission_denied", "permission denied"),
    errno.EPERM: ("Forbidden", "permission_denied", "operation not permitted"),
    errno.EROFS: ("Forbidden", "permission_denied", "the filesystem is read-only"),
    errno.ENOSPC: ("NoSpace", "no_space", "no space left on the guest's disk"),
    errno.EDQUOT: ("NoSpace", "no_space", "the disk quota is used up"),
    errno.ENOTDIR: ("Conflict", "not_a_directory", "a part of the path is not a directory"),
    errno.EISDIR: ("Conflict", "is_a_directory", "is a directory"),
    errno.ENOTEMPTY: ("Conflict", "directory_not_empty", "the directory is not empty"),
    errno.EEXIST: ("Conflict", "path_exists", "exists already"),
    errno.ELOOP: ("Conflict", "symlink_loop", "too many symbolic links"),
    errno.ENAMETOOLONG: ("InvalidRequest", "path_too_long", "the path or a name in it is too long"),
    errno.EINVAL: ("InvalidRequest", "invalid_request", "is not possible"),
    errno.EBUSY: ("Conflict", "path_busy", "is in use"),
    errno.ETXTBSY: ("Conflict", "path_busy", "is a program that is running"),
    errno.EFBIG: ("TooLarge", "too_large", "is too large for the filesystem"),
    errno.EMFILE: ("Unavailable", "guest_busy", "too many open files"),
    errno.ENFILE: ("Unavailable", "guest_busy", "too many open files"),
    errno.ENOMEM: ("Unavailable", "guest_busy", "the guest is out of memory"),
    errno.EAGAIN: ("Unavailable", "guest_busy", "the guest is out of a resource"),
}


def from_os(e: OSError, path: str | None = None) -> GuestError:
    """The refusal for what a system call said. `path` is what was asked for, not what the agent made of it."""
    name, code, said = _BY_ERRNO.get(e.errno or 0, ("InternalError", "guest_io_error", (e.strerror or str(e)).lower()))
    shown = show(path) if path is not None else "the operation"
    return GuestError(name, code, f"{shown}: {said}", path=shown, errno=errno.errorcode.get(e.errno or 0, str(e.errno)))


def show(path: str, limit: int = 200) -> str:
    """A path as it may stand in a message: printable, and not endless."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    text = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
