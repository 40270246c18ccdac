"""A VmDriver without virtual machines, for finding out what the rest does when a driver fails.

A "VM" is the real guest agent as an ordinary process of this machine, in a network namespace of its own that hangs on
the sandbox's namespace where the tap would be. It isolates nothing: what runs in such a guest runs on the host.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from skerry.core.errors import InternalError
from skerry.node.aio import TaskSet, finish, in_thread
from skerry.node.net.rules import GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC
from skerry.node.process import ProcessId, Watched, identify, working_below
from skerry.node.vmm.driver import Capabilities, MemoryImage, Saved, VmExit, VmHandle, VmSpec
from skerry.node.vmm.qemu.launch import spawn

Method = Literal[
    "start", "started", "restore", "stop", "recover", "wait", "pause", "resume", "console", "save", "saved", "save_disk"
]
"""`started` and `saved` are the moments in `start` and `save` after the act is done; `restore` strikes a start from an
image."""
COMMAND_TIMEOUT_S: Final = 20.0
MARK: Final = "SKERRY_FAKE_VM"

# $1: working directory; then cgroup.procs files up to "--"; then the program. The process joins its cgroups before
# the program runs.
_SHIM: Final = """\
cd "$1" || exit 70; shift
while [ "$1" != -- ]; do echo $$ > "$1" || exit 71; shift; done; shift
exec "$@"
"""


@dataclass(slots=True)
class Faults:
    """What goes wrong. May be changed at any time; applies from then on."""

    fail: set[Method] = field(default_factory=set)
    """These raise InternalError."""
    hang: set[Method] = field(default_factory=set)
    """These never return (but can be cancelled)."""
    delay_s: dict[Method, float] = field(default_factory=dict)
    die_after_s: float | None = None
    """Every VM dies this long after its start."""
    lose: bool = False
    """`recover` finds nothing (and ends what there is)."""
    agent: bool = True
    """False: the guest never comes up."""
    birth: Path | None = None
    """The agent's compiled half (`skerry.images.compiled`); None: beside its sources."""

    async def strike(self, method: Method) -> None:
        if (delay := self.delay_s.get(method)) is not None:
            await asyncio.sleep(delay)
        if method in self.hang:
            await asyncio.Event().wait()
        if method in self.fail:
            raise InternalError(f"the fake driver fails at {method}", step="vmm")


@dataclass(slots=True)
class _Vm:
    watched: Watched
    exit: asyncio.Future[VmExit]


class FakeDriver:
    """A memory image holds nothing: a guest that is restored begins anew."""

    def __init__(self, faults: Faults | None = None, *, snapshots: bool = False) -> None:
        self.faults = faults or Faults()
        self.snapshots = snapshots
        self._vms: dict[str, _Vm] = {}
        self._tasks = TaskSet()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("fake", "1", "tcg", memory_snapshots=self.snapshots)

    def machine(self, cpu: int, memory_mb: int) -> dict[str, str]:
        return {"vmm": "fake 1", "cpu": str(cpu), "memory_mb": str(memory_mb)}

    async def start(self, spec: VmSpec) -> VmHandle:
        await self.faults.strike("start")
        if spec.restore is not None:
            await self.faults.strike("restore")
            if not (spec.restore.ram.exists() and spec.restore.devices.exists()):
                raise InternalError("the memory image is not there", step="restore")
        made: list[ProcessId] = []
        watched: Watched | None = None

        def body() -> None:
            made.append(_launch(spec, agent=self.faults.agent, birth=self.faults.birth))
            if self.faults.agent:
                _connect(spec, made[0].pid)

        try:
            await in_thread(body)
            watched = Watched.open(made[0])
            await self.faults.strike("started")
        except BaseException:
            await finish(_end(watched or (Watched.open(made[0]) if made else None)))
            raise
        if watched is None:
            raise InternalError("the fake guest ended at once", step="vmm")
        self._track(spec.vm_id, watched)
        return VmHandle("fake", 1, spec.vm_id, {"pid": made[0].pid, "started": made[0].started})

    def _track(self, vm_id: str, watched: Watched) -> None:
        vm = self._vms[vm_id] = _Vm(watched, asyncio.get_running_loop().create_future())
        self._tasks.spawn(self._watch(vm), name=f"fake-{vm_id}")
        if self.faults.die_after_s is not None:
            self._tasks.spawn(_die(watched, self.faults.die_after_s), name=f"fake-death-{vm_id}")

    @staticmethod
    async def _watch(vm: _Vm) -> None:
        await vm.watched.wait()
        if not vm.exit.done():
            vm.exit.set_result(VmExit(guest_shutdown=False, guest_panicked=False, detail="the fake VM ended"))

    async def stop(self, handle: VmHandle) -> None:
        await self.faults.strike("stop")
        vm = self._vms.pop(handle.vm_id, None)
        await finish(_end(vm.watched if vm is not None else Watched.open(_process(handle))))
        if vm is not None and not vm.exit.done():
            vm.exit.set_result(VmExit(guest_shutdown=False, guest_panicked=False, detail="stopped"))

    async def recover(self, handle: VmHandle) -> bool:
        await self.faults.strike("recover")
        if handle.vm_id in self._vms:
            return self._vms[handle.vm_id].watched.alive
        watched = Watched.open(_process(handle))
        if watched is None:
            return False
        if self.faults.lose:
            await finish(_end(watched))
            return False
        self._track(handle.vm_id, watched)
        return True

    async def sweep(self, run_root: Path, keep: Collection[int]) -> list[int]:
        ended: list[int] = []
        for pid in await in_thread(working_below, run_root):
            if pid not in keep and _is_ours(pid):
                with contextlib.suppress(InternalError):  # gone meanwhile
                    await finish(_end(Watched.open(identify(pid))))
                    ended.append(pid)
        return ended

    def wait(self, handle: VmHandle) -> Awaitable[VmExit]:
        return self._wait(self._vm(handle))

    async def _wait(self, vm: _Vm) -> VmExit:
        await self.faults.strike("wait")
        return await asyncio.shield(vm.exit)

    def pid(self, handle: VmHandle) -> int:
        return int(handle.state["pid"])

    async def pause(self, handle: VmHandle) -> None:
        await self.faults.strike("pause")
        self._vm(handle).watched.signal(signal.SIGSTOP)

    async def resume(self, handle: VmHandle) -> None:
        await self.faults.strike("resume")
        self._vm(handle).watched.signal(signal.SIGCONT)

    async def save(self, handle: VmHandle, target: MemoryImage, *, layer: Path | None, go_on: bool) -> Saved:
        await self.faults.strike("save")
        self._check_layer(layer)
        await self.pause(handle)
        try:
            target.ram.write_bytes(b"memory of " + handle.vm_id.encode())
            target.devices.write_bytes(b"devices")
            await self.faults.strike("saved")
        except BaseException:
            for file in (target.ram, target.devices):
                file.unlink(missing_ok=True)
            await finish(self.resume(handle))
            raise
        if go_on:
            await self.resume(handle)
        return Saved(0, {"stood_still": 0.0})

    async def save_disk(self, handle: VmHandle, *, layer: Path | None, go_on: bool) -> Saved:
        await self.faults.strike("save_disk")
        self._check_layer(layer)
        if not go_on:
            await self.pause(handle)
        return Saved(0, {})

    @staticmethod
    def _check_layer(layer: Path | None) -> None:
        if layer is not None and not layer.exists():
            raise InternalError(f"the layer {layer} is not there", step="layer")

    async def console(self, handle: VmHandle) -> bytes:
        await self.faults.strike("console")
        return b"the fake console\n" if handle.vm_id in self._vms else b""

    async def release(self) -> None:
        await self._tasks.aclose()
        for vm in self._vms.values():
            vm.watched.close()
            vm.exit.cancel()
        self._vms.clear()

    def _vm(self, handle: VmHandle) -> _Vm:
        try:
            return self._vms[handle.vm_id]
        except KeyError:
            raise InternalError(f"VM {handle.vm_id} is not known here", step="vmm") from None


