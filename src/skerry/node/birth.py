"""How a sandbox comes to be: the steps from nothing to a guest that knows who it is."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from skerry.core import ids
from skerry.core.errors import (
    GuestUnreachable,
    InternalError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    SkerryError,
    Unavailable,
)
from skerry.core.models import Identity, SandboxSpec
from skerry.images import TEMPLATES
from skerry.images.model import ImageSet, TemplateImage
from skerry.node import host_disk
from skerry.node.agents import AgentLink, Agents
from skerry.node.aio import in_thread
from skerry.node.cgroup import Limits
from skerry.node.disk import overlay
from skerry.node.journal import Entry, Phase
from skerry.node.memory.manifest import Manifest
from skerry.node.net.slots import Slot
from skerry.node.resources import Held, Resources
from skerry.node.start import start, start_again
from skerry.node.trust import furnish
from skerry.node.vmm.driver import VmHandle, VmSpec

T = TypeVar("T")

VMM_OVERHEAD_MB: Final = 512
"""What a VMM may use beside its guest's memory: translated code, its heap, and the page cache of its disk."""
POLL_S: Final = 0.02
LOAD_FACTOR_MAX: Final = 4.0
CONSOLE_LINES: Final = 5


@dataclass(slots=True)
class Steps:
    """Runs named steps and times them. An InternalError of a step gets its name; in a creation its code becomes
    `vm_start_failed`, unless it has one that says more."""

    what: str = "started"
    timings_ms: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            yield
        except InternalError as error:
            code = "vm_start_failed" if error.code == InternalError.code else error.code
            raise InternalError(
                f"the sandbox could not be {self.what}: {error.message}",
                code=code,
                **{**error.context, "step": name},
            ) from error
        self.timings_ms[name] = round((time.monotonic() - began) * 1000, 2)
        self.timings_ms["total"] = round((time.monotonic() - self._began) * 1000, 2)


def template_of(resources: Resources, spec: SandboxSpec) -> TemplateImage:
    """Raises NotFound `template_not_found`."""
    return template_named(resources.images, spec.template)


def template_named(images: ImageSet, name: str) -> TemplateImage:
    """Raises NotFound `template_not_found`."""
    try:
        return images.templates[name]
    except KeyError:
        known = ", ".join(sorted(images.templates))
        message = f"there is no template {name!r}; there is: {known}"
        if name in TEMPLATES:
            message = (
                f"template {name!r} is not built on this node: run `python -m skerry.images build {name}` and start the"
                " server anew"
            )
        raise NotFound(message, code="template_not_found", template=name, available=known) from None


def plan(
    resources: Resources,
    sandbox_id: str,
    spec: SandboxSpec,
    origin: Manifest | None,
    *,
    phase: Phase = "creating",
) -> Entry:
    """What a sandbox is to be made of: of `origin`, or of its template where that is None. Makes nothing.

    Raises NotFound `template_not_found`, InvalidRequest (`disk_mb`).
    """
    layer = ids.new_id("ly")
    if origin is None:
        template = template_of(resources, spec)
        base, _ = template.disk_for(spec.disk_mb)
        layers, env, memory = (layer,), template.env, False
        user, cwd = template.default_user, template.default_cwd or None
    else:
        if spec.disk_mb < origin.disk_mb:
            raise InvalidRequest.of(
                "disk_mb",
                f"must be at least {origin.disk_mb}, the size of the disk it is made of",
                given=spec.disk_mb,
                allowed=origin.disk_mb,
            )
        base, layers, env, memory = Path(origin.base), (*origin.layers, layer), origin.env, origin.memory
        user, cwd = origin.default_user, origin.default_cwd
    cloned = origin if memory else None
    return Entry(
        sandbox_id=sandbox_id,
        phase=phase,
        template=spec.template if origin is None else origin.template,
        cpu=cloned.cpu if cloned else spec.cpu,
        memory_mb=cloned.memory_mb if cloned else spec.memory_mb,
        disk_mb=spec.disk_mb,
        base=str(base),
        layers=layers,
        artefacts=cloned.artefacts if cloned else resources.artefacts,
        env={**(resources.trust.env if origin is None else {}), **env, **spec.env},
        machine_id=secrets.token_hex(16),
        default_user=user,
        default_cwd=cwd,
        vm_id=sandbox_id,
        image=cloned.image_id if cloned else None,
        start_kind="clone" if cloned else "boot",
        bounded=resources.cgroups.usable,
        token=cloned.token if cloned else None,
        generation=cloned.generation if cloned else 0,
        egress=spec.egress,
        names=cloned.names if cloned else (),
    )


