"""Whole trees: removed without following a link, moved to another filesystem. As the thread's user; raises OSError."""

import os
import stat
from collections.abc import Iterator

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_CHUNK = 16 * 1024 * 1024


def temporary_name() -> str:
    """A name beside the file that is to be replaced. Watches do not tell of these."""
    return f".skerry-{os.urandom(8).hex()}"


def is_temporary(name: str) -> bool:
    return len(name) == 24 and name.startswith(".skerry-") and all(c in "0123456789abcdef" for c in name[8:])


class _Level:
    __slots__ = ("fd", "name", "names", "parent")

    def __init__(self, parent: int | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.fd = os.open(name, _OPEN_DIR, dir_fd=parent)
        try:
            self.names: Iterator[str] = iter(os.listdir(self.fd))
        except BaseException:
            os.close(self.fd)
            raise


def remove_tree(path: str) -> None:
    """Remove a file, a link or a whole directory. Goes on where a part resists, and then raises what came first.

    Works on open directories, so that nothing can be swapped for a link on the way."""
    if not _is_dir(None, path):
        os.unlink(path)
        return
    first: OSError | None = None
    stack = [_Level(None, path)]
    try:
        while stack:
            level = stack[-1]
            name = next(level.names, None)
            try:
                if name is None:
                    stack.pop()
                    os.close(level.fd)
                    os.rmdir(level.name, dir_fd=level.parent)
                elif _is_dir(level.fd, name):
                    stack.append(_Level(level.fd, name))
                else:
                    os.unlink(name, dir_fd=level.fd)
            except FileNotFoundError:
                continue
            except OSError as e:
                first = first or e
    finally:
        for level in stack:
            os.close(level.fd)
    if first is not None:
        raise first


def _is_dir(dir_fd: int | None, name: str) -> bool:
    return stat.S_ISDIR(os.lstat(name, dir_fd=dir_fd).st_mode)


def move_across(source: str, target: str) -> None:
    """Copy to a temporary beside the target, rename it there, remove the source. A failure before the rename leaves
    the source alone and nothing beside the target."""
    folder = os.path.dirname(target)
    beside = f"{folder.rstrip('/')}/{temporary_name()}"
    try:
        _copy(source, beside)
        os.rename(beside, target)
    except BaseException:
        if os.path.lexists(beside):
            remove_tree(beside)
        raise
    remove_tree(source)


def _copy(source: str, target: str) -> None:
    pending: list[tuple[str, str]] = [(source, target)]
    folders: list[tuple[str, os.stat_result]] = []
    while pending:
        old, new = pending.pop()
        st = os.lstat(old)
        if stat.S_ISDIR(st.st_mode):
            os.mkdir(new, 0o700)
            folders.append((new, st))
            pending += [(f"{old}/{name}", f"{new}/{name}") for name in os.listdir(old)]
        else:
            _copy_one(old, new, st)
    for new, st in reversed(folders):  # last, for what is put into a directory changes its time
        _dress(new, st)


def _copy_one(old: str, new: str, st: os.stat_result) -> None:
    if stat.S_ISLNK(st.st_mode):
        os.symlink(os.readlink(old), new)
    elif stat.S_ISREG(st.st_mode):
        _copy_bytes(old, new)
    else:
        os.mknod(new, st.st_mode, st.st_rdev)
    _dress(new, st)


def copy_bytes(reading: int, writing: int) -> None:
    """All of one open file to another's current position."""
    at = 0
    while got := os.sendfile(writing, reading, at, _COPY_CHUNK):
        at += got


def _copy_bytes(old: str, new: str) -> None:
    reading = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        writing = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_bytes(reading, writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _dress(path: str, st: os.stat_result) -> None:
    """Owner where the user may, then mode, then times."""
    try:
        os.chown(path, st.st_uid, st.st_gid, follow_symlinks=False)
    except PermissionError:
        st_mode = stat.S_IMODE(st.st_mode) & 0o1777  # not its owner's: no set-id bits either
    else:
        st_mode = stat.S_IMODE(st.st_mode)
    if not stat.S_ISLNK(st.st_mode):
        os.chmod(path, st_mode)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns), follow_symlinks=False)
