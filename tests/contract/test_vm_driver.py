"""One suite for every VmDriver: what the engine may rely on. The real driver boots microVMs."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skerry import images
from skerry.core.errors import InternalError
from skerry.node.agents import knock
from skerry.node.cgroup import Cgroups, Limits
from skerry.node.disk import overlay
from skerry.node.net import namespace
from skerry.node.process import start_time, working_below
from skerry.node.vmm.driver import VmDriver, VmHandle, VmSpec
from skerry.node.vmm.fake import FakeDriver, Faults
from skerry.node.vmm.qemu.driver import QemuDriver
from support.guest_agent import compiled_half
from support.node import built_images, cache_dir, open_descriptors


@dataclass
class Bench:
    """A place for VMs: a directory, a namespace with a tap, a cgroup; and drivers as successive servers make them."""

    make_driver: Callable[[], VmDriver]
    spec: VmSpec
    root: Path
    netns_fd: int
    driver: VmDriver

    async def next_server(self) -> VmDriver:
        await self.driver.release()
        self.driver = self.make_driver()
        return self.driver

    async def answers(self) -> None:
        async with asyncio.timeout(120):
            await knock(lambda: namespace.socket_in(self.netns_fd))

    async def silent(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.6):
                await knock(lambda: namespace.socket_in(self.netns_fd))
                return False
        return True


def _qemu(version: str | None) -> tuple[Callable[[], VmDriver], images.ImageSet]:
    found = built_images(cache_dir())
    toolchain = images.toolchain(cache_dir(), version) if version else found.toolchain
    return (lambda: QemuDriver(toolchain, "tcg", found.jail)), found


def fake_driver() -> FakeDriver:
    return FakeDriver(Faults(birth=compiled_half()))


@pytest.fixture(
    params=["fake", pytest.param("qemu", marks=pytest.mark.vm), pytest.param("qemu-host", marks=pytest.mark.vm)]
)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    descriptors = open_descriptors()
    root = tmp_path / "vms"
    run_dir = root / "vm1"
    run_dir.mkdir(parents=True)
    kernel = initramfs = agent = tmp_path / "none"
    backing: tuple[Path, ...] = ()
    make: Callable[[], VmDriver] = fake_driver
    if request.param != "fake":
        make, found = _qemu("host" if request.param == "qemu-host" else None)
        kernel, initramfs, agent = found.kernel.vmlinuz, found.kernel.initramfs, found.agent.image
        backing = (found.templates["base"].disk,)
        overlay.create(run_dir / "disk.qcow2", *backing, 8 << 30)
    netns = f"sk-test-{secrets.token_hex(4)}"
    namespace.create(netns)
    fd = namespace.open_namespace(netns)
    cgroups = Cgroups(f"test-{secrets.token_hex(3)}")
    procs = cgroups.create("vm1", Limits(1 << 30, 1))
    spec = VmSpec("vm1", 1, 256, kernel, initramfs, run_dir / "disk.qcow2", agent, run_dir, netns, "tap0", {}, procs)
    spec = replace(spec, backing=backing)
    bench = Bench(make, spec, root, fd, make())
    yield bench
    await bench.driver.sweep(root, ())
    await bench.driver.release()
    cgroups.remove("vm1")
    cgroups.close()
    os.close(fd)
    namespace.delete(netns)
    assert working_below(root) == {}
    assert open_descriptors() <= descriptors + 2


async def within(seconds: float, act: Awaitable[object]) -> object:
    async with asyncio.timeout(seconds):
        return await act


async def test_a_vm_starts_answers_and_stops(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    pid = bench.driver.pid(handle)
    assert working_below(bench.root) == {pid: bench.spec.run_dir}
    for procs in bench.spec.cgroup_procs:
        assert str(pid) in procs.read_text().split()
    assert os.getsid(pid) == pid
    await bench.answers()
    ending = asyncio.ensure_future(bench.driver.wait(handle))
    await bench.driver.stop(handle)
    assert start_time(pid) is None
    exit_ = await within(60, ending)
    assert exit_.guest_shutdown is False  # type: ignore[attr-defined]
    assert await bench.silent()
    await bench.driver.stop(handle)


async def test_a_handle_finds_the_vm_again_in_another_server(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    await bench.answers()
    kept = VmHandle(**{f: getattr(handle, f) for f in ("driver", "version", "vm_id", "state")})
    driver = await bench.next_server()
    assert start_time(driver.pid(kept)) is not None
    assert await driver.recover(kept) is True
    assert await driver.recover(kept) is True
    await bench.answers()
    assert await driver.sweep(bench.root, {driver.pid(kept)}) == []
    ending = asyncio.ensure_future(driver.wait(kept))
    os.kill(driver.pid(kept), signal.SIGKILL)
    await within(60, ending)
    driver = await bench.next_server()
    assert await driver.recover(kept) is False


async def test_a_handle_of_another_process_with_the_same_pid_is_gone(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    other = replace(handle, vm_id="vm2", state={**handle.state, "started": handle.state["started"] - 1})
    assert await bench.driver.recover(other) is False
    await bench.driver.stop(other)
    assert start_time(bench.driver.pid(handle)) is not None


async def test_a_killed_vmm_ends_the_wait(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    os.kill(bench.driver.pid(handle), signal.SIGKILL)
    exit_ = await within(60, bench.driver.wait(handle))
    assert not exit_.guest_shutdown  # type: ignore[attr-defined]
    assert await within(60, bench.driver.wait(handle)) == exit_
    await bench.driver.stop(handle)


async def test_pause_and_resume(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    await bench.answers()
    for _ in range(2):
        await bench.driver.pause(handle)
    with namespace.socket_in(bench.netns_fd) as probe, contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.get_running_loop().sock_connect(probe, ("169.254.0.2", 1024))
            # A host's own stack may answer for a stopped process; its process does not.
            assert await asyncio.get_running_loop().sock_recv(probe, 1) is None
    for _ in range(2):
        await bench.driver.resume(handle)
    await bench.answers()


async def test_a_server_that_forgot_a_vm_finds_it_by_its_directory(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    pid = bench.driver.pid(handle)
    driver = await bench.next_server()
    assert await driver.sweep(bench.root.parent, ()) == []
    assert await driver.sweep(bench.root, ()) == [pid]
    assert start_time(pid) is None


@pytest.mark.parametrize("after_ms", [0, 5, 20, 60, 150])
async def test_a_start_that_is_cancelled_leaves_nothing_running(bench: Bench, after_ms: int) -> None:
    starting = asyncio.create_task(bench.driver.start(bench.spec))
    await asyncio.sleep(after_ms / 1000)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await bench.driver.stop(await starting)
    assert working_below(bench.root) == {}


async def test_a_start_that_fails_leaves_nothing_running(bench: Bench) -> None:
    with pytest.raises(InternalError):
        await bench.driver.start(replace(bench.spec, netns="sk-test-none"))
    with contextlib.suppress(FileNotFoundError):
        (bench.spec.run_dir / "ram").unlink()
    with pytest.raises(InternalError):
        await bench.driver.start(replace(bench.spec, cgroup_procs=(Path("/nonexistent/cgroup.procs"),)))
    assert working_below(bench.root) == {}


async def test_the_console_is_bounded_and_known(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    assert len(await bench.driver.console(handle)) <= 65_536
    await bench.driver.stop(handle)
    assert await bench.driver.console(handle) == b""


async def test_what_was_never_started_is_an_error_to_wait_for(bench: Bench) -> None:
    handle = await bench.driver.start(bench.spec)
    with pytest.raises(InternalError):
        await bench.driver.pause(replace(handle, vm_id="other"))
    shutil.rmtree(bench.spec.run_dir)
    await bench.driver.stop(handle)
