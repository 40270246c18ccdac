"""What a server's sandboxes have left on this machine, by the kernel's own lists and not by Skerry's."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True)
class Leftovers:
    """Everything that belongs to the server with this data directory. Subtracting gives what is new."""

    processes: frozenset[str] = field(default_factory=frozenset)
    namespaces: frozenset[str] = field(default_factory=frozenset)
    cgroups: frozenset[str] = field(default_factory=frozenset)
    mounts: frozenset[str] = field(default_factory=frozenset)
    files: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, data_dir: Path) -> Self:
        data_dir = data_dir.resolve()
        tag = instance(data_dir)
        return cls(
            processes=frozenset(f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in vms(data_dir)),
            namespaces=frozenset(p.name for p in Path("/run/netns").glob(f"*{tag}*")),
            cgroups=frozenset(str(p) for p in Path("/sys/fs/cgroup").glob(f"**/*{tag}*/*") if p.is_dir()),
            mounts=frozenset(m for m in Path("/proc/self/mountinfo").read_text().split() if tag in m),
            files=frozenset(map(str, set((data_dir / "node").glob("*/*")) - kept_templates(data_dir / "node"))),
        )

    def __sub__(self, other: "Leftovers") -> "Leftovers":
        return Leftovers(*(getattr(self, f) - getattr(other, f) for f in self.__dataclass_fields__))


def kept_templates(node: Path) -> set[Path]:
    """The memory images of templates and their disk layers: a node keeps them, and they are nobody's."""
    kept = set(node.glob("images/tm*"))
    manifests = [json.loads((image / "manifest.json").read_text()) for image in kept]
    return kept | {node / "layers" / f"{layer}.qcow2" for manifest in manifests for layer in manifest["layers"]}


def instance(data_dir: Path) -> str:
    """What stands in the name of everything that a server makes outside its data directory."""
    return hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:6]


def vms(data_dir: Path) -> list[psutil.Process]:
    """VM processes work in a directory below the data directory."""
    data_dir, found = data_dir.resolve(), []
    for process in psutil.process_iter(["name", "cwd", "status"]):
        cwd, status = process.info["cwd"] or "", process.info["status"]
        if (
            process.info["name"].startswith("qemu")
            and status != psutil.STATUS_ZOMBIE
            and Path(cwd).is_relative_to(data_dir)
        ):
            found.append(process)
    return found
