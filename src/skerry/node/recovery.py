"""What a starting node does about what an earlier one left: takes up the VMs that live, removes the rest."""

import asyncio
import shutil
from dataclasses import dataclass, field, replace
from typing import Final

from skerry.core.errors import GuestUnreachable, InternalError, OutcomeUnknown, SkerryError, Unavailable
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import in_thread, log
from skerry.node.contract import NodePaused
from skerry.node.journal import Entry
from skerry.node.memory.rest import describe
from skerry.node.net import namespace
from skerry.node.net.slots import Slot
from skerry.node.net.wall import Wall
from skerry.node.resources import Held, Resources, dismantle, take_down
from skerry.node.vmm.driver import VmHandle

PING_DEADLINE_S: Final = 5.0
AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Adopted:
    entry: Entry
    handle: VmHandle
    slot: Slot
    link: AgentLink
    wall: Wall


@dataclass(slots=True)
class Recovered:
    adopted: list[Adopted] = field(default_factory=list)
    paused: list[tuple[Entry, NodePaused]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    """Ids or names of what was an orphan and is gone."""


async def recover(resources: Resources, agents: Agents) -> Recovered:
    """Call it before anything new is made. Orphans that cannot be removed are logged and left for the next time."""
    result = Recovered()
    gate = asyncio.Semaphore(AT_ONCE)
    entries = {name: await in_thread(resources.journal.read, name) for name in await in_thread(resources.journal.names)}
    known = [entry for entry in entries.values() if entry is not None]
    claimed = {entry.vm_id for entry in known if entry.phase != "pool"}
    result.removed += await in_thread(resources.keep.open, known)

    async def one(name: str, entry: Entry | None) -> None:
        async with gate:
            if entry is not None and entry.phase == "pool" and entry.vm_id in claimed:
                await in_thread(resources.journal.remove, name)  # it became a sandbox the moment before
                await in_thread(resources.keep.drop, name)
            elif entry is not None and entry.phase in {"paused", "resuming"}:
                result.paused.append(await _rest(resources, entry))
            elif entry is not None and (adopted := await _adopt(resources, agents, entry)) is not None:
                result.adopted.append(adopted)
            else:
                await dismantle(resources, name, Held.of(entry) if entry is not None else Held(name))
                result.removed.append(name)

    async with asyncio.TaskGroup() as group:
        for name, entry in entries.items():
            group.create_task(one(name, entry))
    result.removed += await _sweep(resources, result.adopted)
    return result


async def _rest(resources: Resources, entry: Entry) -> tuple[Entry, NodePaused]:
    """A paused sandbox, or one whose resume was cut off: what is left of a VM goes, and the layer that it wrote."""
    await take_down(resources, Held.of(entry))
    if entry.phase == "resuming":
        entry = replace(entry, phase="paused", layers=entry.layers[:-1], handle=None, netns=None)
        entry = await in_thread(_as_its_image_knows, resources, entry)
        await in_thread(resources.journal.write, entry)
        await in_thread(resources.keep.hold, entry)
        await in_thread(resources.keep.collect)
    return entry, await in_thread(describe, resources, entry, {})


def _as_its_image_knows(resources: Resources, entry: Entry) -> Entry:
    """A resume that was to boot had already put its memory aside: that guest knows what its image says."""
    if entry.image is None or entry.token is not None:
        return entry
    try:
        manifest = resources.keep.find(entry.image)
    except SkerryError:  # the next resume says so
        return entry
    return replace(entry, artefacts=manifest.artefacts, token=manifest.token, generation=manifest.generation)


async def _adopt(resources: Resources, agents: Agents, entry: Entry) -> Adopted | None:
    """None: it is not a running sandbox any more."""
    if entry.phase not in {"running", "saving", "pausing"} or entry.handle is None or entry.netns is None:
        return None
    handle = entry.handle
    try:
        if not await resources.driver.recover(handle):
            return None
        slot = resources.slots.adopt(entry.netns)
    except SkerryError as error:
        log.warning("a sandbox cannot be taken up again", sandbox=entry.sandbox_id, error=str(error))
        return None
    link = agents.link(entry.sandbox_id, slot.open_socket, token=entry.token, generation=entry.generation)
    if entry.phase != "running":
        entry = await _go_on(resources, entry, handle, link)
    try:
        async with asyncio.timeout(PING_DEADLINE_S):
            await link.processes()  # asks for the token, as a ping does not
    except (GuestUnreachable, OutcomeUnknown, Unavailable, TimeoutError) as error:
        # Its VM runs: it may be busy. It is its owner's to kill, not ours.
        log.warning("a sandbox was taken up whose agent does not answer", sandbox=entry.sandbox_id, error=str(error))
    except SkerryError as error:
        log.warning("a sandbox does not know this server", sandbox=entry.sandbox_id, error=str(error))
        resources.slots.let_go(slot)
        return None
    try:
        directory = resources.config.vms_dir / entry.vm_id
        wall = await resources.walls.open(slot, entry.sandbox_id, entry.egress, directory, entry.names)
    except SkerryError as error:
        log.warning("a sandbox's network cannot be served again", sandbox=entry.sandbox_id, error=str(error))
        resources.slots.let_go(slot)
        return None
    return Adopted(entry, handle, slot, link, wall)


async def _go_on(resources: Resources, entry: Entry, handle: VmHandle, link: AgentLink) -> Entry:
    """A pause or a snapshot was cut off: the sandbox runs on as if nobody had asked."""
    try:
        await resources.driver.resume(handle)
        async with asyncio.timeout(PING_DEADLINE_S):
            await link.thaw()
    except (SkerryError, TimeoutError) as error:
        log.warning("a sandbox that stood still may not run on", sandbox=entry.sandbox_id, error=str(error))
    entry = replace(entry, phase="running")
    await in_thread(resources.journal.write, entry)
    return entry


async def _sweep(resources: Resources, adopted: list[Adopted]) -> list[str]:
    """Remove what bears our names and belongs to nobody: what a crash left between an act and its note."""
    kept = {a.entry.vm_id for a in adopted}
    slots = {a.slot.netns for a in adopted}
    keep_pids = {resources.driver.pid(a.handle) for a in adopted}
    removed: list[str] = []
    try:
        pids = await resources.driver.sweep(resources.config.vms_dir, keep_pids)
        removed += [f"process {pid}" for pid in pids]
        for name in await in_thread(resources.cgroups.names):
            if name not in kept:
                await in_thread(resources.cgroups.remove, name)
                removed.append(f"cgroup {name}")
        for name in await in_thread(namespace.names, resources.slots.prefix):
            if name not in slots:
                await in_thread(namespace.delete, name)
                removed.append(f"netns {name}")
    except InternalError as error:
        log.error("the sweep for orphans was not completed", error=str(error))
    for directory in await in_thread(lambda: list(resources.config.vms_dir.iterdir())):
        if directory.name not in kept:
            await in_thread(shutil.rmtree, directory, ignore_errors=True)
            removed.append(f"directory {directory.name}")
    return removed
