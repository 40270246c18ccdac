"""The pages of a RAM file that a process wrote through a private mapping of it.

A clone's RAM is a private copy-on-write mapping of its image's RAM file. What the clone wrote is then exactly the pages
of that mapping which are anonymous: present or swapped out, and no longer backed by the file. The kernel tells which:
by the PAGEMAP_SCAN ioctl (Linux 6.7 and later, straight to ranges), else by one 8-byte entry a page in
/proc/PID/pagemap. Both: Documentation/admin-guide/mm/pagemap.rst.

The process must stand still while it is looked at. Everything here blocks; sizes and offsets are bytes.
"""

import array
import ctypes
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = 4096

_PRESENT: Final = 1 << 63
_SWAPPED: Final = 1 << 62
_FILE_BACKED: Final = 1 << 61

_SCAN_FILE: Final = 1 << 2
_SCAN_PRESENT: Final = 1 << 3
_SCAN_SWAPPED: Final = 1 << 4
_SCAN_RANGES: Final = 1024


class _Region(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64))


class _ScanArguments(ctypes.Structure):
    """struct pm_scan_arg of linux/fs.h."""

    _fields_ = (
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("walk_end", ctypes.c_uint64),
        ("vec", ctypes.c_uint64),
        ("vec_len", ctypes.c_uint64),
        ("max_pages", ctypes.c_uint64),
        ("category_inverted", ctypes.c_uint64),
        ("category_mask", ctypes.c_uint64),
        ("category_anyof_mask", ctypes.c_uint64),
        ("return_mask", ctypes.c_uint64),
    )


_PAGEMAP_SCAN: Final = 0xC0006610 | ctypes.sizeof(_ScanArguments) << 16  # _IOWR('f', 16, struct pm_scan_arg)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A stretch of a process's address space that maps `file` from `offset` on."""

    start: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """Written pages in a row: at `address` in the process, at `offset` in the RAM file."""

    address: int
    offset: int
    size: int


def mappings(pid: int, file: Path) -> list[Mapping]:
    """Where a process maps `file`, by offset. Raises LookupError if it does not."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == str(file):
            start, end = (int(x, 16) for x in parts[0].split("-"))
            found.append(Mapping(start, end, int(parts[2], 16)))
    if not found:
        raise LookupError(f"process {pid} does not map {file}")
    return sorted(found, key=lambda m: m.offset)


def written(pid: int, file: Path) -> list[Run]:
    """What the process wrote in its private mapping of `file`, in the order of offsets."""
    runs = []
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        for mapping in mappings(pid, file):
            for start, end in _ranges(fd, mapping):
                runs.append(Run(start, mapping.offset + start - mapping.start, end - start))
    finally:
        os.close(fd)
    return runs


def copy(pid: int, runs: list[Run], target: int, *, chunk: int = 1 << 20) -> int:
    """Write the runs at their offsets into the file descriptor `target`. Returns how many bytes."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for run in runs:
            for at in range(0, run.size, chunk):
                data = os.pread(memory, min(chunk, run.size - at), run.address + at)
                if not data:
                    raise OSError(f"process {pid}: memory at {run.address + at:#x} cannot be read")
                view = memoryview(data)
                while view:
                    view = view[os.pwrite(target, view, run.offset + at + len(data) - len(view)) :]
    finally:
        os.close(memory)
    return sum(run.size for run in runs)


def _ranges(pagemap: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    try:
        yield from _scan(pagemap, mapping)
    except OSError:  # a kernel older than 6.7
        yield from _read(pagemap, mapping)


def _scan(pagemap: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    regions = (_Region * _SCAN_RANGES)()
    at = mapping.start
    while at < mapping.end:
        arguments = _ScanArguments(
            size=ctypes.sizeof(_ScanArguments),
            start=at,
            end=mapping.end,
            vec=ctypes.addressof(regions),
            vec_len=_SCAN_RANGES,
            category_inverted=_SCAN_FILE,
            category_mask=_SCAN_FILE,
            category_anyof_mask=_SCAN_PRESENT | _SCAN_SWAPPED,
            return_mask=_SCAN_PRESENT,
        )
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arguments)
        for region in regions[:count]:
            yield region.start, region.end
        at = arguments.walk_end


def _read(pagemap: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    pages = (mapping.end - mapping.start) // PAGE
    entries = array.array("Q")
    entries.frombytes(os.pread(pagemap, pages * 8, mapping.start // PAGE * 8))
    start: int | None = None
    for page, entry in enumerate(entries):
        is_written = entry & (_PRESENT | _SWAPPED) and not entry & _FILE_BACKED
        if is_written and start is None:
            start = page
        elif not is_written and start is not None:
            yield mapping.start + start * PAGE, mapping.start + page * PAGE
            start = None
    if start is not None:
        yield mapping.start + start * PAGE, mapping.end
