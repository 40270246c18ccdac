"""A cgroup per sandbox: bounds that hold whatever the VMM does. v2, or v1 where that is mounted.

Memory and CPU have to be there; the disk and the number of tasks are bounded where the host can."""

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from skerry.core.errors import InternalError

ROOT: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 100_000
DEVICE_SHARE: Final = 1.0
"""CPU on top of the guest's own, for the VMM's device threads: without it a busy guest starves its own disk, and a long
transfer is held up by the bound. The guest's own part is bounded by its vCPUs anyway."""
WAITING_WEIGHT: Final = 0.1
"""Of a VM that nobody has asked for yet, against one that is somebody's."""
TASKS_MAX: Final = 256
"""Of a VMM: its vCPUs and the threads that work for its devices, 64 at the most."""
REMOVE_DEADLINE_S: Final = 10.0
NEEDED: Final = ("memory", "cpu")
WANTED: Final = {1: ("blkio", "pids"), 2: ("io", "pids")}
"""Used where they are there, by version."""
OPTIONAL: Final = frozenset({"memory.swap.max", "io.max", "pids.max"})
"""Files of v2 that a kernel without swap accounting or a host without those controllers does not have."""


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int
    cpu: int
    waiting: bool = False
    """It gives way to the others where they need the CPU."""
    disk_bytes_per_s: int = 0
    """Read, and as much again written. 0: unbounded."""
    disk_operations_per_s: int = 0


def disk_of(path: Path) -> str:
    """The whole disk that a path's filesystem is on, as the kernel numbers it: "254:0". "" where it is on none, or on
    several."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    whole = block.resolve().parent if (block / "partition").exists() else block
    try:
        return (whole / "dev").read_text().strip()
    except OSError:
        return ""


def settings(version: int, controller: str, limits: Limits, disk: str = "") -> dict[str, str]:
    """File name -> what to write in it. Pure. `controller` is v1's, or "" for v2's one directory. A `disk` of "" is not
    bounded."""
    quota = int((limits.cpu + DEVICE_SHARE) * PERIOD_US)
    weight = limits.cpu * (WAITING_WEIGHT if limits.waiting else 1.0)
    if version == 2:
        return {
            "memory.max": str(limits.memory_bytes),
            "memory.swap.max": "0",
            "cpu.max": f"{quota} {PERIOD_US}",
            "cpu.weight": str(min(10_000, int(100 * weight))),
            "pids.max": str(TASKS_MAX),
            **_disk(2, limits, disk),
        }
    if controller == "memory":
        return {"memory.limit_in_bytes": str(limits.memory_bytes)}
    if controller == "pids":
        return {"pids.max": str(TASKS_MAX)}
    if controller == "blkio":
        return _disk(1, limits, disk)
    return {
        "cpu.cfs_period_us": str(PERIOD_US),
        "cpu.cfs_quota_us": str(quota),
        "cpu.shares": str(int(1024 * weight)),
    }


def _disk(version: int, limits: Limits, disk: str) -> dict[str, str]:
    bounds = {"bps": limits.disk_bytes_per_s, "iops": limits.disk_operations_per_s}
    if not disk or not any(bounds.values()):
        return {}
    if version == 2:
        words = [f"{way}{what}={bound or 'max'}" for what, bound in bounds.items() for way in ("r", "w")]
        return {"io.max": " ".join([disk, *words])}
    ways = ("read", "write")
    return {f"blkio.throttle.{way}_{what}_device": f"{disk} {n}" for what, n in bounds.items() for way in ways}


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host keeps the controllers we need: `roots` maps a controller ("" in v2) to its mount point."""

    version: Literal[0, 1, 2]
    roots: dict[str, Path]
    problem: str | None = None
    """Why cgroups cannot be used; `version` is then 0."""


