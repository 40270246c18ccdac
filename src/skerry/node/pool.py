"""Warm clones: restored, exercised, stopped, with network, disk and bounds ready. A claim is `cont` and an identity.

How many of a shape are wanted follows the demand: those that were asked for lately, between a floor and a ceiling. They
are made one after the other in the background, and given up when the host runs low on memory.
"""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from skerry.core import ids
from skerry.core.errors import SkerryError
from skerry.core.models import SandboxSpec
from skerry.node import host
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import TaskSet, finish, in_thread, log
from skerry.node.birth import Steps, assemble, awaken, limits_of, plan, template_of
from skerry.node.contract import PoolStatus
from skerry.node.journal import Entry
from skerry.node.memory.manifest import Manifest
from skerry.node.memory.templates import TemplateImages
from skerry.node.memory.warm import warm_up
from skerry.node.resources import Held, Resources, dismantle

HALF_LIFE_S: Final = 60.0
"""How fast a demand that is over is forgotten."""
CHECK_S: Final = 5.0
RETRY_S: Final = 10.0
MEMBER_MB: Final = 128
"""What a warm clone takes of the host's memory, about."""

Shape = tuple[str, int, int]


@dataclass(slots=True)
class Member:
    entry: Entry
    held: Held
    link: AgentLink
    """With a connection that stands while the VM does: the claim's first question needs no other."""
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Shelf:
    spec: SandboxSpec
    ready: deque[Member] = field(default_factory=deque)
    demand: float = 0.0
    """Claims lately, each counting less the longer it is ago."""
    at: float = field(default_factory=time.monotonic)
    hits: int = 0
    misses: int = 0

    def decayed(self, now: float) -> float:
        return self.demand * 0.5 ** ((now - self.at) / HALF_LIFE_S)

    def claimed(self, now: float) -> None:
        self.demand, self.at = self.decayed(now) + 1.0, now


