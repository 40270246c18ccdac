"""Makes an image of a sandbox: everything that is in it, or its disk alone.

While the memory is written the sandbox's commands stand still, so that what is in the image is one moment, and so that
no command of a copy runs before the copy has a clock and random numbers of its own.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from skerry.core import ids
from skerry.core.errors import InternalError, SkerryError
from skerry.node.agents import AgentLink
from skerry.node.aio import finish, in_thread, log
from skerry.node.birth import make_layer
from skerry.node.journal import Entry
from skerry.node.memory.manifest import Kind, Manifest
from skerry.node.resources import Resources
from skerry.node.vmm.driver import Saved, VmHandle

FREEZE_DEADLINE_S: Final = 30.0
THAW_DEADLINE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Captured:
    manifest: Manifest
    entry: Entry
    """Of the sandbox as it goes on: with a layer of its own, if it does."""
    saved: Saved


@asynccontextmanager
async def standing_still(link: AgentLink, *, sync: bool, thaw: bool = True) -> AsyncIterator[None]:
    """Let a guest's commands stand still. `thaw` False: they are let go only if the body fails."""
    try:
        async with asyncio.timeout(FREEZE_DEADLINE_S):
            if not await link.freeze(sync=sync):
                log.warning("some commands of a sandbox could not be stopped before it is saved")
    except TimeoutError:
        await finish(_thaw(link))
        raise InternalError("the guest did not stop its commands in time", step="freeze") from None
    except BaseException:
        await finish(_thaw(link))
        raise
    try:
        yield
    except BaseException:
        await finish(_thaw(link))
        raise
    if thaw:
        await finish(_thaw(link))


async def _thaw(link: AgentLink) -> None:
    with contextlib.suppress(SkerryError, TimeoutError):  # a guest that is gone has nothing to let go
        async with asyncio.timeout(THAW_DEADLINE_S):
            await link.thaw()


async def capture(
    resources: Resources,
    entry: Entry,
    handle: VmHandle,
    image_id: str,
    kind: Kind,
    *,
    memory: bool,
    go_on: bool,
) -> Captured:
    """Make the image `image_id` of a sandbox whose commands stand still. `go_on`: it runs on, on a layer of its own;
    else its vCPUs stand still afterwards, unless this fails. On failure nothing of the image is left, and the journal
    has the sandbox's layers as they then are."""
    after = await _with_new_layer(resources, entry, image_id) if go_on else entry
    await in_thread(resources.keep.hold, after, images=[image_id])
    layer = resources.keep.layers.path(after.layers[-1]) if go_on else None
    staged = await in_thread(resources.keep.images.stage, image_id)
    try:
        if memory:
            saved = await resources.driver.save(handle, staged, layer=layer, go_on=go_on)
        else:
            saved = await resources.driver.save_disk(handle, layer=layer, go_on=go_on)
        machine = resources.driver.machine(entry.cpu, entry.memory_mb) if memory else {}
        await in_thread(_seal, resources, Manifest.of(entry, image_id, kind, machine=machine))
    except BaseException:
        if not go_on:
            await finish(_resume(resources, handle))
        await in_thread(resources.keep.images.discard, image_id)
        raise
    return Captured(resources.keep.find(image_id), after, saved)


async def _with_new_layer(resources: Resources, entry: Entry, image_id: str) -> Entry:
    """The entry with an empty layer on top, made and written down before the VM is told to write there. Should it never
    be told, the layer stays empty, and the disk is the same with it as without."""
    after = replace(entry, layers=(*entry.layers, ids.new_id("ly")))
    await in_thread(resources.keep.hold, after, images=[image_id])
    await in_thread(make_layer, resources, after.layers, entry.base, entry.disk_mb)
    await in_thread(resources.journal.write, after)
    return after


async def _resume(resources: Resources, handle: VmHandle) -> None:
    with contextlib.suppress(SkerryError):  # if it cannot run on, it has ended, and its watch says so
        await resources.driver.resume(handle)


def _seal(resources: Resources, manifest: Manifest) -> None:
    """Make it durable and real."""
    if manifest.machine:
        manifest = replace(manifest, files=resources.keep.images.sums(manifest.image_id))
    for layer in manifest.layers:
        fd = os.open(resources.keep.layers.path(layer), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    resources.keep.add(manifest)
