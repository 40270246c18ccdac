"""Which pages a process wrote, against a real process that maps a file privately."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.node.memory import pages, ramfile

SIZE = 16 * 1024 * 1024
CHILD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
sum(m[i] for i in range(0, len(m), 4096))          # reading must not count
for page in (0, 1, 2, 100, 4095):
    m[page * 4096 + 7] = 65 + page % 26
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    base = tmp_path / "ram"
    with base.open("wb") as f:
        f.truncate(SIZE)
        f.seek(100 * 4096)
        f.write(os.urandom(8192))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid, base
        process.kill()


EXPECTED = [(0, 3 * 4096), (100 * 4096, 4096), (4095 * 4096, 4096)]


def test_what_was_written_is_found(child: tuple[int, Path]) -> None:
    pid, base = child
    assert [(r.offset, r.size) for r in pages.written(pid, base)] == EXPECTED


def test_an_older_kernels_way_finds_the_same(child: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pid, base = child

    def refuse(*_: object) -> Iterator[tuple[int, int]]:
        raise OSError("no such ioctl")
        yield

    monkeypatch.setattr(pages, "_scan", refuse)
    assert [(r.offset, r.size) for r in pages.written(pid, base)] == EXPECTED


def test_a_composed_file_is_the_base_with_what_was_written(child: tuple[int, Path], tmp_path: Path) -> None:
    pid, base = child
    target = tmp_path / "composed"
    assert ramfile.compose(base, target, pid, pages.written(pid, base)) == 5 * 4096
    wanted = bytearray(base.read_bytes())
    for page in (0, 1, 2, 100, 4095):
        wanted[page * 4096 + 7] = 65 + page % 26
    assert target.read_bytes() == bytes(wanted)
    assert target.stat().st_blocks * 512 < SIZE // 4  # the holes are still holes


def test_a_process_that_does_not_map_the_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        pages.written(os.getpid(), tmp_path / "nothing")
