"""RAM files: sparse files of a guest's memory, made from a base and what was written since.

Everything here blocks: call it in a thread.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from skerry.node.memory import pages

_FICLONE: Final = 0x40049409
_CHUNK: Final = 1 << 24


def clone(base: Path, target: Path) -> None:
    """A copy of `base` that has its holes: shared blocks where the filesystem can (XFS, btrfs), else copied data.

    `target` must not exist. On failure it is removed.
    """
    source = os.open(base, os.O_RDONLY)
    try:
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _clone(source, copy)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(copy)
    finally:
        os.close(source)


def _clone(source: int, copy: int) -> None:
    try:
        fcntl.ioctl(copy, _FICLONE, source)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EXDEV}:
            raise
    else:
        return
    size = os.fstat(source).st_size
    os.truncate(copy, size)
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # holes to the end
                return
            raise
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            copied = os.copy_file_range(source, copy, min(_CHUNK, at - start), start, start)
            if not copied:
                raise OSError(errno.EIO, "the base RAM file ended early")
            start += copied


def compose(base: Path, target: Path, pid: int, runs: list[pages.Run]) -> int:
    """`base` with a stopped process's written pages over it, as `target`, on disk when this returns. Bytes written."""
    clone(base, target)
    fd = os.open(target, os.O_RDWR)
    try:
        size = pages.copy(pid, runs, fd)
        os.fsync(fd)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return size
