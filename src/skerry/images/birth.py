"""The compiled half of the guest agent's way to start a program: `guest/birth.c`, made into `libbirth.so`.

The compiler is Debian's tcc, unpacked and run with a C library of its own, so that nothing has to be installed. The
source needs neither headers nor a C library; the result loads wherever the agent runs, in a guest or on a host.
"""

import shutil
import struct
from pathlib import Path
from typing import Final

from skerry.images.apt import PrivateApt
from skerry.images.cache import Cache, hash_file, key_of
from skerry.images.model import Progress
from skerry.images.process import run

SOURCE: Final = Path(__file__).parent.parent / "guest" / "birth.c"
LIBRARY: Final = "libbirth.so"
PACKAGES: Final = ("libc6", "tcc")
_E_PHOFF, _E_PHENTSIZE, _PT_GNU_STACK, _PF_READ, _PF_WRITE = 32, 54, 0x6474E551, 4, 2
OPTIONS: Final = ("-Wall", "-Werror", "-nostdlib", "-nostdinc", "-shared")


def birth_key(apt: PrivateApt, source: Path = SOURCE) -> str | None:
    """None before the archive's index was fetched."""
    index = apt.index()
    if index is None:
        return None
    parts = {"kind": "birth", "index": index, "recipe": hash_file(Path(__file__)), "source": hash_file(source)}
    return key_of(parts)


def find_birth(cache: Cache, apt: PrivateApt, source: Path = SOURCE) -> Path | None:
    """The library's path, None where it is not built."""
    key = birth_key(apt, source)
    place = cache.find("birth", key) if key else None
    return place / LIBRARY if place else None


def build_birth(cache: Cache, apt: PrivateApt, progress: Progress, source: Path = SOURCE) -> Path:
    """The library's path. The index must have been fetched. Raises InternalError."""
    step = "the agent's compiled half"

    def make(work: Path) -> None:
        unpacked = work / "unpacked"
        apt.unpack(PACKAGES, unpacked, on_line=lambda text: progress.line(step, text))
        libraries = unpacked / "usr" / "lib" / "x86_64-linux-gnu"
        compiler = [libraries / "ld-linux-x86-64.so.2", "--inhibit-cache", "--library-path", libraries]
        run([*compiler, unpacked / "usr" / "bin" / "tcc", *OPTIONS, "-o", work / LIBRARY, source], timeout=60)
        shutil.rmtree(unpacked)
        library = work / LIBRARY
        library.write_bytes(with_plain_stack(library.read_bytes()))

    key = birth_key(apt, source)
    assert key is not None  # noqa: S101 - the caller has fetched the index
    return cache.build("birth", key, make, progress=progress, step=step) / LIBRARY


def with_plain_stack(library: bytes) -> bytes:
    """An ELF library with a header that says that it needs no executable stack (PT_GNU_STACK). tcc writes none, and a
    C library takes that for the contrary and refuses it. The program headers move to the end of the file."""
    data = bytearray(library)
    (offset,) = struct.unpack_from("<Q", data, _E_PHOFF)
    size, count = struct.unpack_from("<HH", data, _E_PHENTSIZE)
    headers = data[offset : offset + size * count]
    headers += struct.pack("<IIQQQQQQ", _PT_GNU_STACK, _PF_READ | _PF_WRITE, 0, 0, 0, 0, 0, 16)
    data += bytes(-len(data) % 8)
    struct.pack_into("<Q", data, _E_PHOFF, len(data))
    struct.pack_into("<H", data, _E_PHENTSIZE + 2, count + 1)
    return bytes(data + headers)
