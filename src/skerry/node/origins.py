"""Where a new sandbox comes from: a warm clone, the memory image of its template or of a snapshot, or a boot."""

import asyncio
import os

from skerry.core.models import SandboxSpec
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import in_thread
from skerry.node.birth import Steps, assemble, awaken, plan
from skerry.node.journal import Entry
from skerry.node.memory.manifest import Manifest
from skerry.node.memory.rest import fitting
from skerry.node.memory.templates import TemplateImages
from skerry.node.pool import Pool, claim
from skerry.node.resources import Held, Resources


class Origins:
    """Belongs to one event loop."""

    def __init__(self, resources: Resources, agents: Agents) -> None:
        self._resources = resources
        self._agents = agents
        self._templates = TemplateImages(resources, agents)
        self.pool = Pool(resources, self._templates, agents)
        self._verified: dict[str, asyncio.Task[None]] = {}
        """Snapshots whose every byte is being compared, or was since this server started."""
        self._at_once = asyncio.Semaphore(resources.config.boots_at_once or 2 * (os.cpu_count() or 1))

    async def bear(
        self, held: Held, sandbox_id: str, spec: SandboxSpec, snapshot_id: str | None, steps: Steps
    ) -> tuple[Entry, AgentLink]:
        """Make a sandbox. What it holds at any moment is in `held`; if this fails, the caller removes that."""
        self.pool.creating(on=True)
        try:
            if snapshot_id is not None:
                return await self._of_snapshot(held, sandbox_id, spec, snapshot_id, steps)
            if (member := self.pool.claim(spec)) is not None:
                return await claim(self._resources, held, member, sandbox_id, spec, self._agents, steps)
            return await self._clone(held, sandbox_id, spec, await self._templates.ensure(spec), steps)
        finally:
            self.pool.creating(on=False)

    async def _of_snapshot(
        self, held: Held, sandbox_id: str, spec: SandboxSpec, snapshot_id: str, steps: Steps
    ) -> tuple[Entry, AgentLink]:
        keep = self._resources.keep
        keep.pin(snapshot_id)
        try:
            origin = await in_thread(fitting, self._resources, snapshot_id)
            await self._verify(origin)
            return await self._clone(held, sandbox_id, spec, origin, steps)
        finally:
            await in_thread(keep.unpin, snapshot_id)

    async def _verify(self, origin: Manifest) -> None:
        """Once for each snapshot, however many sandboxes are made of it at the same time. An image of a fork was
        written by this server just now."""
        if origin.kind == "fork":
            return
        task = self._verified.get(origin.image_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            verify = in_thread(self._resources.keep.images.verify, origin)
            task = self._verified[origin.image_id] = asyncio.create_task(verify, name=f"verify-{origin.image_id}")
        await asyncio.shield(task)

    async def _clone(
        self, held: Held, sandbox_id: str, spec: SandboxSpec, origin: Manifest | None, steps: Steps
    ) -> tuple[Entry, AgentLink]:
        async with self._at_once:
            entry = plan(self._resources, sandbox_id, spec, origin)
            entry = await assemble(self._resources, held, entry, origin, steps)
            return await awaken(self._resources, held, entry, self._agents, steps, fresh=True)

    async def aclose(self) -> None:
        await self.pool.aclose()
        await asyncio.gather(*self._verified.values(), return_exceptions=True)
        await self._templates.aclose()