async def assemble(resources: Resources, held: Held, entry: Entry, origin: Manifest | None, steps: Steps) -> Entry:
    """Bring up the VM of an entry: boot it, or restore the memory of `origin`, standing still. What it holds at any
    moment is in `held`, and all of it is written down before it is made; on failure or cancellation the caller removes
    it. `entry.layers` are there already but for the last, which is made here."""
    async with steps.step("network"):
        slot = held.slot = await resources.slots.take()
        held.netns = slot.netns
    entry = replace(entry, netns=slot.netns)
    async with steps.step("journal"):
        await in_thread(resources.keep.hold, entry)
        await in_thread(resources.journal.write, entry)
    directory = resources.config.vms_dir / entry.vm_id
    async with steps.step("disk"):
        await in_thread(_make_disk, resources, directory, entry)
    async with steps.step("cgroup"):
        procs = await in_thread(resources.cgroups.create, entry.vm_id, limits_of(resources, entry))
    async with steps.step("vmm"):
        vm = VmSpec(
            vm_id=entry.vm_id,
            cpu=entry.cpu,
            memory_mb=entry.memory_mb,
            kernel=Path(entry.artefacts["kernel"]),
            initramfs=Path(entry.artefacts["initramfs"]),
            disk=resources.keep.layers.path(entry.layers[-1]),
            agent_image=Path(entry.artefacts["agent"]),
            run_dir=directory,
            netns=slot.netns,
            tap=slot.tap,
            cgroup_procs=procs,
            backing=(*map(resources.keep.layers.path, entry.layers[:-1]), Path(entry.base)),
            disk_bytes_per_s=resources.config.disk_mb_per_s << 20,
            disk_operations_per_s=resources.config.disk_operations_per_s,
            grown_disk=origin is not None and entry.disk_mb > origin.disk_mb,
            restore=resources.keep.images.memory(origin.image_id) if origin and origin.memory else None,
        )
        handle = held.handle = await resources.driver.start(vm)
    return replace(entry, handle=handle)


def limits_of(resources: Resources, entry: Entry) -> Limits:
    config = resources.config
    return Limits(
        (entry.memory_mb + VMM_OVERHEAD_MB) << 20,
        entry.cpu,
        waiting=entry.phase == "pool",
        disk_bytes_per_s=config.disk_mb_per_s << 20,
        disk_operations_per_s=config.disk_operations_per_s,
    )


async def awaken(
    resources: Resources,
    held: Held,
    entry: Entry,
    agents: Agents,
    steps: Steps,
    *,
    fresh: bool,
    phase: Phase = "running",
    link: AgentLink | None = None,
) -> tuple[Entry, AgentLink]:
    """Let an assembled VM run and tell its guest who it is. `entry.token` is what the guest knows now; None: a guest
    that boots. `fresh`: it begins a life of its own, instead of going on with one. `link`: one that speaks with it."""
    slot, handle = held.slot, held.handle
    if slot is None or handle is None:
        raise InternalError("the VM is not assembled", step="boot")
    if phase != "pool":
        async with steps.step("wall"):
            directory = resources.config.vms_dir / entry.vm_id
            held.wall = await resources.walls.open(slot, entry.sandbox_id, entry.egress, directory, entry.names)
    deadline_s = resources.config.boot_deadline_s * load_factor()
    if link is None:
        link = agents.link(entry.sandbox_id, slot.open_socket, token=entry.token, generation=entry.generation)
    identity = _identity(entry, fresh=fresh)
    boots = entry.token is None
    async with steps.step("boot"):
        if boots:
            await _unless_it_ends(resources, handle, agents.reachable(slot.open_socket), deadline_s)
        else:
            await resources.driver.resume(handle)
    async with steps.step("identify"):
        link = await _unless_it_ends(resources, handle, _identify(agents, slot, link, identity), deadline_s)
    entry = replace(entry, phase=phase, handle=handle, token=identity.token, generation=identity.generation)
    async with steps.step("record"):
        await in_thread(resources.journal.write, entry)
    if boots:
        async with steps.step("trust"):
            await furnish(link, resources.trust)
        await _start(resources, entry, link, steps)
    return entry, link