class Pool:
    """Belongs to one event loop."""

    def __init__(self, resources: Resources, templates: TemplateImages, agents: Agents) -> None:
        self._resources = resources
        self._templates = templates
        self._agents = agents
        self._shelves: dict[Shape, _Shelf] = {}
        self._wake = asyncio.Event()
        self._tasks = TaskSet()
        self._busy = 0

    def start(self) -> None:
        config = self._resources.config
        if config.pool_ceiling <= 0 or not self._resources.driver.capabilities.memory_snapshots:
            return
        default = SandboxSpec()
        if config.pool_floor > 0 and default.template in self._resources.images.templates:
            self._shelf(default)
        self._tasks.spawn(self._keep_filled(), name="pool")

    def claim(self, spec: SandboxSpec) -> Member | None:
        """A warm clone that fits, now the caller's; None if none is ready."""
        shelf = self._shelf(spec)
        shelf.claimed(time.monotonic())
        self._wake.set()
        if shelf.ready and spec.disk_mb == shelf.ready[0].entry.disk_mb:
            shelf.hits += 1
            return shelf.ready.popleft()
        shelf.misses += 1
        return None

    def creating(self, *, on: bool) -> None:
        """A creation begins or ends: the pool waits while there are any."""
        self._busy += 1 if on else -1
        if not self._busy:
            self._wake.set()

    def status(self) -> list[PoolStatus]:
        now = time.monotonic()
        return [
            PoolStatus(
                template=template,
                cpu=cpu,
                memory_mb=memory_mb,
                ready=len(shelf.ready),
                wanted=self._wanted(shelf, now),
                hits=shelf.hits,
                misses=shelf.misses,
                oldest_s=round(now - shelf.ready[0].since, 1) if shelf.ready else 0.0,
            )
            for (template, cpu, memory_mb), shelf in self._shelves.items()
        ]

    def _shelf(self, spec: SandboxSpec) -> _Shelf:
        shape = (spec.template, spec.cpu, spec.memory_mb)
        if shape not in self._shelves:
            self._shelves[shape] = _Shelf(SandboxSpec(spec.template, spec.cpu, spec.memory_mb))
        return self._shelves[shape]

    def _wanted(self, shelf: _Shelf, now: float) -> int:
        config = self._resources.config
        default = shelf.spec == SandboxSpec()
        floor = config.pool_floor if default else 0
        return max(floor, min(config.pool_ceiling, math.floor(shelf.decayed(now) + 0.5)))

    # ------------------------------------------------------------------------------------------------------- refilling

    async def _keep_filled(self) -> None:
        while True:
            try:
                pause_s = CHECK_S if not await self._step() else 0.0
            except SkerryError as error:
                log.warning("a warm clone could not be made", error=str(error))
                pause_s = RETRY_S
            if pause_s:
                self._wake.clear()
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _step(self) -> bool:
        """Make or give up one. False if there is nothing to do."""
        now = time.monotonic()
        free = host.memory().available_mb - self._resources.config.memory_floor_mb
        for shelf in self._shelves.values():
            if shelf.ready and (len(shelf.ready) > self._wanted(shelf, now) or free < 0):
                await self._give_up(shelf.ready.popleft())
                return True
        if self._busy or free < 2 * MEMBER_MB:
            return False
        short = [s for s in self._shelves.values() if len(s.ready) < self._wanted(s, now)]
        if not short:
            return False
        shelf = min(short, key=lambda s: len(s.ready))
        origin = await self._templates.ensure(shelf.spec)
        if origin is None:
            return False
        shelf.ready.append(await self._make(replace(shelf.spec, disk_mb=origin.disk_mb), origin))
        return True

    async def _make(self, spec: SandboxSpec, origin: Manifest) -> Member:
        name = ids.new_id("wm")
        held, steps = Held(name), Steps()
        try:
            entry = plan(self._resources, name, spec, origin, phase="pool")
            entry = await assemble(self._resources, held, entry, origin, steps)
            entry, link = await awaken(self._resources, held, entry, self._agents, steps, fresh=True, phase="pool")
            await warm_up(link, template_of(self._resources, spec).start, rounds=2)
            assert held.handle is not None  # noqa: S101 - an assembled VM has one
            await self._resources.driver.pause(held.handle)
        except BaseException:
            await dismantle(self._resources, name, held)
            raise
        return Member(entry, held, link)

    async def _give_up(self, member: Member) -> None:
        member.link.abort()
        await dismantle(self._resources, member.entry.sandbox_id, member.held)

    async def aclose(self) -> None:
        """Give all of them up."""
        await self._tasks.aclose()
        members = [member for shelf in self._shelves.values() for member in shelf.ready]
        self._shelves.clear()
        await finish(asyncio.gather(*(self._give_up(member) for member in members)))


async def claim(
    resources: Resources, held: Held, member: Member, sandbox_id: str, spec: SandboxSpec, agents: Agents, steps: Steps
) -> tuple[Entry, AgentLink]:
    """Make a warm clone the sandbox `sandbox_id`. From the first moment what it holds is in `held`."""
    entry = replace(
        member.entry,
        sandbox_id=sandbox_id,
        phase="creating",
        env={**member.entry.env, **spec.env},
        start_kind="pool",
        egress=spec.egress,
    )
    held.vm_id, held.netns, held.slot, held.handle = entry.vm_id, entry.netns, member.held.slot, member.held.handle
    async with steps.step("journal"):
        await in_thread(_hand_over, resources, entry, member.entry.sandbox_id)
    member.link.sandbox_id = sandbox_id
    return await awaken(resources, held, entry, agents, steps, fresh=True, link=member.link)


def _hand_over(resources: Resources, entry: Entry, member_id: str) -> None:
    """First the sandbox's own note, then the pool's goes: whoever finds both knows that the VM is the sandbox's."""
    resources.keep.hold(entry)
    resources.journal.write(entry)
    resources.journal.remove(member_id)
    resources.keep.drop(member_id)
    resources.cgroups.change(entry.vm_id, limits_of(resources, entry))
