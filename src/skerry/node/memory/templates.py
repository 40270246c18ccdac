"""Memory images of templates, one for each shape: booted once, warmed up, saved, and cloned from then on."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Final

from skerry.core.errors import SkerryError
from skerry.core.models import SandboxSpec
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import TaskSet, in_thread, log
from skerry.node.birth import Steps, assemble, awaken, plan, template_of
from skerry.node.journal import Entry
from skerry.node.memory.capture import capture, standing_still
from skerry.node.memory.manifest import Manifest
from skerry.node.memory.rest import fitting
from skerry.node.memory.warm import warm_up
from skerry.node.resources import Held, Resources, dismantle
from skerry.node.vmm.driver import VmHandle

ATTEMPTS: Final = 2
"""A boot in emulation may fail on a busy host; nothing of anybody's is lost by another."""


class TemplateImages:
    """Belongs to one event loop. One build of a shape at a time, whoever asks."""

    def __init__(self, resources: Resources, agents: Agents) -> None:
        self._resources = resources
        self._agents = agents
        self._builds: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._ready: dict[str, Manifest] = {}
        self._used: dict[str, float] = {}

    def image_id(self, spec: SandboxSpec) -> str:
        """Names what a shape's image is made of: another kernel, agent, template or QEMU gives another image."""
        resources = self._resources
        template = template_of(resources, spec)
        base, _ = template.disk_for(spec.disk_mb)
        machine = resources.driver.machine(spec.cpu, spec.memory_mb)
        parts = [
            template.key,
            resources.trust.key,
            str(base),
            *resources.artefacts.values(),
            *(f"{k}={v}" for k, v in sorted(machine.items())),
        ]
        return "tm" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def ready(self, spec: SandboxSpec) -> Manifest | None:
        """The image of a shape, if there is one that was checked since this server started."""
        image_id = self.image_id(spec)
        manifest = self._ready.get(image_id)
        if manifest is not None:
            self._used[image_id] = time.monotonic()
        return manifest

    async def ensure(self, spec: SandboxSpec) -> Manifest | None:
        """The image of a shape, built if there is none. None where the driver has no memory images, or the build failed
        (which is logged): the sandbox then has to be booted."""
        if not self._resources.driver.capabilities.memory_snapshots:
            return None
        if (manifest := self.ready(spec)) is not None:
            return manifest
        image_id = self.image_id(spec)
        build = self._builds.get(image_id)
        if build is None:
            build = self._builds[image_id] = self._tasks.spawn(
                self._make_ready(image_id, spec), name=f"image-{image_id}"
            )
            build.add_done_callback(lambda _: self._builds.pop(image_id, None))
        await asyncio.wait({build})
        return self.ready(spec)

    async def _make_ready(self, image_id: str, spec: SandboxSpec) -> None:
        manifest = await self._load(image_id)
        for attempt in range(ATTEMPTS):
            if manifest is not None:
                break
            try:
                manifest = await self._build(image_id, spec)
            except SkerryError as error:
                log.warning(
                    "a template's memory image was not built", image=image_id, attempt=attempt, error=str(error)
                )
        if manifest is not None:
            self._ready[image_id] = manifest
            self._used[image_id] = time.monotonic()
            await self._make_room()

    async def _load(self, image_id: str) -> Manifest | None:
        """One that an earlier server built. A damaged one is removed."""
        if not self._resources.keep.known(image_id):
            return None
        try:
            manifest = await in_thread(fitting, self._resources, image_id)
            await in_thread(self._resources.keep.images.verify, manifest)
        except SkerryError as error:
            log.warning("a template's memory image cannot be used and is built anew", image=image_id, error=str(error))
            await in_thread(self._resources.keep.forget, image_id)
            return None
        return manifest

    async def _build(self, image_id: str, spec: SandboxSpec) -> Manifest:
        resources, name = self._resources, image_id
        shape = SandboxSpec(spec.template, spec.cpu, spec.memory_mb, self._disk_mb(spec))
        held, steps = Held(name), Steps()
        began = time.monotonic()
        try:
            entry = await assemble(resources, held, plan(resources, name, shape, None), None, steps)
            entry, link = await awaken(resources, held, entry, self._agents, steps, fresh=True)
            await warm_up(link, template_of(resources, spec).start)
            assert entry.handle is not None  # noqa: S101 - an assembled VM has one
            manifest = await self._save(link, entry, entry.handle, image_id)
        finally:
            await dismantle(resources, name, held)
        took = round(time.monotonic() - began, 2)
        log.info("built a template's memory image", image=image_id, template=spec.template, seconds=took)
        return manifest

    async def _save(self, link: AgentLink, entry: Entry, handle: VmHandle, image_id: str) -> Manifest:
        async with standing_still(link, sync=True, thaw=False):
            captured = await capture(self._resources, entry, handle, image_id, "template", memory=True, go_on=False)
        return captured.manifest

    def _disk_mb(self, spec: SandboxSpec) -> int:
        base, size_mb = template_of(self._resources, spec).disk_for(spec.disk_mb)
        return max(size_mb, Path(base).stat().st_size >> 20)

    async def _make_room(self) -> None:
        """Forget the images that were not used for longest; those of another kernel or agent before all."""
        keep, bound = self._resources.keep, self._resources.config.template_images
        kept = sorted(await in_thread(keep.templates), key=lambda m: self._used.get(m.image_id, 0.0))
        for manifest in kept[: max(0, len(kept) - bound)]:
            self._ready.pop(manifest.image_id, None)
            await in_thread(keep.forget, manifest.image_id)

    async def aclose(self) -> None:
        await self._tasks.aclose()