async def _end(watched: Watched | None) -> None:
    if watched is not None:
        try:
            await watched.kill()
        finally:
            watched.close()


async def _die(watched: Watched, after_s: float) -> None:
    await asyncio.sleep(after_s)
    watched.signal(signal.SIGKILL)


def _process(handle: VmHandle) -> ProcessId:
    return ProcessId(int(handle.state["pid"]), int(handle.state["started"]))


def _is_ours(pid: int) -> bool:
    try:
        return f"{MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _launch(spec: VmSpec, *, agent: bool, birth: Path | None) -> ProcessId:
    """The process of the guest, in a new network namespace that leads nowhere yet."""
    guest = ["sleep", "infinity"]
    if agent:
        guest = [sys.executable, "-m", "skerry.guest.agent", "--listen", "0.0.0.0:1024", "--allow", HOST_ADDRESS]
        guest += ["--birth", str(birth)] if birth is not None else []
    procs = map(str, spec.cgroup_procs)
    command = ["/bin/sh", "-c", _SHIM, "sh", str(spec.run_dir), *procs, "--", "unshare", "--net", *guest]
    path = {"PYTHONPATH": str(Path(__file__).parents[3]), MARK: spec.vm_id}
    try:
        return identify(spawn(command, {}, path))
    except OSError as error:
        raise InternalError(f"the fake guest could not be started: {error}", step="vmm") from error


def _connect(spec: VmSpec, pid: int) -> None:
    """Put a cable where the tap was, with the same addresses at both ends."""
    guest = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
    host = ["ip", "-n", spec.netns]
    commands = [
        [*host, "link", "del", spec.tap],
        [
            *host,
            "link",
            "add",
            spec.tap,
            "address",
            HOST_MAC,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(pid),
        ],
        [*host, "addr", "add", f"{HOST_ADDRESS}/30", "dev", spec.tap],
        [*host, "link", "set", spec.tap, "up"],
        [*guest, "link", "set", "lo", "up"],
        [*guest, "link", "set", "eth0", "address", GUEST_MAC, "up"],
        [*guest, "addr", "add", f"{GUEST_ADDRESS}/30", "dev", "eth0"],
    ]
    own = Path("/proc/self/ns/net").readlink()
    for _ in range(200):  # `unshare` has to have run
        try:
            if Path(f"/proc/{pid}/ns/net").readlink() != own:
                break
        except OSError as error:
            raise InternalError("the fake guest ended at once", step="vmm") from error
        time.sleep(0.01)
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        raise InternalError(f"the fake guest has no network: {error} {detail.decode()}", step="vmm") from error
