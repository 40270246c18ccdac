"""What changes a sandbox between running and resting, and what copies it: one record at a time, one act at a time."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from skerry.core import ids
from skerry.core.errors import Conflict
from skerry.node import host_disk
from skerry.node.agents import AgentLink, Agents, end
from skerry.node.aio import finish, in_thread
from skerry.node.contract import NodePaused, NodeSandbox, NodeSnapshot
from skerry.node.journal import Entry
from skerry.node.memory import rest
from skerry.node.memory.capture import Captured, capture, standing_still
from skerry.node.memory.manifest import Kind, Manifest
from skerry.node.record import Record
from skerry.node.resources import Held, Resources, take_down
from skerry.node.vmm.driver import VmHandle


class Begin(Protocol):
    def __call__(
        self, record: Record, entry: Entry, link: AgentLink, timings_ms: dict[str, float], /
    ) -> NodeSandbox: ...


def paused_error(sandbox_id: str) -> Conflict:
    return Conflict(f"sandbox {sandbox_id} is paused", code="sandbox_paused", sandbox_id=sandbox_id)


class Acts:
    """All methods are called in the record's turn, and may be cancelled by the sandbox's end."""

    def __init__(self, resources: Resources, agents: Agents, begin: Begin, check_room: Callable[[int], None]) -> None:
        self._resources = resources
        self._agents = agents
        self._begin = begin
        self._check_room = check_room

    async def pause(self, record: Record, *, memory: bool) -> NodePaused:
        if record.paused is not None:
            return record.paused
        entry, link, handle = _running(record)
        rested = await rest.pause(self._resources, entry, link, handle, memory=memory)
        await finish(self._lie_down(record, rested, link))
        return rested.paused

    async def _lie_down(self, record: Record, rested: rest.Rested, link: AgentLink) -> None:
        """The journal says it is paused: nobody watches its VM any more, and it goes."""
        record.entry, record.paused, record.link = rested.entry, rested.paused, None
        if record.watch is not None:
            record.watch.cancel()
            record.watch = None
        end(link, paused_error(record.id))
        await take_down(self._resources, record.held)
        record.held = Held(rested.entry.vm_id)
        await in_thread(self._resources.keep.hold, rested.entry)
        await in_thread(self._resources.keep.collect)

    async def resume(self, record: Record, *, memory: bool) -> NodeSandbox:
        if record.paused is None and record.sandbox is not None:
            return record.sandbox
        assert record.entry is not None  # noqa: S101 - a paused one has one
        self._check_room(record.memory_mb)
        record.held = Held(record.entry.vm_id)
        back = await rest.resume(self._resources, record.held, record.entry, self._agents, memory=memory)
        return self._begin(record, back.entry, back.link, back.timings_ms)

    async def snapshot(self, record: Record, snapshot_id: str, *, memory: bool) -> NodeSnapshot:
        if self._resources.keep.known(snapshot_id):
            raise Conflict(
                f"there is a snapshot {snapshot_id} already", code="snapshot_exists", snapshot_id=snapshot_id
            )
        if record.paused is not None:
            manifest, timings = await self._copy_of_paused(record, snapshot_id, memory=memory), {}
        else:
            captured = await self._capture(record, snapshot_id, "snapshot", memory=memory)
            manifest, timings = captured.manifest, captured.saved.timings_ms
        size = await in_thread(self._resources.keep.size, manifest)
        return NodeSnapshot(snapshot_id, manifest.memory, size, timings)

    async def fork_image(self, record: Record) -> str:
        """An image of this moment, pinned: the caller unpins it when its copies are made."""
        image_id = ids.new_id("im")
        self._resources.keep.pin(image_id)
        try:
            await self._capture(record, image_id, "fork", memory=True)
        except BaseException:
            self._resources.keep.unpin(image_id)
            raise
        return image_id

    async def _capture(self, record: Record, image_id: str, kind: Kind, *, memory: bool) -> Captured:
        entry, link, handle = _running(record)
        saving = replace(entry, phase="saving")
        await in_thread(self._resources.journal.write, saving)  # a crash leaves it standing still
        try:
            async with standing_still(link, sync=not memory):
                return await capture(self._resources, saving, handle, image_id, kind, memory=memory, go_on=True)
        finally:  # its layers may have changed, whatever came of it
            await finish(self._runs_on(record, entry))

    async def _runs_on(self, record: Record, entry: Entry) -> None:
        written = await in_thread(self._resources.journal.read, record.id) or entry
        record.entry = replace(written, phase="running")
        await in_thread(self._resources.journal.write, record.entry)
        await in_thread(self._resources.keep.hold, record.entry)

    async def _copy_of_paused(self, record: Record, snapshot_id: str, *, memory: bool) -> Manifest:
        """The image it rests in, under another name: the same files, since nobody writes them."""
        entry = record.entry
        assert entry is not None  # noqa: S101 - a paused one has one
        if entry.image is None:
            if memory:
                raise Conflict(
                    "it was paused without its memory: only its disk can be kept",
                    code="no_memory",
                    sandbox_id=record.id,
                )
            return await in_thread(self._keep_disk_of, entry, snapshot_id)
        origin = await in_thread(rest.fitting, self._resources, entry.image)
        return await in_thread(self._link_image, origin, snapshot_id, memory)

    def _link_image(self, origin: Manifest, snapshot_id: str, memory: bool) -> Manifest:  # noqa: FBT001 - in a thread
        keep = self._resources.keep
        staged = keep.images.stage(snapshot_id)
        try:
            if memory:
                source = keep.images.memory(origin.image_id)
                os.link(source.ram, staged.ram)
                os.link(source.devices, staged.devices)
                manifest = replace(origin, image_id=snapshot_id, kind="snapshot")
            else:
                manifest = replace(
                    origin,
                    image_id=snapshot_id,
                    kind="snapshot",
                    files={},
                    machine={},
                    token=None,
                    generation=0,
                    names=(),
                )
            keep.add(manifest)
        except BaseException as error:
            keep.images.discard(snapshot_id)
            if isinstance(error, OSError):
                raise host_disk.failure(error, "the snapshot could not be kept", "image") from error
            raise
        return manifest

    def _keep_disk_of(self, entry: Entry, snapshot_id: str) -> Manifest:
        keep = self._resources.keep
        keep.images.stage(snapshot_id)
        manifest = Manifest.of(entry, snapshot_id, "snapshot", machine={})
        keep.add(manifest)
        return manifest


def _running(record: Record) -> tuple[Entry, AgentLink, VmHandle]:
    if record.paused is not None:
        raise paused_error(record.id)
    handle = record.held.handle
    assert record.entry is not None and record.link is not None and handle is not None  # noqa: S101 - it runs
    return replace(record.entry, names=record.held.names), record.link, handle
