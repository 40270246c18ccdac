"""The engine with real microVMs: boots, ends of every kind, a server that is killed, and what is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.core.errors import Gone, NotFound, SkerryError
from skerry.core.ids import PROCESS, SANDBOX, new_id
from skerry.core.lifecycle import EndReason
from skerry.core.models import Exited, Output, ProcessSpec, SandboxSpec
from skerry.node.build import build_engine
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from support.node import Left, built_images, cache_dir, open_descriptors, vm_engine
from support.templates import Templates

pytestmark = pytest.mark.vm
SPEC = SandboxSpec(memory_mb=256, env={"FROM": "spec"})
# The kernel shields the first process from signals, but not from root's pen.
OVERWRITE_FIRST_PROCESS = """
maps = [line.split() for line in open("/proc/1/maps")]
with open("/proc/1/mem", "r+b", buffering=0) as memory:
    for where, kind, *_ in maps:
        low, high = (int(x, 16) for x in where.split("-"))
        if kind == "r-xp" and "vsyscall" not in where:
            try: memory.seek(low); memory.write(bytes(min(high - low, 65536)))
            except (OSError, OverflowError): pass
"""
SERVER = """
import asyncio, sys
from pathlib import Path
import structlog
from support.node import vm_engine
from skerry.core.models import ProcessSpec, SandboxSpec
from skerry.node.build import build_engine
from skerry.node.config import NodeConfig

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main():
    engine = vm_engine(NodeConfig(Path(sys.argv[1]), Path(sys.argv[2]), slots=1, pool_floor=0, pool_ceiling=0))
    await engine.start()
    made = await engine.create("sb1", SandboxSpec(memory_mb=256))
    spec = ProcessSpec("pr1", shell="for i in $(seq 100); do echo line $i; sleep 0.1; done; exit 7", background=True)
    await engine.guest("sb1").start(spec)
    print(made.vmm_pid, flush=True)
    await engine.create("sb2", SandboxSpec(memory_mb=256))

asyncio.run(main())
"""


@pytest.fixture
async def config(tmp_path: Path, templates: Templates) -> AsyncIterator[NodeConfig]:
    templates.lend(tmp_path / "data", {"memory_mb": 256})
    before = open_descriptors()
    config = NodeConfig(tmp_path / "data", cache_dir(), slots=1, pool_floor=0, pool_ceiling=0)
    yield config
    if not Left.of(config).nothing:
        async with vm_engine(config) as last:
            for sandbox in last.sandboxes():
                await last.kill(sandbox.id)
    assert Left.of(config).nothing
    assert open_descriptors() <= before + 2


@asynccontextmanager
async def running(config: NodeConfig, spec: SandboxSpec = SPEC) -> AsyncIterator[tuple[Engine, str, Guest]]:
    async with vm_engine(config) as engine:
        name = new_id(SANDBOX)
        await engine.create(name, spec)
        yield engine, name, engine.guest(name)


async def run(guest: Guest, shell: str, user: str | None = None) -> tuple[str, int | None]:
    stream = await guest.start(ProcessSpec(new_id(PROCESS), shell=shell, user=user, timeout_ms=60_000))
    said, code = bytearray(), None
    async for event in stream:
        if isinstance(event, Output):
            said += event.data
        elif isinstance(event, Exited):
            code = event.status.exit_code
    return said.decode(errors="replace"), code


async def test_a_sandbox_is_what_was_asked_for(config: NodeConfig) -> None:
    spec = SandboxSpec(cpu=2, memory_mb=512, disk_mb=4096, env={"FROM": "spec"})
    async with running(config, spec) as (engine, name, guest):
        said, code = await run(guest, 'nproc; hostname; whoami; echo "$FROM"; uname -r; df -m / | tail -1; id -u')
        assert code == 0, said
        lines = said.splitlines()
        assert lines[:4] == ["2", name, "user", "spec"]
        assert lines[4] != os.uname().release
        assert 3500 < int(lines[5].split()[1]) <= 4096
        memory, _ = await run(guest, "grep MemTotal /proc/meminfo")
        assert 400_000 < int(memory.split()[1]) < 524_288
        assert engine.info().vmm.startswith("qemu ")
        assert await engine.kill(name)
    assert Left.of(config).nothing


async def test_a_guest_reaches_nothing(config: NodeConfig) -> None:
    async with running(config) as (_engine, _name, guest):
        probe = """
import socket
for to in (("169.254.0.1", 22), ("169.254.0.1", 1024), ("169.254.169.254", 80), ("1.1.1.1", 443), ("10.0.0.1", 80)):
    s = socket.socket(); s.settimeout(2)
    try: s.connect(to); print("REACHED", to)
    except OSError as e: print("no", e)
for to in (("169.254.0.1", 123), ("8.8.8.8", 443)):
    s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(2)
    try: s.sendto(b"x", to); s.recv(1); print("REACHED", to)
    except OSError as e: print("no", e)
