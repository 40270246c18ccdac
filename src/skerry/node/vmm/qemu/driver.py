"""QemuDriver: the VmDriver that runs microVMs."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError, SkerryError
from skerry.images.model import Toolchain
from skerry.node.aio import TaskSet, finish, in_thread, log
from skerry.node.process import ProcessId, Watched, identify, working_below
from skerry.node.vmm.driver import Capabilities, MemoryImage, Saved, VmExit, VmHandle, VmSpec
from skerry.node.vmm.qemu import argv, saving, tsc
from skerry.node.vmm.qemu.launch import Launched, launch
from skerry.node.vmm.qemu.qmp import Monitor

HANDLE_VERSION: Final = 1
START_DEADLINE_S: Final = 60.0
RECOVER_DEADLINE_S: Final = 30.0
OVER: Final = frozenset({"shutdown", "internal-error", "guest-panicked", "io-error"})
"""States of QEMU in which a guest will never run again."""


@dataclass(slots=True)
class _Vm:
    run_dir: Path
    watched: Watched
    monitor: Monitor
    exit: asyncio.Future[VmExit]
    launched: Launched | None = None
    """None for a VM that an earlier server started."""
    tail: bytearray = field(default_factory=bytearray)
    stopping: bool = False
    grown_disk: bool = False
    """The guest does not know yet how large its disk is."""


class QemuDriver:
    """One QEMU process per VM, found again by pid, start time and the monitor's socket in its `run_dir`."""

    def __init__(self, toolchain: Toolchain, accelerator: argv.Accelerator, jail: Path) -> None:
        self._toolchain = toolchain
        self._jail = jail
        self._accelerator: argv.Accelerator = accelerator
        self._vms: dict[str, _Vm] = {}
        self._tasks = TaskSet()
        self._capabilities = Capabilities("qemu", toolchain.version_text, accelerator, memory_snapshots=True)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def machine(self, cpu: int, memory_mb: int) -> dict[str, str]:
        return {
            "vmm": f"qemu {self._toolchain.version_text}",
            "accelerator": self._accelerator,
            "cpu_model": argv.CPU[self._accelerator],
            "cpu": str(cpu),
            "memory_mb": str(memory_mb),
            "devices": argv.fingerprint(self._toolchain, self._accelerator),
        }

    async def start(self, spec: VmSpec) -> VmHandle:
        launched: list[Launched] = []

        def body() -> None:
            khz = tsc.khz() if self._accelerator == "tcg" else 0
            launched.append(launch(spec, self._toolchain, self._accelerator, self._jail, khz))

        watched: Watched | None = None
        try:
            await in_thread(body)
            watched = _watch_new(launched[0])
            monitor = await self._first_contact(spec, launched[0])
            if spec.restore is not None:
                await saving.load(monitor, spec.restore, self._toolchain.version)
            await _bound_disk(monitor, spec)
        except BaseException:
            await finish(self._undo_start(launched, watched))
            raise
        vm = _Vm(spec.run_dir, watched, monitor, asyncio.get_running_loop().create_future(), launched[0])
        vm.grown_disk = spec.grown_disk
        self._track(spec.vm_id, vm)
        process = launched[0].process
        ram = spec.restore.ram if spec.restore else spec.run_dir / argv.RAM
        state = {
            "pid": process.pid,
            "started": process.started,
            "run_dir": str(spec.run_dir),
            "ram": str(ram),
        }
        return VmHandle("qemu", HANDLE_VERSION, spec.vm_id, state)

    async def _first_contact(self, spec: VmSpec, launched: Launched) -> Monitor:
        try:
            return await Monitor.connect(spec.run_dir, spec.vm_id, deadline_s=START_DEADLINE_S)
        except InternalError as error:
            await asyncio.sleep(0)  # lets the exit be seen, where there is one
            said = launched.said()
            raise InternalError(f"QEMU did not start: {said or error}", step="vmm") from error

    async def _undo_start(self, launched: list[Launched], watched: Watched | None) -> None:
        for one in launched:
            watched = watched or Watched.open(one.process)
            one.close()
        if watched is not None:
            try:
                await watched.kill()
            finally:
                watched.close()

    def _track(self, vm_id: str, vm: _Vm) -> None:
        self._vms[vm_id] = vm
        self._tasks.spawn(self._watch(vm), name=f"watch-{vm_id}")

    async def _watch(self, vm: _Vm) -> None:
        """Until the guest or its QEMU is over; then nothing is left of the process, and `exit` says how it was."""
        over = asyncio.ensure_future(vm.monitor.guest_over())
        gone = asyncio.ensure_future(vm.watched.wait())
        try:
            await asyncio.wait({over, gone}, return_when=asyncio.FIRST_COMPLETED)
            reason = over.result() if over.done() and not over.cancelled() and over.exception() is None else None
            if reason is not None and vm.watched.alive:
                with contextlib.suppress(InternalError):
                    await self._drain(vm)
                await vm.watched.kill()
            await vm.watched.wait()
        finally:
            over.cancel()
            gone.cancel()
        await vm.monitor.close()
        if not vm.exit.done():
            vm.exit.set_result(self._how_it_ended(vm, reason))

    def _how_it_ended(self, vm: _Vm, reason: str | None) -> VmExit:
        if vm.stopping:
            return VmExit(guest_shutdown=False, guest_panicked=False, detail="stopped")
        if reason is None:
            said = vm.launched.said() if vm.launched else ""
            return VmExit(
                guest_shutdown=False, guest_panicked=False, detail="QEMU ended" + (f": {said}" if said else "")
            )
        lines = bytes(vm.tail).decode(errors="replace").splitlines()
        panic = next((line.strip() for line in reversed(lines) if "Kernel panic" in line), None)
        if panic is not None:
            return VmExit(guest_shutdown=True, guest_panicked=True, detail=panic)
        return VmExit(guest_shutdown=True, guest_panicked=False, detail=f"the guest shut down ({reason})")

    async def stop(self, handle: VmHandle) -> None:
        vm = self._vms.get(handle.vm_id)
        if vm is None:
            await self._stop_unknown(handle)
            return
        vm.stopping = True
        await finish(vm.watched.kill())
        await finish(vm.monitor.close())
        if self._vms.get(handle.vm_id) is vm:
            del self._vms[handle.vm_id]
            self._let_go(vm)
        if not vm.exit.done():
            vm.exit.set_result(self._how_it_ended(vm, None))

    @staticmethod
    async def _stop_unknown(handle: VmHandle) -> None:
        watched = Watched.open(_process(handle))
        if watched is not None:
            try:
                await finish(watched.kill())
            finally:
                watched.close()

    @staticmethod
    def _let_go(vm: _Vm) -> None:
        vm.watched.close()
        if vm.launched is not None:
            vm.launched.close()
            vm.launched = None

    async def recover(self, handle: VmHandle) -> bool:
        if handle.vm_id in self._vms:
            return self._vms[handle.vm_id].watched.alive
        if handle.driver != "qemu" or handle.version != HANDLE_VERSION:
            raise InternalError(f"handle of another format: {handle.driver} {handle.version}", step="recover")
        run_dir = Path(handle.state["run_dir"])
        watched = Watched.open(_process(handle))
        if watched is None:
            return False
        monitor: Monitor | None = None
        try:
            monitor = await Monitor.connect(run_dir, handle.vm_id, deadline_s=RECOVER_DEADLINE_S)
            usable = await monitor.status() not in OVER
        except SkerryError as error:
            log.warning("a VM does not answer its monitor and is given up", vm=handle.vm_id, error=str(error))
            usable = False
        except BaseException:
            if monitor is not None:
                await finish(monitor.close())
            watched.close()
            raise
        if usable and monitor is not None:
            self._track(handle.vm_id, _Vm(run_dir, watched, monitor, asyncio.get_running_loop().create_future()))
            return True
        if monitor is not None:
            await monitor.close()
        try:
            await finish(watched.kill())
        finally:
            watched.close()
        return False

    async def sweep(self, run_root: Path, keep: Collection[int]) -> list[int]:
        ended: list[int] = []
        for pid in await in_thread(working_below, run_root):
            if pid in keep or pid == os.getpid() or not _is_ours(pid):
                continue
            with contextlib.suppress(InternalError):  # gone meanwhile
                watched = Watched.open(identify(pid))
                if watched is not None:
                    try:
                        await finish(watched.kill())
                        ended.append(pid)
                    finally:
                        watched.close()
        return ended

    def wait(self, handle: VmHandle) -> Awaitable[VmExit]:
        return asyncio.shield(self._vm(handle).exit)

    def pid(self, handle: VmHandle) -> int:
        return int(handle.state["pid"])

    async def pause(self, handle: VmHandle) -> None:
        await self._vm(handle).monitor.execute("stop")

    async def resume(self, handle: VmHandle) -> None:
        vm = self._vm(handle)
        await vm.monitor.execute("cont")
        if vm.grown_disk:  # not before: until it runs, the disk is not QEMU's to touch
            await saving.announce_disk_size(vm.monitor)
            vm.grown_disk = False

    async def save(self, handle: VmHandle, target: MemoryImage, *, layer: Path | None, go_on: bool) -> Saved:
        monitor = self._vm(handle).monitor
        return await saving.save(monitor, self.pid(handle), Path(handle.state["ram"]), target, layer, go_on=go_on)

    async def save_disk(self, handle: VmHandle, *, layer: Path | None, go_on: bool) -> Saved:
        return await saving.save_disk(self._vm(handle).monitor, layer, go_on=go_on)

    async def console(self, handle: VmHandle) -> bytes:
        vm = self._vms.get(handle.vm_id)
        if vm is None:
            return b""
        if vm.watched.alive and not vm.exit.done():
            with contextlib.suppress(InternalError):  # it is ending: what is known is given
                await self._drain(vm)
        return bytes(vm.tail)

    @staticmethod
    async def _drain(vm: _Vm) -> None:
        """Reading the ring empties it, so what was read is kept, as much as the ring holds."""
        vm.tail += await vm.monitor.console(argv.CONSOLE_BYTES)
        del vm.tail[: -argv.CONSOLE_BYTES]

    async def release(self) -> None:
        await self._tasks.aclose()
        for vm in self._vms.values():
            await vm.monitor.close()
            self._let_go(vm)
            vm.exit.cancel()
        self._vms.clear()

    def _vm(self, handle: VmHandle) -> _Vm:
        try:
            return self._vms[handle.vm_id]
        except KeyError:
            raise InternalError(f"VM {handle.vm_id} is not known here", step="vmm") from None


async def _bound_disk(monitor: Monitor, spec: VmSpec) -> None:
    """In QEMU, which lets the guest wait: a bound of the kernel's alone holds up whatever else QEMU does. It stays with
    the device when the guest's disk gets a new layer."""
    if not spec.disk_bytes_per_s and not spec.disk_operations_per_s:
        return
    size, often = spec.disk_bytes_per_s, spec.disk_operations_per_s
    await monitor.execute(
        "block_set_io_throttle",
        {
            "id": argv.DISK,
            "bps": 0, "bps_rd": size, "bps_wr": size,
            "iops": 0, "iops_rd": often, "iops_wr": often,
        },
    )  # fmt: skip


def _watch_new(launched: Launched) -> Watched:
    watched = Watched.open(launched.process)
    if watched is None:
        raise InternalError(f"QEMU ended at once: {launched.said()}", step="vmm")
    return watched


def _process(handle: VmHandle) -> ProcessId:
    return ProcessId(int(handle.state["pid"]), int(handle.state["started"]))


def _is_ours(pid: int) -> bool:
    """Whether a process is a QEMU of ours, or the jail that is about to become one."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(a == b"-name" and b.startswith(b"skerry-") for a, b in itertools.pairwise(words))
