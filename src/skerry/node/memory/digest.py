"""A digest of a sparse file that reads its data and skips its holes. Blocking."""

import hashlib
import os
from pathlib import Path
from typing import Final

CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(CHUNK)


def digest(file: Path) -> str:
    """SHA-256 over the size and over each chunk of 1 MiB that is not all zeros, with its number.

    It is the same whether zeros are holes or written out.
    """
    total = hashlib.sha256()
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        total.update(size.to_bytes(8, "big"))
        at = _next_data(fd, 0, size)
        while at < size:
            chunk = os.pread(fd, CHUNK, at)
            if not chunk:
                raise OSError(f"{file} became shorter while it was read")
            if chunk != _ZEROS[: len(chunk)]:
                total.update((at // CHUNK).to_bytes(8, "big"))
                total.update(hashlib.sha256(chunk).digest())
            at = _next_data(fd, at + CHUNK, size)
    finally:
        os.close(fd)
    return total.hexdigest()


def _next_data(fd: int, at: int, size: int) -> int:
    """The start of the next chunk, from `at` on, that has data; `size` where there is none."""
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // CHUNK * CHUNK
    except OSError:  # ENXIO: only a hole is left
        return size
