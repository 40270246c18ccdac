"""How the machine is doing, from /proc."""

import _thread
import os
import time
from typing import Any

from skerry.guest.conn import Conn


class Metrics:
    """CPU use is of the time since it was last asked (the first answer: since the machine came up)."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._last = (0, 0)

    def answer(self, conn: Conn, _request: dict[str, Any]) -> None:
        conn.ok({"metrics": self.read()})

    def read(self) -> dict[str, Any]:
        busy, total = cpu_ticks(_text("/proc/stat"))
        with self._lock:
            last_busy, last_total = self._last
            self._last = (busy, total)
        passed = total - last_total
        memory = memory_bytes(_text("/proc/meminfo"))
        disk = os.statvfs("/")
        return {
            "at_ms": time.time_ns() // 1_000_000,
            "uptime_s": float(_text("/proc/uptime").split()[0]),
            "cpu_count": os.cpu_count() or 1,
            "cpu_used_pct": round(min(100.0, max(0.0, 100.0 * (busy - last_busy) / passed)), 2) if passed > 0 else 0.0,
            "load_1m": float(_text("/proc/loadavg").split()[0]),
            "memory_total_bytes": memory.get("MemTotal", 0),
            "memory_used_bytes": memory.get("MemTotal", 0) - memory.get("MemAvailable", 0),
            "memory_cache_bytes": memory.get("Cached", 0) + memory.get("Buffers", 0),
            "disk_total_bytes": disk.f_blocks * disk.f_frsize,
            "disk_used_bytes": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "processes": sum(1 for name in os.listdir("/proc") if name.isdigit()),
        }


def cpu_ticks(stat: str) -> tuple[int, int]:
    """(busy, total) ticks of all CPUs. Guest time is part of user time; idle and iowait are not busy."""
    ticks = [int(n) for n in stat.split("\n", 1)[0].split()[1:9]]
    total = sum(ticks)
    return total - sum(ticks[3:5]), total


def memory_bytes(meminfo: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return values


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as f:
        return f.read()
