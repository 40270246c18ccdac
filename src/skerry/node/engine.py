"""The engine of one machine: sandboxes, each a VM with its disk, network and bounds. Implements `contract.Node`."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final, Self

from skerry.core.errors import Conflict, InternalError, InvalidRequest, NotFound, SkerryError, Unavailable
from skerry.core.lifecycle import EndReason, gone
from skerry.core.models import EgressLayer, NetworkEvent, SandboxSpec
from skerry.core.policy import policy_of
from skerry.egress.relay import Limits as EgressLimits
from skerry.egress.upstream import Upstream
from skerry.images.model import ImageSet
from skerry.node import host, trust
from skerry.node.agents import AgentLink, Agents, GuestAgents, end
from skerry.node.aio import TaskSet, finish, in_thread, log
from skerry.node.birth import Steps, template_named, template_of
from skerry.node.broadcast import Broadcast
from skerry.node.cgroup import Cgroups, disk_of
from skerry.node.config import NodeConfig
from skerry.node.contract import (
    Ended,
    Guest,
    ImageInfo,
    NodeInfo,
    NodePaused,
    NodeSandbox,
    NodeSnapshot,
    PoolStatus,
    TemplateInfo,
)
from skerry.node.journal import DataLock, Entry, Journal
from skerry.node.memory.acts import Acts, paused_error
from skerry.node.memory.keep import Keep
from skerry.node.net.slots import SlotPool
from skerry.node.net.wall import Walls
from skerry.node.origins import Origins
from skerry.node.record import Record
from skerry.node.recovery import Recovered, recover
from skerry.node.resources import Held, Resources, dismantle
from skerry.node.vmm.driver import VmDriver, VmExit, VmHandle

ID: Final = re.compile(r"[a-z0-9]{1,40}")
RETRY_AFTER_S: Final = 5.0


class Engine:
    """One per data directory: a second one is refused. Its state is in `_records` and belongs to one event loop."""

    def __init__(
        self,
        config: NodeConfig,
        driver: VmDriver,
        images: ImageSet,
        *,
        agents: Agents | None = None,
        upstream: Upstream | None = None,
    ) -> None:
        self._config = config
        self._driver = driver
        self._images = images
        self._agents: Agents = agents or GuestAgents()
        self._upstream = upstream or Upstream()
        self._records: dict[str, Record] = {}
        self._broadcast: Broadcast[Ended] = Broadcast()
        self._traffic: Broadcast[NetworkEvent] = Broadcast()
        self._resources: Resources | None = None
        self._lock: DataLock | None = None
        self._closing = False
        self._origins: Origins | None = None
        self._creations = TaskSet()
        self._acts = TaskSet()
        self._endings = TaskSet()
        self._watches = TaskSet()
        self._turns: Acts | None = None

    # ------------------------------------------------------------------------------------------------ life of the node

    async def start(self) -> Sequence[NodeSandbox]:
        """See `Node.start`. Raises Conflict `data_dir_in_use`, InternalError."""
        if self._resources is not None:
            raise Conflict("this node is open already", code="node_open")
        config = self._config
        try:
            for directory in (config.journal_dir, config.vms_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InternalError(f"{config.state_dir} cannot be made: {error.strerror}", step="start") from error
        self._lock = DataLock(config.state_dir / "lock")
        try:
            cgroups = await in_thread(lambda: Cgroups(config.instance, disk_of(config.state_dir)))
            if not cgroups.usable:
                log.warning("sandboxes run without cgroups", problem=cgroups.hierarchies.problem)
            slots = SlotPool(config.instance, config.slots)
            keep = await in_thread(Keep, config.state_dir)
            journal = Journal(config.journal_dir)
            limits = EgressLimits(
                config.egress_connections, config.egress_connections_per_s, config.egress_mb_per_s << 20
            )
            walls = Walls(self._upstream, self._traffic.publish, limits)
            trusted = await in_thread(trust.load, config.trust_dir)
            resources = Resources(config, self._images, self._driver, slots, cgroups, journal, keep, walls, trusted)
            recovered = await recover(resources, self._agents)
        except BaseException:
            self._lock.release()
            self._lock = None
            raise
        self._resources = resources
        self._origins = Origins(resources, self._agents)
        self._turns = Acts(resources, self._agents, self._begin, self._check_room)
        self._take_up(recovered)
        slots.start()
        self._origins.pool.start()
        return self.sandboxes()

    def _take_up(self, recovered: Recovered) -> None:
        if recovered.removed:
            log.info("removed what an earlier server left", orphans=recovered.removed)
        for adopted in recovered.adopted:
            record = self._new_record(adopted.entry)
            record.held = Held(adopted.entry.vm_id, adopted.entry.netns, adopted.slot, adopted.handle, adopted.wall)
            self._begin(record, adopted.entry, adopted.link, {})
        for entry, paused in recovered.paused:
            record = self._new_record(entry)
            record.sandbox = NodeSandbox(entry.sandbox_id, entry.start_kind, {}, 0)
            record.paused = paused
            record.created.set_result(record.sandbox)

    def _new_record(self, entry: Entry) -> Record:
        name = entry.sandbox_id
        created: asyncio.Future[NodeSandbox] = asyncio.get_running_loop().create_future()
        record = self._records[name] = Record(name, entry.memory_mb, created, Held(entry.vm_id), entry)
        return record

    def _begin(self, record: Record, entry: Entry, link: AgentLink, timings_ms: dict[str, float]) -> NodeSandbox:
        """It runs from now on."""
        assert entry.handle is not None  # noqa: S101 - what runs has one
        record.entry, record.link, record.paused = entry, link, None
        record.sandbox = NodeSandbox(record.id, entry.start_kind, timings_ms, self._driver.pid(entry.handle))
        if not record.created.done():
            record.created.set_result(record.sandbox)
        record.watch = self._watches.spawn(self._watch(record, entry.handle), name=f"watch-{record.id}")
        return record.sandbox

    async def stop(self) -> None:
        """Let go of everything; the sandboxes run on. Creations under way are given up. Idempotent."""
        if self._resources is None or self._closing:
            return
        self._closing = True
        await self._creations.aclose()
        await self._acts.aclose()
        if self._origins is not None:
            await self._origins.aclose()
        await self._watches.aclose()
        await self._endings.aclose()
        resources, self._resources = self._resources, None
        await resources.slots.aclose()
        await self._driver.release()
        for record in self._records.values():
            if record.held.wall is not None:
                await record.held.wall.aclose()
            if record.held.slot is not None:
                resources.slots.let_go(record.held.slot)
        if not self._records:
            resources.cgroups.close()
        self._records.clear()
        self._broadcast.close()
        self._traffic.close()
        self._closing = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def _open(self) -> Resources:
        if self._resources is None or self._closing:
            raise Unavailable("this node is not open", code="node_closed", retry_after=RETRY_AFTER_S)
        return self._resources

    # -------------------------------------------------------------------------------------------------- create and kill

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot_id: str | None = None) -> NodeSandbox:
        resources = self._open()
        if not ID.fullmatch(sandbox_id):
            raise InvalidRequest.of("sandbox_id", "must be lower-case letters and digits", given=sandbox_id)
        while (record := self._records.get(sandbox_id)) is not None and record.reason is not None:
            await record.over.wait()  # a killed one of this name: first it has to be gone
        if record is None:
            record = self._admit(resources, sandbox_id, spec, snapshot_id)
        record.waiters += 1
        try:
            return await asyncio.shield(record.created)
        except asyncio.CancelledError:
            if record.waiters == 1 and record.creation is not None and not record.created.done():
                self._give_up(resources, record, EndReason.KILLED)
                await finish(record.over.wait())
            raise
        finally:
            record.waiters -= 1

    def _admit(self, resources: Resources, sandbox_id: str, spec: SandboxSpec, snapshot_id: str | None) -> Record:
        """Reserve room and set the creation going. Raises Unavailable `node_full`, NotFound `template_not_found`."""
        if snapshot_id is None:
            template_of(resources, spec)
        self._check_room(spec.memory_mb)
        created: asyncio.Future[NodeSandbox] = asyncio.get_running_loop().create_future()
        record = self._records[sandbox_id] = Record(sandbox_id, spec.memory_mb, created, Held(sandbox_id))
        creation = self._create(resources, record, spec, snapshot_id)
        record.creation = self._creations.spawn(creation, name=f"create-{sandbox_id}")
        record.creation.add_done_callback(lambda _: self._never_began(record))
        return record

    def _check_room(self, memory_mb: int) -> None:
        """Raises Unavailable `node_full`. Paused sandboxes take no room."""
        memory = host.memory()
        awake = [r for r in self._records.values() if r.paused is None]
        wanted = memory_mb + sum(r.memory_mb for r in awake)
        bound = int(memory.total_mb * self._config.memory_share)
        full: str | None = None
        if len(awake) >= self._config.max_sandboxes:
            full = f"it runs {len(awake)} sandboxes, and may run {self._config.max_sandboxes}"
        elif wanted > bound:
            full = f"its guests would have {wanted} MB of memory together, and may have {bound} MB"
        elif memory.available_mb < self._config.memory_floor_mb:
            full = f"the host has {memory.available_mb} MB of memory left, and keeps {self._config.memory_floor_mb} MB"
        elif (free_mb := host.disk_free_mb(self._config.vms_dir)) < self._config.disk_floor_mb:
            full = f"the data directory's disk has {free_mb} MB left, and keeps {self._config.disk_floor_mb} MB"
        if full is not None:
            raise Unavailable(f"this node is full: {full}", code="node_full", retry_after=RETRY_AFTER_S)

    async def _create(self, resources: Resources, record: Record, spec: SandboxSpec, snapshot_id: str | None) -> None:
        """Owns a creation: at its end the sandbox runs, or nothing is left of it and the waiters have the error."""
        assert self._origins is not None  # noqa: S101 - the node is open
        try:
            steps = Steps()
            entry, link = await self._origins.bear(record.held, record.id, spec, snapshot_id, steps)
        except BaseException as error:
            record.reason = record.reason or EndReason.START_FAILED
            try:
                await self._remove(resources, record)
            finally:
                cancelled = isinstance(error, asyncio.CancelledError)
                self._fail(record, gone(record.id, record.reason) if cancelled else error)
            if not isinstance(error, SkerryError):
                raise
            return
        self._begin(record, entry, link, steps.timings_ms)

    @staticmethod
    def _fail(record: Record, error: BaseException) -> None:
        """Tell the waiters that it was not created."""
        if not record.created.done():
            record.created.set_exception(error)
            record.created.exception()  # seen, even if every waiter has left

    def _never_began(self, record: Record) -> None:
        """A creation that was cancelled before its first step has run none of its code, and holds nothing."""
        if not record.created.done() and not record.over.is_set():
            self._records.pop(record.id, None)
            self._fail(record, gone(record.id, record.reason))
            record.over.set()

    async def _remove(self, resources: Resources, record: Record) -> None:
        try:
            await record.quiesce()
            record.failures = await dismantle(resources, record.id, record.held)
        finally:
            self._records.pop(record.id, None)
            record.over.set()

    def _give_up(self, resources: Resources, record: Record, reason: EndReason) -> None:
        """Let the end of a sandbox begin, wherever it is in its life. `record.over` says when it is done."""
        if record.reason is not None:
            return
        record.reason = reason
        if record.link is not None:
            end(record.link, gone(record.id, reason))
        if record.creation is not None and not record.created.done():
            record.creation.cancel()
        else:
            self._endings.spawn(self._remove(resources, record), name=f"end-{record.id}")

    async def kill(self, sandbox_id: str) -> bool:
        resources = self._open()
        record = self._records.get(sandbox_id)
        if record is not None:
            self._give_up(resources, record, EndReason.KILLED)
            await record.over.wait()
            failures = record.failures
        else:
            if not ID.fullmatch(sandbox_id) or sandbox_id not in await in_thread(resources.journal.names):
                return False
            # What an earlier removal could not remove.
            entry = await in_thread(resources.journal.read, sandbox_id)
            failures = await dismantle(resources, sandbox_id, Held.of(entry) if entry else Held(sandbox_id))
        if failures:
            raise InternalError(f"sandbox {sandbox_id} was not removed whole: {failures[0].message}", step="kill")
        return True

    async def _watch(self, record: Record, handle: VmHandle) -> None:
        """Notices that a VM ended without a kill."""
        exit_ = await self._driver.wait(handle)
        if record.reason is not None or self._resources is None:
            return
        reason, detail = _why(exit_)
        self._give_up(self._resources, record, reason)
        await record.over.wait()
        log.warning("a sandbox ended by itself", sandbox=record.id, reason=reason.value, detail=detail)
        self._broadcast.publish(Ended(record.id, reason, detail))

    # ------------------------------------------------------------------------------------ pause, resume, snapshot, fork

    def _act(self) -> Acts:
        self._open()
        assert self._turns is not None  # noqa: S101 - the node is open
        return self._turns

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> NodePaused:
        turns, record = self._act(), self._alive(sandbox_id)
        return await record.act(self._acts, "pause", lambda: turns.pause(record, memory=memory))

    async def resume(self, sandbox_id: str, *, memory: bool = True) -> NodeSandbox:
        turns, record = self._act(), self._alive(sandbox_id)
        return await record.act(self._acts, "resume", lambda: turns.resume(record, memory=memory))

    def paused(self) -> Sequence[NodePaused]:
        return [r.paused for r in self._records.values() if r.paused is not None and r.reason is None]

    async def snapshot(self, sandbox_id: str, snapshot_id: str, *, memory: bool = True) -> NodeSnapshot:
        turns, record = self._act(), self._alive(sandbox_id)
        if not ID.fullmatch(snapshot_id):
            raise InvalidRequest.of("snapshot_id", "must be lower-case letters and digits", given=snapshot_id)
        return await record.act(self._acts, "snapshot", lambda: turns.snapshot(record, snapshot_id, memory=memory))

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await in_thread(self._open().keep.forget, snapshot_id)

    def snapshots(self) -> Sequence[str]:
        return self._open().keep.snapshots()

    async def fork(self, sandbox_id: str, copies: Mapping[str, SandboxSpec]) -> Mapping[str, NodeSandbox | SkerryError]:
        turns, record = self._act(), self._alive(sandbox_id)
        image_id = await record.act(self._acts, "fork", lambda: turns.fork_image(record))
        try:
            outcomes = await asyncio.gather(*(self._copy(name, spec, image_id) for name, spec in copies.items()))
        finally:
            await in_thread(self._open().keep.unpin, image_id)
        return dict(zip(copies, outcomes, strict=True))

    async def _copy(self, sandbox_id: str, spec: SandboxSpec, image_id: str) -> NodeSandbox | SkerryError:
        try:
            return await self.create(sandbox_id, spec, snapshot_id=image_id)
        except SkerryError as error:
            return error

    def pool(self) -> Sequence[PoolStatus]:
        return self._origins.pool.status() if self._origins is not None else []

    def images(self) -> Sequence[ImageInfo]:
        return self._open().keep.infos()

    async def verify_images(self) -> Sequence[ImageInfo]:
        keep = self._open().keep
        await in_thread(keep.verify)
        return await in_thread(keep.infos)

    async def collect_images(self) -> Sequence[str]:
        return await in_thread(self._open().keep.collect)

    # ------------------------------------------------------------------------------------------------------ what it has

    def _alive(self, sandbox_id: str) -> Record:
        self._open()
        record = self._records.get(sandbox_id)
        if record is None or not record.alive:
            raise NotFound(f"sandbox {sandbox_id} is not on this node", code="sandbox_not_found", sandbox_id=sandbox_id)
        return record

    def _running(self, sandbox_id: str) -> Record:
        record = self._alive(sandbox_id)
        if record.paused is not None:
            raise paused_error(sandbox_id)
        return record

    def guest(self, sandbox_id: str) -> Guest:
        link = self._running(sandbox_id).link
        assert link is not None  # noqa: S101 - `running` implies it
        return link

    def sandboxes(self) -> Sequence[NodeSandbox]:
        return [r.sandbox for r in self._records.values() if r.sandbox is not None and r.running]

    def ended(self) -> AbstractAsyncContextManager[AsyncIterator[Ended]]:
        return self._broadcast.subscribe()

    async def set_egress(self, sandbox_id: str, layers: Sequence[EgressLayer]) -> int:
        record = self._alive(sandbox_id)
        policy_of(layers)
        return await record.act(self._acts, "egress", lambda: self._set_egress(record, tuple(layers)))

    async def _set_egress(self, record: Record, layers: tuple[EgressLayer, ...]) -> int:
        assert record.entry is not None  # noqa: S101 - an alive one has one
        if record.entry.egress == layers:
            return 0
        cut = await record.held.wall.change(layers) if record.held.wall is not None else 0
        entry = replace(record.entry, egress=layers)
        await in_thread(self._open().journal.write, entry)
        record.entry = entry
        return cut

    def network_events(self) -> AbstractAsyncContextManager[AsyncIterator[NetworkEvent]]:
        return self._traffic.subscribe()

    def info(self) -> NodeInfo:
        capabilities = self._driver.capabilities
        return NodeInfo(
            node_id=self._config.node_id,
            accelerator=capabilities.accelerator,
            vmm=f"{capabilities.name} {capabilities.version}",
            sandboxes=len(self._records),
            memory_free_mb=host.memory().available_mb,
            disk_free_mb=host.disk_free_mb(self._config.data_dir),
        )

    def templates(self) -> Sequence[str]:
        return sorted(self._images.templates)

    def template(self, name: str) -> TemplateInfo:
        image = template_named(self._images, name)
        return TemplateInfo(name, image.cpu, image.memory_mb)

    async def console(self, sandbox_id: str, *, limit: int = 65_536) -> bytes:
        handle = self._running(sandbox_id).held.handle
        if handle is None or limit <= 0:
            return b""
        return (await self._driver.console(handle))[-limit:]


def _why(exit_: VmExit) -> tuple[EndReason, str]:
    if exit_.guest_shutdown and not exit_.guest_panicked:
        return EndReason.POWEROFF, exit_.detail
    return EndReason.CRASHED, exit_.detail
