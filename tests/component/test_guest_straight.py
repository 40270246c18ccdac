"""Long files past the page cache hold what was written, on filesystems that can and on those that cannot."""

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest

from skerry.guest import straight
from skerry.guest.straight import BLOCK, PIECE_BYTES

PLACES = pytest.mark.parametrize("place", ["disk", "memory"])
SIZES = (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 77)


def opened(tmp_path: Path, place: str) -> int:
    return os.open(tmp_path if place == "disk" else Path("/dev/shm"), os.O_RDWR | os.O_TMPFILE, 0o600)


class Source:
    """Gives `data` as `write` wants it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read_into(self, view: memoryview) -> int:
        part = self._data[self._at : self._at + len(view)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)


@PLACES
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_where_it_was_written(tmp_path: Path, place: str, size: int) -> None:
    data = random.Random(size).randbytes(size)
    fd = opened(tmp_path, place)
    try:
        assert straight.write(fd, Source(data).read_into) == size
        assert os.pread(fd, size + 1, 0) == data
    finally:
        os.close(fd)


def refusing(error: int, real: object) -> object:
    """A system call that fails so where the file is open for the straight way."""

    def call(fd: int, *args: object) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(error, os.strerror(error))
        return real(fd, *args)  # type: ignore[operator,no-any-return]

    return call


def test_a_filesystem_that_has_no_such_way_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(1).randbytes(3 * PIECE_BYTES + 5)
    monkeypatch.setattr(os, "write", refusing(errno.EINVAL, os.write))
    fd = opened(tmp_path, "disk")
    try:
        assert straight.write(fd, Source(data).read_into) == len(data)
        assert os.pread(fd, len(data) + 1, 0) == data
    finally:
        os.close(fd)


def test_a_full_disk_is_told() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            straight.write(full, Source(b"x" * 10).read_into)
    finally:
        os.close(full)


@PLACES
@pytest.mark.parametrize("offset", [0, 1, BLOCK, PIECE_BYTES - 1, PIECE_BYTES + BLOCK + 1])
@pytest.mark.parametrize("beyond", [-BLOCK - 1, 0, 10])
def test_what_is_read_is_what_is_there(tmp_path: Path, place: str, offset: int, beyond: int) -> None:
    data = random.Random(2).randbytes(2 * PIECE_BYTES + 12_345)
    fd = opened(tmp_path, place)
    try:
        os.pwrite(fd, data, 0)
        length = len(data) - offset + beyond
        got = b"".join(bytes(piece) for piece in straight.pieces(fd, offset, length))
        assert got == data[offset : offset + length]
    finally:
        os.close(fd)


def test_what_cannot_be_read_straight_is_left_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = opened(tmp_path, "disk")
    try:
        os.pwrite(fd, b"x" * 100, 0)
        monkeypatch.setattr(os, "preadv", refusing(errno.EINVAL, os.preadv))
        assert list(straight.pieces(fd, 0, 100)) == []
        monkeypatch.setattr(os, "preadv", refusing(errno.EIO, os.preadv))
        with pytest.raises(OSError, match="Input/output error"):
            list(straight.pieces(fd, 0, 100))
    finally:
        os.close(fd)
