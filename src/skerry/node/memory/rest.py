"""Pause and resume: a sandbox at rest on the disk, and back.

The journal's entry says what is true: until it says `paused`, the sandbox runs, and until it says `running` again, it
rests. A crash at any step is settled by `recovery` to the one or the other.
"""

import asyncio
import os
from dataclasses import dataclass, replace
from typing import Final

from skerry.core import ids
from skerry.core.errors import SkerryError
from skerry.node import host_disk
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import finish, in_thread, log
from skerry.node.birth import Steps, assemble, awaken
from skerry.node.contract import NodePaused
from skerry.node.disk.compact import compact
from skerry.node.journal import Entry
from skerry.node.memory.capture import capture, standing_still
from skerry.node.memory.manifest import Manifest, check_machine
from skerry.node.resources import Held, Resources, take_down
from skerry.node.vmm.driver import VmHandle

LAYERS_MAX: Final = 8
"""A chain of more layers than this is made shorter before a resume: each costs a look-up at every read."""


@dataclass(frozen=True, slots=True)
class Rested:
    entry: Entry
    paused: NodePaused


@dataclass(frozen=True, slots=True)
class Back:
    entry: Entry
    link: AgentLink
    timings_ms: dict[str, float]


async def pause(resources: Resources, entry: Entry, link: AgentLink, handle: VmHandle, *, memory: bool) -> Rested:
    """Keep a running sandbox on disk. When this returns it rests, and its VM, standing still, is to be taken down.

    On failure it runs as before, and the journal says so.
    """
    steps = Steps("paused")
    await in_thread(resources.journal.write, replace(entry, phase="pausing"))
    try:
        async with steps.step("save"), standing_still(link, sync=True, thaw=False):
            if memory:
                image_id = ids.new_id("im")
                captured = await capture(resources, entry, handle, image_id, "pause", memory=True, go_on=False)
                paused, details = entry.paused(image_id, memory=True), captured.saved.timings_ms
            else:
                await _keep_disk(resources, entry, handle)
                paused, details = entry.paused(None, memory=False), {}
            await _settle(resources, entry, paused, handle)
    except BaseException:
        await finish(in_thread(resources.journal.write, entry))
        raise
    return Rested(paused, await in_thread(describe, resources, paused, steps.timings_ms | details))


async def _settle(resources: Resources, entry: Entry, paused: Entry, handle: VmHandle) -> None:
    """The moment from which on it is paused."""
    images = [entry.image] if entry.image else []
    try:
        await in_thread(resources.keep.hold, paused, images=images)  # its VM still maps the image it came from
        await in_thread(resources.journal.write, paused)
    except BaseException:
        await finish(in_thread(resources.keep.hold, entry))
        await finish(resources.driver.resume(handle))
        raise


async def _keep_disk(resources: Resources, entry: Entry, handle: VmHandle) -> None:
    await resources.driver.save_disk(handle, layer=None, go_on=False)
    try:
        await in_thread(_sync_layers, resources, entry)
    except BaseException:
        await finish(resources.driver.resume(handle))
        raise


def _sync_layers(resources: Resources, entry: Entry) -> None:
    try:
        for layer in entry.layers:
            fd = os.open(resources.keep.layers.path(layer), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        raise host_disk.failure(error, "the disk could not be kept", "disk") from error


def describe(resources: Resources, paused: Entry, timings_ms: dict[str, float]) -> NodePaused:
    """Blocking. `size_bytes` is 0 where the image cannot be read."""
    layers = [resources.keep.layers.path(layer) for layer in paused.layers]
    size = sum(path.stat().st_blocks * 512 for path in layers if path.exists())
    if paused.image is not None:
        memory = resources.keep.images.memory(paused.image)
        size += sum(file.stat().st_blocks * 512 for file in (memory.ram, memory.devices) if file.exists())
    return NodePaused(paused.sandbox_id, paused.image is not None, size, timings_ms)


async def resume(resources: Resources, held: Held, paused: Entry, agents: Agents, *, memory: bool) -> Back:
    """Let a paused sandbox go on, on a new disk layer. On failure it rests as before, and nothing of a VM is left.

    `memory` False: from its disk alone, which a pause has flushed; the memory is dropped once it runs."""
    image = paused.image if memory else None
    origin = await in_thread(fitting, resources, image) if image is not None else None
    if len(paused.layers) > LAYERS_MAX:
        paused = await compact(resources, paused)
    steps = Steps("resumed")
    entry = replace(paused, phase="resuming", layers=(*paused.layers, ids.new_id("ly")))
    if origin is None:  # an image that is to be dropped stays its own until it runs
        entry = replace(entry, artefacts=resources.artefacts, token=None)
    try:
        verified = asyncio.ensure_future(_verify(resources, origin))
        try:
            entry = await assemble(resources, held, entry, origin, steps)
        finally:
            await finish(verified)
        if origin is None:
            entry = replace(entry, image=None, start_kind="boot")
        entry, link = await awaken(resources, held, entry, agents, steps, fresh=False)
    except BaseException:
        await take_down(resources, held)
        await finish(_rest_again(resources, paused))
        raise
    if paused.image is not None and origin is None:
        await finish(_drop_memory(resources, entry))
    return Back(entry, link, steps.timings_ms)


async def _drop_memory(resources: Resources, entry: Entry) -> None:
    await in_thread(resources.keep.hold, entry)
    try:
        await in_thread(resources.keep.collect)
    except SkerryError as error:
        log.warning("an image that nobody needs is still there", error=str(error))


async def _rest_again(resources: Resources, paused: Entry) -> None:
    try:
        await in_thread(resources.journal.write, paused)
        await in_thread(resources.keep.hold, paused)
        await in_thread(resources.keep.collect)
    except SkerryError as error:
        log.error("a sandbox that could not be resumed is settled at the next start", error=str(error))


async def _verify(resources: Resources, origin: Manifest | None) -> None:
    if origin is not None:
        await in_thread(resources.keep.images.verify, origin)


def fitting(resources: Resources, image_id: str) -> Manifest:
    """The manifest of an image that this node can use. Blocking. Raises NotFound `image_not_found`, InternalError
    `image_damaged`, Conflict `image_mismatch`."""
    manifest = resources.keep.find(image_id)
    check_machine(manifest, resources.driver.machine(manifest.cpu, manifest.memory_mb))
    resources.keep.check_layers(manifest)
    return manifest
