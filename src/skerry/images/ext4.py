"""ext4 images from directory trees, without mounting anything."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images.process import run

EPOCH: Final = 1_735_689_600
"""2025-01-01T00:00:00Z: the time of everything we make, in seconds."""
BLOCK: Final = 4096
MKE2FS_SECONDS: Final = 900


def mke2fs_argv(image: Path, tree: Path, *, label: str, uuid: str, size_kb: int, options: Sequence[str]) -> list[str]:
    """The command line. UUID and hash seed are fixed, so that the same tree gives the same layout."""
    return [
        "mke2fs", "-q", "-F", "-t", "ext4", "-b", str(BLOCK), "-m", "0", "-L", label, "-U", uuid,
        "-E", f"hash_seed={uuid},root_owner=0:0,lazy_itable_init=0",
        *options, "-d", str(tree), str(image), f"{size_kb}k",
    ]  # fmt: skip


def make(image: Path, tree: Path, *, label: str, uuid: str, size_kb: int, options: Sequence[str]) -> None:
    """Make `image` (sparse) from `tree`. Raises InternalError, also where the tree does not fit."""
    times = {"E2FSPROGS_FAKE_TIME": str(EPOCH), "SOURCE_DATE_EPOCH": str(EPOCH)}
    path = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    argv = mke2fs_argv(image, tree, label=label, uuid=uuid, size_kb=size_kb, options=options)
    run(argv, timeout=MKE2FS_SECONDS, env=times | path)


def needed_kb(tree: Path) -> int:
    """A size in KiB that holds the tree: its blocks, an inode for each entry, and some room for ext4's own tables."""
    blocks = entries = 0
    for directory, names, files in os.walk(tree):
        entries += len(names) + len(files)
        blocks += 1
        for name in files:
            status = os.lstat(Path(directory, name))
            blocks += -(-status.st_size // BLOCK)
    return (blocks * BLOCK * 21 // 20 + entries * 256) // 1024 + 2048


def set_times(tree: Path) -> None:
    """Give everything in the tree the same modification time."""
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            os.utime(Path(directory, name), (EPOCH, EPOCH), follow_symlinks=False)
    os.utime(tree, (EPOCH, EPOCH))


def require_root() -> None:
    """Raises InternalError (`needs_root`): files of other owners can only be made by root."""
    if os.geteuid() != 0:
        raise InternalError("building images needs root: run it with sudo", code="needs_root")
