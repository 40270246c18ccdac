"""What the machine has left."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    total_mb: int
    available_mb: int


def memory(text: str | None = None) -> Memory:
    """From /proc/meminfo."""
    fields = dict(
        line.split(":", 1) for line in (text or Path("/proc/meminfo").read_text()).splitlines() if ":" in line
    )
    return Memory(*(int(fields[name].split()[0]) // 1024 for name in ("MemTotal", "MemAvailable")))


def disk_free_mb(path: Path) -> int:
    """Of the filesystem of `path`, or of its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize >> 20
