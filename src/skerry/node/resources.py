"""What a node makes sandboxes of, and how all that one sandbox holds is taken away again."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from skerry.core.errors import InternalError, SkerryError
from skerry.images.model import ImageSet
from skerry.node.aio import finish, in_thread, log
from skerry.node.cgroup import Cgroups
from skerry.node.config import NodeConfig
from skerry.node.journal import Entry, Journal
from skerry.node.memory.keep import Keep
from skerry.node.net import namespace
from skerry.node.net.slots import Slot, SlotPool
from skerry.node.net.wall import Wall, Walls
from skerry.node.trust import Trust
from skerry.node.vmm.driver import VmDriver, VmHandle

STEP_DEADLINE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Resources:
    config: NodeConfig
    images: ImageSet
    driver: VmDriver
    slots: SlotPool
    cgroups: Cgroups
    journal: Journal
    keep: Keep
    walls: Walls
    trust: Trust = field(default_factory=Trust)

    @property
    def artefacts(self) -> dict[str, str]:
        """Paths of what a guest is booted with now."""
        return {
            "kernel": str(self.images.kernel.vmlinuz),
            "initramfs": str(self.images.kernel.initramfs),
            "agent": str(self.images.agent.image),
        }


@dataclass(slots=True)
class Held:
    """What one VM holds beside its disk. Filled in as it comes up."""

    vm_id: str
    netns: str | None = None
    slot: Slot | None = None
    handle: VmHandle | None = None
    wall: Wall | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What was looked up so far."""
        return self.wall.names if self.wall is not None else ()

    @classmethod
    def of(cls, entry: Entry) -> "Held":
        return cls(entry.vm_id, entry.netns, None, entry.handle)


async def take_down(resources: Resources, held: Held) -> list[SkerryError]:
    """Remove a VM and all it holds, last made first; its disk layers and memory image stay. Idempotent, runs to its end
    when cancelled, tries every step. Returns what failed."""
    return await finish(_take_down(resources, held))


async def dismantle(resources: Resources, sandbox_id: str, held: Held) -> list[SkerryError]:
    """Remove everything of a sandbox. Like `take_down`, and where something failed, the journal's entry stays, so that
    it is tried again."""
    return await finish(_dismantle(resources, sandbox_id, held))


async def _dismantle(resources: Resources, sandbox_id: str, held: Held) -> list[SkerryError]:
    failed = await _take_down(resources, held)
    if not failed:
        try:
            await in_thread(resources.keep.drop, sandbox_id)
            await in_thread(resources.journal.remove, sandbox_id)
        except SkerryError as error:
            failed.append(error)
            log.error("a part of a sandbox could not be removed", sandbox=sandbox_id, error=str(error))
    return failed


async def _take_down(resources: Resources, held: Held) -> list[SkerryError]:
    directory = resources.config.vms_dir / held.vm_id

    async def vm() -> None:
        if held.handle is not None:
            await resources.driver.stop(held.handle)
            held.handle = None

    async def network() -> None:
        if held.wall is not None:
            wall, held.wall = held.wall, None
            await wall.aclose()
        if held.slot is not None:
            slot, held.slot = held.slot, None
            await in_thread(resources.slots.remove, slot)
        elif held.netns is not None:
            await in_thread(namespace.delete, held.netns)
        held.netns = None

    def remove_directory() -> None:
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InternalError(f"{directory} cannot be removed: {error}", step="disk") from error

    steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("vmm", vm),
        ("cgroup", lambda: in_thread(resources.cgroups.remove, held.vm_id)),
        ("netns", network),
        ("disk", lambda: in_thread(remove_directory)),
    ]
    failed: list[SkerryError] = []
    for step, act in steps:
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                await act()
        except SkerryError as error:
            failed.append(error)
        except TimeoutError:
            failed.append(InternalError(f"removing took longer than {STEP_DEADLINE_S:.0f} s", step=step))
    for error in failed:
        log.error("a part of a VM could not be removed", vm=held.vm_id, error=str(error))
    return failed