async def _start(resources: Resources, entry: Entry, link: AgentLink, steps: Steps) -> None:
    """What its template wants to run in every sandbox. A clone of a memory image has it running already."""
    template = resources.images.templates.get(entry.template)
    if template is None or template.start is None:
        return
    async with steps.step("start"):
        if len(entry.layers) == 1:  # nobody has changed the template's disk yet
            await start(link, template.start, template.start.ready_timeout_s * load_factor())
        else:
            await start_again(link, template.start)


def _make_disk(resources: Resources, directory: Path, entry: Entry) -> None:
    """The run directory and the layer that the VM is going to write."""
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise host_disk.failure(error, f"{directory} cannot be made", "disk") from error
    make_layer(resources, entry.layers, entry.base, entry.disk_mb)


def make_layer(resources: Resources, layers: tuple[str, ...], base: str, disk_mb: int) -> Path:
    """Make the last of `layers`, empty, over the one before it, or over the base."""
    path = resources.keep.layers.path(layers[-1])
    if len(layers) == 1:
        overlay.create(path, Path(base), disk_mb << 20)
    else:
        under = resources.keep.layers.path(layers[-2])
        overlay.create(path, under, disk_mb << 20, backing_format="qcow2")
    return path


def _identity(entry: Entry, *, fresh: bool) -> Identity:
    return Identity(
        sandbox_id=entry.sandbox_id,
        generation=entry.generation + 1,
        token=secrets.token_urlsafe(32),
        hostname=entry.sandbox_id,
        machine_id=entry.machine_id,
        wall_clock_ns=time.time_ns(),
        entropy=secrets.token_bytes(64),
        env=dict(entry.env),
        default_user=entry.default_user,
        default_cwd=entry.default_cwd,
        fresh=fresh,
    )


def load_factor() -> float:
    """How much longer than on an idle host things may take: 1 to 4."""
    return min(LOAD_FACTOR_MAX, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


async def _identify(agents: Agents, slot: Slot, link: AgentLink, identity: Identity) -> AgentLink:
    """Ask until the agent has taken its identity; returns the link that speaks with it. Has no deadline of its own."""
    while True:
        try:
            await link.identify(replace(identity, wall_clock_ns=time.time_ns()))
        except GuestUnreachable:
            pass
        except OutcomeUnknown:
            told = agents.link(
                identity.sandbox_id, slot.open_socket, token=identity.token, generation=identity.generation
            )
            try:
                await told.processes()
            except (GuestUnreachable, OutcomeUnknown, Unavailable):
                pass  # it has not taken it, or is too busy to say
            else:
                return told
        except SkerryError as error:
            raise InternalError(f"the guest refused its identity: {error.message}") from error
        else:
            return link
        await asyncio.sleep(POLL_S)


async def _unless_it_ends(resources: Resources, handle: VmHandle, act: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Wait for an answer from the guest, but not longer than its VM lives. Raises InternalError with the last lines of
    the console."""
    asked = asyncio.create_task(act)
    ended = asyncio.ensure_future(resources.driver.wait(handle))
    try:
        await asyncio.wait({asked, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        what = ended.result().detail if ended.done() else f"its agent did not answer within {deadline_s:.0f} s"
    finally:
        ended.cancel()
        asked.cancel()
        await asyncio.wait({asked})
    words = await _last_words(resources, handle)
    raise InternalError(f"the guest did not come up: {what}" + (f" ({words})" if words else ""), console=words)


async def _last_words(resources: Resources, handle: VmHandle) -> str:
    lines = (await resources.driver.console(handle)).decode(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-CONSOLE_LINES:] if line.strip())
