"""The seam between the engine and a virtual machine monitor.

A driver knows processes and devices; it does not know sandboxes, tenants or networks' meaning. The engine hands it a
`VmSpec` in which every path and the network namespace already exist, and keeps the `VmHandle` it gets back: with that
alone a driver in a new server process can find the VM again.
"""

from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    name: str
    """Such as "qemu"."""
    version: str
    accelerator: str
    """"kvm" or "tcg"."""
    memory_snapshots: bool


@dataclass(frozen=True, slots=True)
class MemoryImage:
    """A machine's memory at rest: what `save` makes and `start` restores."""

    ram: Path
    """As large as the guest's memory, sparse. Clones map it copy-on-write: it is never written again."""
    devices: Path
    """The VMM's own format; the saving and the restoring VMM, its version and its devices must match."""

    @classmethod
    def below(cls, directory: Path) -> "MemoryImage":
        return cls(directory / "ram", directory / "devices")


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save went."""

    written_bytes: int
    """Of guest memory, since it was booted or restored."""
    timings_ms: dict[str, float]
    """Each step, and `stood_still` for the time in which the vCPUs did not run."""


@dataclass(frozen=True, slots=True)
class VmSpec:
    """One VM. Everything named here exists before `start` is called, except the files in `run_dir`."""

    vm_id: str
    cpu: int
    memory_mb: int
    kernel: Path
    initramfs: Path
    disk: Path
    """qcow2 overlay, /dev/vda in the guest: the one file that the VMM writes."""
    agent_image: Path
    """Read-only, /dev/vdb in the guest."""
    run_dir: Path
    """For the driver: monitor socket, console log, RAM file."""
    netns: str
    """Name of the network namespace that holds the tap."""
    tap: str
    cmdline: dict[str, str] = field(default_factory=dict)
    """Extra `skerry.*` kernel arguments."""
    cgroup_procs: tuple[Path, ...] = ()
    """`cgroup.procs` files that the VMM process has to be put in before it runs."""
    disk_bytes_per_s: int = 0
    """How much is read of the disk and as much again written, in a second; 0: unbounded."""
    disk_operations_per_s: int = 0
    grown_disk: bool = False
    """With `restore`: the disk is larger than it was when the memory was saved, and the guest has to be told."""
    backing: tuple[Path, ...] = ()
    """Every file below `disk`: the layers under it and their base."""
    restore: MemoryImage | None = None
    """Come up from this instead of booting. `cpu`, `memory_mb` and the devices must be those it was saved with."""


@dataclass(frozen=True, slots=True)
class VmHandle:
    """What survives a server: kept in the journal, understood by its driver alone. `version` is the format's."""

    driver: str
    version: int
    vm_id: str
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class VmExit:
    """How a VM process ended. `guest_shutdown` is true where the guest asked for it (poweroff, reboot, panic)."""

    guest_shutdown: bool
    guest_panicked: bool
    detail: str


class VmDriver(Protocol):
    """A VMM. All methods are safe to call concurrently for different VMs."""

    @property
    def capabilities(self) -> Capabilities: ...

    def machine(self, cpu: int, memory_mb: int) -> dict[str, str]:
        """What has to be the same where a memory image is saved and where it is restored, each part by name."""
        ...

    async def start(self, spec: VmSpec) -> VmHandle:
        """Boot, or restore. On failure nothing runs.

        A booted VM's vCPUs run when this returns; the guest may still be booting. A restored one is complete and
        stands still: `resume` lets it run.
        """
        ...

    async def save(self, handle: VmHandle, target: MemoryImage, *, layer: Path | None, go_on: bool) -> Saved:
        """Write the memory and devices of a running or paused VM to `target`, whose files must not exist.

        `layer`: an empty disk layer over the VM's present one; from the moment of the save on the VM writes there, and
        the present one belongs to the image. `go_on`: let the vCPUs run afterwards; else they stand still.
        On failure nothing of `target` is left and the vCPUs are as they were before.
        """
        ...

    async def save_disk(self, handle: VmHandle, *, layer: Path | None, go_on: bool) -> Saved:
        """Like `save`, for the disk alone: what the VM wrote until now is in its layers' files."""
        ...

    async def stop(self, handle: VmHandle) -> None:
        """End it at once, whatever it does. Returns when the process is gone. No error if it is gone already."""
        ...

    async def recover(self, handle: VmHandle) -> bool:
        """Find the VM of a handle after a restart of the server. False: it is gone (nothing is left of it)."""
        ...

    async def sweep(self, run_root: Path, keep: Collection[int]) -> list[int]:
        """End every VMM process of this driver whose `run_dir` lies in `run_root` and whose pid is not in `keep`.

        For a server that died between starting a VM and writing down its handle. Returns the pids it ended.
        """
        ...

    async def console(self, handle: VmHandle) -> bytes:
        """The end of the serial console, at most 64 KiB. After the VM's end it is what was known, until `stop`."""
        ...

    async def release(self) -> None:
        """Let go of every VM without touching it: close connections and watches. The VMs run on."""
        ...

    def wait(self, handle: VmHandle) -> Awaitable[VmExit]:
        """Ends when the VM does. May be called often; the VM must have been started or recovered here."""
        ...

    def pid(self, handle: VmHandle) -> int: ...

    async def pause(self, handle: VmHandle) -> None:
        """Stop the vCPUs. Idempotent."""
        ...

    async def resume(self, handle: VmHandle) -> None:
        """Let the vCPUs run. Idempotent."""
        ...