def detect(mounts: str | None = None) -> Hierarchies:
    """What the host has. Reads; changes nothing."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    roots: dict[str, Path] = {}
    for line in text.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            controllers = Path(point) / "cgroup.controllers"
            if controllers.exists() and set(NEEDED) <= set(controllers.read_text().split()):
                return Hierarchies(2, {"": Path(point)})
        elif kind == "cgroup":
            for controller in (*NEEDED, *WANTED[1]):
                if controller in options.split(","):
                    roots[controller] = Path(point)
    if set(NEEDED) <= set(roots):
        return Hierarchies(1, roots)
    missing = " and ".join(c for c in NEEDED if c not in roots)
    return Hierarchies(0, {}, f"no mounted cgroup hierarchy has the {missing} controller")


class Cgroups:
    """The cgroups of one server: `skerry-INSTANCE/NAME` in each hierarchy. Its methods block for microseconds."""

    def __init__(self, instance: str, disk: str = "") -> None:
        """`disk`: what `disk_of` gives for where the VMs' disks are."""
        self._parent = f"skerry-{instance}"
        self._disk = disk
        self.hierarchies = detect()
        if self.hierarchies.version:
            try:
                self._open()
            except OSError as error:
                self.hierarchies = Hierarchies(0, {}, f"cgroups cannot be made: {error}")

    @property
    def usable(self) -> bool:
        return self.hierarchies.version != 0

    def _open(self) -> None:
        for root in self.hierarchies.roots.values():
            parent = root / self._parent
            if self.hierarchies.version == 2:
                enable(root)
            parent.mkdir(exist_ok=True)
            if self.hierarchies.version == 2:
                enable(parent)

    def _paths(self, name: str) -> dict[str, Path]:
        return {c: root / self._parent / name for c, root in self.hierarchies.roots.items()}

    def create(self, name: str, limits: Limits) -> tuple[Path, ...]:
        """Returns the `cgroup.procs` files a process has to write itself into. Empty where there are no cgroups."""
        try:
            for path in self._paths(name).values():
                path.mkdir(exist_ok=True)
            return self._apply(name, limits)
        except OSError as error:
            self.remove(name)
            raise InternalError(f"the cgroup could not be made: {error}", step="cgroup") from error

    def change(self, name: str, limits: Limits) -> None:
        """Other bounds for what is in it. Raises InternalError."""
        try:
            self._apply(name, limits)
        except OSError as error:
            raise InternalError(f"the cgroup could not be changed: {error}", step="cgroup") from error

    def _apply(self, name: str, limits: Limits) -> tuple[Path, ...]:
        procs: list[Path] = []
        for controller, path in self._paths(name).items():
            for file, value in settings(self.hierarchies.version, controller, limits, self._disk).items():
                if file in OPTIONAL and not (path / file).exists():
                    continue
                (path / file).write_text(value)
            procs.append(path / "cgroup.procs")
        return tuple(procs)

    def remove(self, name: str) -> None:
        """Kill what is left in it and remove it. Idempotent. Raises InternalError if it stays."""
        deadline = time.monotonic() + REMOVE_DEADLINE_S
        for path in self._paths(name).values():
            while not _try_remove(path):
                if time.monotonic() > deadline:
                    raise InternalError(f"cgroup {path} cannot be removed: it is busy", step="cgroup")
                time.sleep(0.005)

    def names(self) -> set[str]:
        """Of this server's cgroups, whoever made them."""
        found: set[str] = set()
        for root in self.hierarchies.roots.values():
            with contextlib.suppress(FileNotFoundError):
                found |= {p.name for p in (root / self._parent).iterdir() if p.is_dir()}
        return found

    def close(self) -> None:
        """Remove our parent directory if it is empty."""
        for root in self.hierarchies.roots.values():
            with contextlib.suppress(OSError):
                (root / self._parent).rmdir()


def enable(directory: Path) -> None:
    """Pass the controllers on to the children of a v2 cgroup."""
    there = set((directory / "cgroup.controllers").read_text().split())
    wanted = [*NEEDED, *(c for c in WANTED[2] if c in there)]
    file = directory / "cgroup.subtree_control"
    if not set(wanted) <= set(file.read_text().split()):
        file.write_text(" ".join(f"+{controller}" for controller in wanted))


def _try_remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise InternalError(f"cgroup {path} cannot be removed: {error}", step="cgroup") from error
        with contextlib.suppress(FileNotFoundError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        return False
    return True
