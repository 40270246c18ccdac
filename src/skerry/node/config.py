"""What an operator decides about a node."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

AcceleratorChoice = Literal["auto", "kvm", "tcg"]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    data_dir: Path
    """State that must survive the server: the journal, disks, the lock."""
    cache_dir: Path
    """Built artefacts and verdicts of probes; may be thrown away."""
    node_id: str = "local"
    accelerator: AcceleratorChoice = "auto"
    """`auto` asks a boot probe; the other two are believed."""
    qemu: Path | None = None
    """Another `qemu-system-x86_64` than the one the images come with."""
    max_sandboxes: int = 200
    memory_share: float = 1.5
    """Sum of all guests' memory, as a share of the host's. Above 1 is overcommitment: a guest costs what it touches."""
    memory_floor_mb: int = 512
    """No sandbox is created while the host has less than this available."""
    disk_floor_mb: int = 512
    """No sandbox is created while the data directory's filesystem has less than this free: its guest could not boot."""
    disk_mb_per_s: int = 400
    """How much each sandbox reads, and how much it writes, of its disk in a second. 0: unbounded."""
    disk_operations_per_s: int = 20_000
    """How often. 0: unbounded."""
    egress_connections: int = 1000
    """Through a sandbox's relay, at a time."""
    egress_connections_per_s: int = 1000
    """New ones. 0: unbounded."""
    egress_mb_per_s: int = 0
    """Of all of a sandbox's connections together, both ways. 0: unbounded."""
    slots: int = 2
    """Network slots kept ready."""
    boot_deadline_s: float = 60.0
    """From the start of a VM to its agent's answer on an idle host; grows with the host's load, at most fourfold."""
    boots_at_once: int = 0
    """VMs that boot at the same time; others wait. 0: twice the host's CPUs."""

    pool_floor: int = 1
    """Warm clones of the default template and shape that are kept ready even if nobody asks. 0: no pool."""
    pool_ceiling: int = 10
    """Warm clones of one template and shape, at the most, however many are asked for."""
    template_images: int = 8
    """Memory images of templates, one per shape, that are kept; the one that was not used for longest goes first."""

    trust_dir: Path | None = None
    """Guests trust the certificates in its `.crt` files beside the public ones."""
    egress_upstream_allow: tuple[str, ...] = ()
    """Networks that are not public and may be reached all the same: registries within a company's network."""
    egress_private_allow: tuple[str, ...] = ()
    """What is not public and may be reached where a policy's rule names it itself."""
    egress_allow: tuple[str, ...] = ()
    """The operator's own rules: where their tunnels lead may be reached."""
    egress_proxy: str | None = field(default=None, repr=False)
    """URL of an HTTP proxy that all connections go through but those to private services."""

    @property
    def instance(self) -> str:
        """Tag of this data directory: in the name of everything the node makes outside it."""
        return hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:6]

    @property
    def state_dir(self) -> Path:
        return self.data_dir.resolve() / "node"

    @property
    def journal_dir(self) -> Path:
        return self.state_dir / "journal"

    @property
    def vms_dir(self) -> Path:
        """One directory per sandbox: disk, RAM file, monitor socket."""
        return self.state_dir / "vms"
