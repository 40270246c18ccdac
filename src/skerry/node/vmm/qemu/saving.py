"""Memory images on stock QEMU: the devices by their own command, the RAM from outside of it.

`xen-save-devices-state` writes the state of the devices and no RAM; it is in every x86 build and needs no Xen. RAM is a
private mapping of a file, so what the guest wrote is found in the kernel's page map and copied out of the process. What
`migrate-incoming` reads is the devices' file; its RAM is the mapping that QEMU was started with.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.node import host_disk
from skerry.node.aio import finish, in_thread
from skerry.node.memory import pages, ramfile
from skerry.node.vmm.driver import MemoryImage, Saved
from skerry.node.vmm.qemu.qmp import Monitor

LOAD_DEADLINE_S: Final = 30.0
LOAD_POLL_S: Final = 0.002
FILE_MIGRATION: Final = (8, 2)
"""From this version on QEMU reads a file itself; before, it takes an open descriptor."""


@dataclass(slots=True)
class _Timings:
    ms: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        began = time.monotonic()
        yield
        self.ms[name] = round((time.monotonic() - began) * 1000, 2)


async def load(monitor: Monitor, image: MemoryImage, version: tuple[int, ...]) -> None:
    """Read the devices' state into a QEMU started with `-incoming defer -S`. Raises InternalError (`step` restore)."""
    try:
        async with asyncio.timeout(LOAD_DEADLINE_S):
            await _incoming(monitor, image.devices, version)
            while (status := await monitor.status()) == "inmigrate":  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(LOAD_POLL_S)
    except TimeoutError:
        raise InternalError("QEMU did not load the memory image in time", step="restore") from None
    if status not in {"paused", "prelaunch", "postmigrate"}:
        raise InternalError(f"QEMU is {status} after it loaded the memory image", step="restore")


async def _incoming(monitor: Monitor, devices: Path, version: tuple[int, ...]) -> None:
    if version >= FILE_MIGRATION:
        # Kept by QEMU until it ends: it reads from it on its own.
        await monitor.execute("migrate-incoming", {"uri": f"file:{await monitor.add_file(devices, os.O_RDONLY)}"})
        return
    fd = os.open(devices, os.O_RDONLY | os.O_CLOEXEC)
    try:
        await monitor.send_descriptor("incoming", fd)
    finally:
        os.close(fd)
    await monitor.execute("migrate-incoming", {"uri": "fd:incoming"})


async def save(
    monitor: Monitor, pid: int, base: Path, target: MemoryImage, layer: Path | None, *, go_on: bool
) -> Saved:
    """See `VmDriver.save`. The base's share of the RAM is copied before the vCPUs stop, what was written after."""
    timings = _Timings()
    try:
        async with timings.step("base"):
            await in_thread(ramfile.clone, base, target.ram)
        async with _stopped(monitor, timings, go_on=go_on):
            async with (
                timings.step("devices"),
                monitor.file(target.devices, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as devices,
            ):
                await monitor.execute("xen-save-devices-state", {"filename": devices, "live": True})
            async with timings.step("pages"):
                size = await in_thread(_copy_written, pid, base, target.ram)
            await _switch_layer(monitor, layer, timings)
        async with timings.step("sync"):
            await in_thread(_sync, target)
    except BaseException as error:
        for file in (target.ram, target.devices):
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise host_disk.failure(error, "the memory could not be saved", "save") from error
        raise
    return Saved(size, timings.ms)


async def save_disk(monitor: Monitor, layer: Path | None, *, go_on: bool) -> Saved:
    """See `VmDriver.save_disk`. Stopping the vCPUs writes out what QEMU holds of the disk."""
    timings = _Timings()
    async with _stopped(monitor, timings, go_on=go_on):
        await _switch_layer(monitor, layer, timings)
    return Saved(0, timings.ms)


@asynccontextmanager
async def _stopped(monitor: Monitor, timings: _Timings, *, go_on: bool) -> AsyncIterator[None]:
    """The vCPUs stand still in the body. Afterwards they run if `go_on`; if it fails they are as they were."""
    ran = await monitor.status() == "running"
    began = time.monotonic()
    async with timings.step("stop"):
        await monitor.execute("stop")
    try:
        yield
    except BaseException:
        if ran:
            await finish(monitor.execute("cont"))
        raise
    if go_on:
        async with timings.step("cont"):
            await monitor.execute("cont")
        timings.ms["stood_still"] = round((time.monotonic() - began) * 1000, 2)


def _copy_written(pid: int, base: Path, ram: Path) -> int:
    fd = os.open(ram, os.O_RDWR | os.O_CLOEXEC)
    try:
        return pages.copy(pid, pages.written(pid, base), fd)
    finally:
        os.close(fd)


async def _switch_layer(monitor: Monitor, layer: Path | None, timings: _Timings) -> None:
    """From now on the disk is written in `layer`; what it was written in stays as it is. Comes last of what is done
    while the vCPUs stand still, because it is the one step that cannot be undone."""
    if layer is None:
        return
    async with timings.step("layer"):
        await _add_layer(monitor, layer)


async def _add_layer(monitor: Monitor, layer: Path) -> None:
    present = await _disk_node(monitor)
    node = f"disk-{layer.stem}"
    # For writing, and for reading alone: as which QEMU may open it again when there is a layer above it.
    file = await monitor.add_file(layer, os.O_RDWR, os.O_RDONLY)
    storage = {"driver": "file", "filename": file, "cache": {"no-flush": True}}
    overlay = {
        "driver": "qcow2",
        "node-name": node,
        "discard": "unmap",
        "cache": {"no-flush": True},
        "file": storage,
        "backing": None,
    }
    await monitor.execute("blockdev-add", overlay)
    await monitor.execute("blockdev-snapshot", {"node": present, "overlay": node})


async def announce_disk_size(monitor: Monitor) -> None:
    """Tell a restored guest, which remembers the size its disk had, that it has another one now."""
    node = await _disk_node(monitor)
    for known in await monitor.execute("query-named-block-nodes", {"flat": True}):
        if known["node-name"] == node:
            await monitor.execute("block_resize", {"node-name": node, "size": known["image"]["virtual-size"]})


async def _disk_node(monitor: Monitor) -> str:
    for block in await monitor.execute("query-block"):
        inserted = block.get("inserted")
        if inserted and not inserted["ro"]:
            return str(inserted["node-name"])
    raise InternalError("the VM has no writable disk", step="layer")


def _sync(target: MemoryImage) -> None:
    for file in (target.ram, target.devices):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
