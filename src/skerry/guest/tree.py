"""A command and all that it started: found again, signalled, killed.

With cgroup v2 each command has a cgroup of its own, and nothing that it forks can leave it (root may). Without, the
tree is the command's session and its descendants by parent; a grandchild that left both is not found.
"""

import _thread
import os
import signal
import time

_SPARES = 2
_OLD_MAX = 8
"""So many are removed at a time: the kernel's own work after it is then not felt by each command."""
_FREEZE_S = 2.0


class Tree:
    """The process tree of one command. `cgroup` is a directory or None."""

    __slots__ = ("cgroup", "leader")

    def __init__(self, leader: int, cgroup: str | None) -> None:
        self.leader = leader
        self.cgroup = cgroup

    def members(self) -> set[int]:
        """Every live process of it, as far as it can be known."""
        found = _session_and_descendants(self.leader)
        if self.cgroup is not None:
            found |= _cgroup_members(self.cgroup)
        found.discard(os.getpid())
        return found

    def empty(self) -> bool:
        if self.cgroup is not None and _populated(self.cgroup):
            return False
        return not self.members()

    def signal(self, number: int) -> None:
        """The leader first, so that it ends by the signal and not because a child did."""
        members = self.members()
        for pid in sorted(members, key=lambda pid: pid != self.leader):
            _kill(pid, number)

    def kill(self) -> None:
        """SIGKILL for all of it; those that fork meanwhile too."""
        if self.cgroup is not None:
            _write(f"{self.cgroup}/cgroup.kill", b"1")
        for _ in range(64):
            found = self.members()
            if not found:
                return
            for pid in found:
                _kill(pid, signal.SIGKILL)


class Cgroup:
    """One command's, open, so that the command can be born in it. Never used for a second one: whoever is late with
    a signal must not meet another command."""

    __slots__ = ("fd", "path")

    def __init__(self, path: str) -> None:
        os.mkdir(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def remove(self) -> bool:
        """False while something lives in it."""
        if not _remove(self.path):
            return False
        os.close(self.fd)
        return True


class Cgroups:
    """Hands out one cgroup per command and removes those that are empty again. Some are made ahead of their use."""

    def __init__(self, root: str | None) -> None:
        self._root = root
        self._serial = 0
        self._spare: list[Cgroup] = []
        self._old: list[Cgroup] = []
        self._lock = _thread.allocate_lock()
        self.refill()

    def take(self) -> Cgroup | None:
        with self._lock:
            spare = self._spare.pop() if self._spare else None
        if spare is None or not os.path.exists(spare.path):  # the guest's root may have removed it
            return self._make()
        return spare

    def freeze(self, *, on: bool) -> bool:
        """Let every command stand still, or go on. False where that cannot be done, or not within two seconds."""
        if self._root is None:
            return False
        _write(f"{self._root}/cgroup.freeze", b"1" if on else b"0")
        deadline = time.monotonic() + _FREEZE_S
        while on and time.monotonic() < deadline:
            with open(f"{self._root}/cgroup.events", encoding="ascii") as f:
                if "frozen 1" in f.read():
                    return True
            time.sleep(0.002)
        return not on

    def put_back(self, cgroup: Cgroup | None) -> None:
        """Its command is over, or never began; survivors may still live in it."""
        if cgroup is not None:
            with self._lock:
                self._old.append(cgroup)

    def refill(self) -> None:
        """Make the next ones, and once in a while remove old ones. Called when nobody waits for an answer."""
        while len(self._spare) < _SPARES:
            made = self._make()
            if made is None:
                return
            with self._lock:
                self._spare.append(made)
        with self._lock:
            if len(self._old) < _OLD_MAX:
                return
            batch, self._old = self._old[:_OLD_MAX], self._old[_OLD_MAX:]
        busy = [cgroup for cgroup in batch if not cgroup.remove()]
        with self._lock:
            self._old += busy

    def close(self) -> None:
        """Remove what is empty; for an agent that is not the whole machine."""
        with self._lock:
            rest, self._old, self._spare = [*self._old, *self._spare], [], []
        for cgroup in rest:
            cgroup.remove()

    def _make(self) -> Cgroup | None:
        if self._root is None:
            return None
        with self._lock:
            self._serial += 1
            path = f"{self._root}/c{self._serial}"
        try:
            return Cgroup(path)
        except OSError:
            return None


def _cgroup_members(cgroup: str) -> set[int]:
    return set(_numbers(f"{cgroup}/cgroup.procs")) - {0}


def _numbers(path: str) -> list[int]:
    try:
        with open(path, "rb", buffering=0) as f:
            return [int(n) for n in f.read(1024 * 1024).split()]
    except (OSError, ValueError):
        return []


def _populated(cgroup: str) -> bool:
    try:
        with open(f"{cgroup}/cgroup.events", "rb", buffering=0) as f:
            return b"populated 1" in f.read(4096)
    except OSError:
        return False


def _session_and_descendants(leader: int) -> set[int]:
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as f:
                # The name in parentheses may hold anything, the rest may not.
                fields = f.read(4096).rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 3 and fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
            sessions[int(name)] = int(fields[3])
    found = {pid for pid, session in sessions.items() if session == leader or pid == leader}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grown = bool(more)
    return found


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


def _write(path: str, data: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(cgroup: str) -> bool:
    try:
        os.rmdir(cgroup)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
