"""What the artefacts are, and how a build says what it does. Plain data: no I/O here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from skerry.core.errors import InvalidRequest


class Progress(Protocol):
    """Hears what a build does. Called from the building thread, in order; must not raise.

    A step is started once and done once; one that fails is never done: the exception says what happened.
    """

    def started(self, step: str) -> None: ...

    def line(self, step: str, text: str) -> None:
        """Something worth reading about a step that runs: one line without its line feed."""
        ...

    def done(self, step: str, seconds: float) -> None: ...


class Silent:
    """A Progress that says nothing."""

    def started(self, step: str) -> None:
        pass

    def line(self, step: str, text: str) -> None:
        pass

    def done(self, step: str, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A QEMU and the qemu-img that belongs to it."""

    qemu: Path
    """The `qemu-system-x86_64` binary."""
    qemu_img: Path
    version: tuple[int, int, int]
    source: str
    """"host" (the machine's own), "backports" (unpacked in the cache, not installed), or "path" (named by hand)."""
    args: tuple[str, ...] = ()
    """Arguments that every run of `qemu` needs first, such as `-L DIR`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment that every run of either program needs on top of what it gets otherwise."""
    root: Path | None = None
    """Directory that must be readable for it to run, where that is not the host's own /usr."""

    @property
    def argv(self) -> tuple[str, ...]:
        """How a command line starts."""
        return (str(self.qemu), *self.args)

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class KernelImage:
    """The kernel every guest boots, and the initramfs that mounts its disks and starts the agent."""

    key: str
    vmlinuz: Path
    initramfs: Path
    release: str
    """Such as "6.12.48+deb13-cloud-amd64"."""


@dataclass(frozen=True, slots=True)
class AgentImage:
    """The guest agent with its own interpreter: a read-only ext4 image, /dev/vdb in the guest."""

    key: str
    image: Path


@dataclass(frozen=True, slots=True)
class Start:
    """What runs in every sandbox of a template, from before the first one was made: it is part of the memory image that
    they are clones of."""

    command: str
    """A shell text. It may run for ever, or end with exit code 0."""
    ready: str | None = None
    """A shell text that is run again and again until it exits with 0: the template is then ready. None: at once."""
    user: str | None = None
    """Who both run as; None: the template's default user."""
    ready_timeout_s: int = 120
    """On an idle host; grows with the host's load, at most fourfold."""


@dataclass(frozen=True, slots=True)
class TemplateImage:
    """A root filesystem: a raw ext4 image, never written to, the base of qcow2 overlays (/dev/vda in the guest)."""

    key: str
    name: str
    disks: Mapping[int, Path]
    """By size in MB, as the guest sees it; the files are sparse and hold the same tree."""
    manifest: Path
    """JSON: what is in it (packages, hash of the file list) and how it is to be used (user, directory, environment)."""
    default_user: str
    default_cwd: str
    env: Mapping[str, str]
    cpu: int | None = None
    """For sandboxes whose creator names none; None: everybody's default."""
    memory_mb: int | None = None
    start: Start | None = None

    @property
    def disk(self) -> Path:
        """The image of the default size: the largest."""
        return self.disks[max(self.disks)]

    def disk_for(self, disk_mb: int) -> tuple[Path, int]:
        """The image to put an overlay of `disk_mb` on, and its own size in MB: the largest that is not larger.

        Where it is smaller than `disk_mb`, the filesystem in it has to be grown by the guest. Raises InvalidRequest.
        """
        fitting = [size for size in self.disks if size <= disk_mb]
        if not fitting:
            raise InvalidRequest.of("disk_mb", "is too small for this template", given=disk_mb, allowed=min(self.disks))
        return self.disks[max(fitting)], max(fitting)


@dataclass(frozen=True, slots=True)
class ImageSet:
    """All that is needed to boot a guest."""

    kernel: KernelImage
    agent: AgentImage
    templates: Mapping[str, TemplateImage]
    toolchain: Toolchain
    jail: Path
    """The program that starts a VMM where it can reach nothing but what is its own."""
