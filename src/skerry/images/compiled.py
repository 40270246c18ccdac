"""What is compiled: the guest agent's way to start a program (`guest/birth.c`) and the VMM's jail (`files/jail.c`).

The compiler is Debian's tcc, unpacked and run with a C library of its own, so that nothing has to be installed. The
sources need neither headers nor a C library; the results run wherever Linux does.
"""

import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skerry.images.apt import PrivateApt
from skerry.images.cache import Cache, hash_file, key_of
from skerry.images.model import Progress
from skerry.images.process import run

HERE: Final = Path(__file__).parent
PACKAGES: Final = ("libc6", "tcc")
OPTIONS: Final = ("-Wall", "-Werror", "-nostdlib", "-nostdinc")
_E_PHOFF, _E_PHENTSIZE, _PT_GNU_STACK, _PF_READ, _PF_WRITE = 32, 54, 0x6474E551, 4, 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """One source and what is made of it."""

    kind: str
    """Its name in the cache."""
    what: str
    """For a person who waits for it."""
    source: Path
    file: str
    """The name of the result."""
    options: tuple[str, ...]

    def key(self, apt: PrivateApt) -> str | None:
        """None before the archive's index was fetched."""
        index = apt.index()
        if index is None:
            return None
        recipe, source = hash_file(Path(__file__)), hash_file(self.source)
        return key_of({"kind": self.kind, "index": index, "recipe": recipe, "source": source})

    def find(self, cache: Cache, apt: PrivateApt) -> Path | None:
        """The result's path, None where it is not built."""
        key = self.key(apt)
        place = cache.find(self.kind, key) if key else None
        return place / self.file if place else None

    def build(self, cache: Cache, apt: PrivateApt, progress: Progress) -> Path:
        """The result's path. The index must have been fetched. Raises InternalError."""

        def make(work: Path) -> None:
            unpacked, result = work / "unpacked", work / self.file
            apt.unpack(PACKAGES, unpacked, on_line=lambda text: progress.line(self.what, text))
            libraries = unpacked / "usr" / "lib" / "x86_64-linux-gnu"
            compiler = [libraries / "ld-linux-x86-64.so.2", "--inhibit-cache", "--library-path", libraries]
            run(
                [*compiler, unpacked / "usr" / "bin" / "tcc", *OPTIONS, *self.options, "-o", result, self.source],
                timeout=60,
            )
            shutil.rmtree(unpacked)
            result.write_bytes(with_plain_stack(result.read_bytes()))
            result.chmod(0o755)

        key = self.key(apt)
        assert key is not None  # noqa: S101 - the caller has fetched the index
        return cache.build(self.kind, key, make, progress=progress, step=self.what) / self.file


def birth(source: Path = HERE.parent / "guest" / "birth.c") -> Compiled:
    """The compiled half of the guest agent: a library."""
    return Compiled("birth", "the agent's compiled half", source, "libbirth.so", ("-shared",))


def jail(source: Path = HERE / "files" / "jail.c") -> Compiled:
    """What starts a VMM where it can reach nothing but what is its own: a static program."""
    return Compiled("jail", "the jail", source, "jail", ("-static",))


def with_plain_stack(binary: bytes) -> bytes:
    """An ELF file with a header that says that it needs no executable stack (PT_GNU_STACK). tcc writes none, and a C
    library or the kernel takes that for the contrary. The program headers move to the end of the file."""
    data = bytearray(binary)
    (offset,) = struct.unpack_from("<Q", data, _E_PHOFF)
    size, count = struct.unpack_from("<HH", data, _E_PHENTSIZE)
    headers = data[offset : offset + size * count]
    headers += struct.pack("<IIQQQQQQ", _PT_GNU_STACK, _PF_READ | _PF_WRITE, 0, 0, 0, 0, 0, 16)
    data += bytes(-len(data) % 8)
    struct.pack_into("<Q", data, _E_PHOFF, len(data))
    struct.pack_into("<H", data, _E_PHENTSIZE + 2, count + 1)
    return bytes(data + headers)
