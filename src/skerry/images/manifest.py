"""What is in a tree, as lines that two builds can be compared by."""

import hashlib
import os
import stat
from pathlib import Path

from skerry.images.cache import hash_file


def list_files(tree: Path) -> list[str]:
    """A line for each entry: type, mode, owner, size and content hash (or a link's target), path; in path order.

    Times are not in it: only what a program in the guest could tell two builds apart by, its content and rights.
    """
    lines: list[str] = []
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            kind = stat.filemode(status.st_mode)
            if stat.S_ISREG(status.st_mode):
                what = f"{status.st_size} {hash_file(path)}"
            elif stat.S_ISLNK(status.st_mode):
                what = f"-> {path.readlink()}"
            else:
                what = "-"
            lines.append(f"/{path.relative_to(tree)}\t{kind}\t{status.st_uid}:{status.st_gid}\t{what}\n")
    return sorted(lines)


def listing_hash(lines: list[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