"""
        said, code = await run(guest, f"python3 -c '{probe}'", user="root")
        assert code == 0, said
        assert "REACHED" not in said
        assert len(said.splitlines()) == 7


@pytest.mark.parametrize(
    ("act", "reason", "word"),
    [
        ("poweroff", EndReason.POWEROFF, "shut down"),
        ("panic", EndReason.CRASHED, "Kernel panic"),
        ("agent-dies", EndReason.CRASHED, "Attempted to kill init"),
        ("kill-vmm", EndReason.CRASHED, "QEMU ended"),
    ],
)
async def test_every_end_is_noticed_and_cleaned_up(config: NodeConfig, act: str, reason: EndReason, word: str) -> None:
    async with running(config) as (engine, name, guest), engine.ended() as events:
        waiting = asyncio.create_task(run(guest, "sleep 600"))
        await asyncio.sleep(1)
        if act == "kill-vmm":
            os.kill(engine.sandboxes()[0].vmm_pid, signal.SIGKILL)
        else:
            shell = {
                "poweroff": "echo o > /proc/sysrq-trigger",
                "panic": "echo c > /proc/sysrq-trigger",
                "agent-dies": f"python3 -c '{OVERWRITE_FIRST_PROCESS}'",
            }[act]
            stream = await guest.start(ProcessSpec(new_id(PROCESS), shell=shell, user="root"))
            await stream.aclose()
        async with asyncio.timeout(120):
            event = await anext(events)
        assert (event.sandbox_id, event.reason) == (name, reason)
        assert word in event.detail
        with pytest.raises(Gone) as over:
            await asyncio.wait_for(waiting, 30)
        assert over.value.code == "sandbox_failed"
        left = Left.of(config)
        assert not (left.processes or left.cgroups or left.files)
        with pytest.raises(SkerryError):
            engine.guest(name)


async def test_a_kill_fails_what_is_in_flight_at_once(config: NodeConfig) -> None:
    async with running(config) as (engine, name, guest):
        waiting = [asyncio.create_task(run(guest, "sleep 600")) for _ in range(3)]
        await asyncio.sleep(1)
        assert await engine.kill(name)
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
        assert [getattr(r, "code", r) for r in results] == ["sandbox_killed"] * 3
        with pytest.raises(Gone):
            await guest.metrics()


async def test_a_guest_cannot_fill_the_host_through_its_console(config: NodeConfig) -> None:
    async with running(config) as (engine, name, guest):
        _, code = await run(guest, "timeout 10 head -c 3000000 /dev/zero | tr '\\0' x > /dev/ttyS0; true", user="root")
        assert code == 0
        size = sum(p.stat().st_blocks * 512 for p in (config.vms_dir / name).iterdir() if p.name != "disk.qcow2")
        assert size < 1 << 20
        console = await engine.console(name)
        assert len(console) == 65_536
        assert console.count(b"x") > 60_000


async def test_a_killed_server_leaves_sandboxes_running_and_the_next_one_has_them(config: NodeConfig) -> None:
    command = [sys.executable, "-c", SERVER, str(config.data_dir), str(config.cache_dir)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert server.stdout is not None
        pid = int(await asyncio.wait_for(asyncio.to_thread(server.stdout.readline), 120))
        await asyncio.sleep(0.05)  # the second sandbox is on its way
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert Path(f"/proc/{pid}").exists()
    began = time.monotonic()
    async with vm_engine(config) as engine:
        took = time.monotonic() - began
        adopted = {s.id: s.vmm_pid for s in engine.sandboxes()}
        assert adopted["sb1"] == pid, took
        assert set(adopted) <= {"sb1", "sb2"}  # the second was made in time, or is gone
        await engine.kill("sb2")
        left = Left.of(config)
        assert left.processes == (pid,)
        assert [name for name in left.files if not name.startswith("ly")] == ["sb1", "sb1.json"]
        said, code = bytearray(), None
        async for event in await engine.guest("sb1").attach("pr1"):
            if isinstance(event, Output):
                said += event.data
            elif isinstance(event, Exited):
                code = event.status.exit_code
        assert code == 7
        assert said.decode().splitlines() == [f"line {i}" for i in range(1, 101)]
        assert (await run(engine.guest("sb1"), "echo fresh")) == ("fresh\n", 0)
        await engine.kill("sb1")


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_fifty_lives_leave_nothing(config: NodeConfig) -> None:
    async with vm_engine(config) as engine:
        before = open_descriptors()
        gate = asyncio.Semaphore(4)

        async def live(number: int) -> None:
            async with gate:
                name = f"sb{number}"
                await engine.create(name, SPEC)
                if number % 5 == 0:
                    assert (await run(engine.guest(name), "echo $((6*7))")) == ("42\n", 0)
                assert await engine.kill(name)

        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(live(number))
        left = Left.of(config)
        assert not (left.processes or left.cgroups or left.files)
        assert len(left.namespaces) <= config.slots
        assert open_descriptors() <= before + config.slots
    assert Left.of(config).nothing


async def test_timings_and_memory_are_told(config: NodeConfig, record_property: pytest.FixtureRequest) -> None:
    async with vm_engine(config) as engine:
        made = await engine.create("sb1", SPEC)
        rollup = Path(f"/proc/{made.vmm_pid}/smaps_rollup").read_text()
        pss_mb = next(int(line.split()[1]) // 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
        record_property("measured", json.dumps({**made.timings_ms, "pss_mb": pss_mb}))  # type: ignore[operator]
        assert sum(v for k, v in made.timings_ms.items() if k != "total") <= made.timings_ms["total"] * 1.01
        await engine.kill("sb1")


async def test_a_node_is_built_from_what_the_machine_has(config: NodeConfig) -> None:
    built_images(config.cache_dir)
    engine = await build_engine(replace(config, accelerator="tcg"))
    assert "base" in engine.templates()
    assert engine.info().accelerator == "tcg"
    own = await build_engine(replace(config, accelerator="tcg", qemu=Path("/usr/bin/qemu-system-x86_64")))
    said = subprocess.run(["/usr/bin/qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True)
    assert f"version {own.info().vmm.removeprefix('qemu ')}" in said.stdout
    with pytest.raises(NotFound) as missing:
        await build_engine(replace(config, cache_dir=config.data_dir / "none"))
    assert missing.value.code == "images_not_built"
