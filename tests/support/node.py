"""What tests of the engine share: images, agents that are always there, and a count of what is left."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry import images
from skerry.core.errors import NotFound, SkerryError
from skerry.core.models import Identity
from skerry.egress.upstream import Upstream
from skerry.images.model import AgentImage, ImageSet, KernelImage, TemplateImage, Toolchain
from skerry.node.agents import OpenSocket
from skerry.node.config import NodeConfig
from skerry.node.engine import Engine
from skerry.node.net import namespace
from skerry.node.process import working_below
from skerry.node.vmm.qemu.driver import QemuDriver
from support.machine import kept_templates


def cache_dir() -> Path:
    return images.default_cache_dir()


def empty_images(directory: Path, *, disk_mb: int = 2048) -> ImageSet:
    """Images that no VM could boot, for a driver that starts none."""
    directory.mkdir(parents=True, exist_ok=True)
    disk = directory / "disk.ext4"
    with disk.open("wb") as file:
        file.truncate(disk_mb << 20)
    template = TemplateImage("t", "base", {disk_mb: disk}, directory / "manifest.json", "root", "", {})
    kernel = KernelImage("k", directory / "vmlinuz", directory / "initramfs", "0")
    for artefact in (kernel.vmlinuz, kernel.initramfs, directory / "agent.ext4"):
        artefact.touch()
    toolchain = Toolchain(Path("/nonexistent/qemu"), Path("/nonexistent/qemu-img"), (0, 0, 0), "path")
    return ImageSet(
        kernel, AgentImage("a", directory / "agent.ext4"), {"base": template}, toolchain, directory / "jail"
    )


@dataclass
class StubLink:
    """An agent that agrees to everything: for tests in which no guest runs."""

    agents: "StubAgents"
    sandbox_id: str
    identity: Identity | None = None
    ended: SkerryError | None = None
    frozen: bool = False
    gone: Callable[[], SkerryError | None] = lambda: None

    async def identify(self, identity: Identity) -> None:
        await self.agents.before_identify()
        self.identity = identity

    async def freeze(self, *, sync: bool) -> bool:
        await self.agents.before_freeze()
        self.frozen = True
        return True

    async def thaw(self) -> None:
        self.frozen = False

    async def processes(self) -> list[Any]:
        if self.agents.processes_error is not None:
            raise self.agents.processes_error
        return []

    def abort(self, error: SkerryError | None = None) -> None:
        self.ended = error


@dataclass
class StubAgents:
    links: dict[str, StubLink] = field(default_factory=dict)
    processes_error: SkerryError | None = None
    up: bool = True

    async def before_identify(self) -> None:
        """For tests to replace."""

    async def before_freeze(self) -> None:
        """For tests to replace."""

    def link(self, sandbox_id: str, open_socket: OpenSocket, *, token: str | None, generation: int) -> Any:
        self.links[sandbox_id] = StubLink(self, sandbox_id)
        return self.links[sandbox_id]

    async def reachable(self, open_socket: OpenSocket) -> None:
        with open_socket() as one:
            assert one.type == socket.SOCK_STREAM
        if not self.up:
            await asyncio.Event().wait()


@dataclass(frozen=True)
class Left:
    """Everything of one data directory that is on the machine. `nothing` after a test that ended well."""

    processes: tuple[int, ...]
    namespaces: tuple[str, ...]
    cgroups: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of(cls, config: NodeConfig) -> "Left":
        groups = [
            p for c in ("memory", "cpu", ".") for p in Path("/sys/fs/cgroup", c).glob(f"skerry-{config.instance}/*/")
        ]
        files = set(config.state_dir.glob("*/*")) - kept_templates(config.state_dir)
        return cls(
            tuple(working_below(config.vms_dir)),
            tuple(namespace.names(f"sk-{config.instance}-")),
            tuple(sorted(map(str, groups))),
            tuple(sorted(str(p.name) for p in files)),
        )

    @property
    def nothing(self) -> bool:
        return not (self.processes or self.namespaces or self.cgroups or self.files)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def built_images(directory: Path) -> ImageSet:
    """The images, with what this version of the code is missing built first."""
    try:
        return images.load(directory)
    except NotFound:
        return images.build(directory, images.Silent())


def vm_engine(config: NodeConfig, *, upstream: Upstream | None = None) -> Engine:
    """An engine that boots real, emulated microVMs."""
    found = built_images(config.cache_dir)
    return Engine(config, QemuDriver(found.toolchain, "tcg", found.jail), found, upstream=upstream)
