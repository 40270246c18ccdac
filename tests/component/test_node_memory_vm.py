"""Real memory of real VMs: what survives a rest, what two copies share, and what they never do."""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.core import ids
from skerry.core.errors import InternalError, NoSpace, SkerryError
from skerry.core.models import Exited, Output, ProcessSpec, SandboxSpec
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from support.node import Left, cache_dir, vm_engine
from support.templates import Templates
from support.waiting import until

pytestmark = pytest.mark.vm
SPEC = SandboxSpec(memory_mb=256)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, templates: Templates) -> NodeConfig:
    data = tmp_path_factory.mktemp("memory")
    templates.lend(data, {"memory_mb": 256})
    return NodeConfig(data, cache_dir(), slots=1, pool_floor=0, pool_ceiling=0)


@pytest.fixture
async def engine(config: NodeConfig) -> AsyncIterator[Engine]:
    async with vm_engine(config) as engine:
        yield engine
        for sandbox in [*engine.sandboxes(), *engine.paused()]:
            await engine.kill(sandbox.id)
        for snapshot in engine.snapshots():
            await engine.delete_snapshot(snapshot)
    left = Left.of(config)
    assert left.nothing, left


async def run(guest: Guest, command: str, *, background: bool = False) -> str:
    spec = ProcessSpec(ids.new_id(ids.PROCESS), shell=command, background=background, timeout_ms=60_000)
    stream = await guest.start(spec)
    out = b""
    try:
        if background:
            return spec.process_id
        async for event in stream:
            if isinstance(event, Output):
                out += event.data
            elif isinstance(event, Exited):
                assert event.status.exit_code == 0, (event, out)
    finally:
        await stream.aclose()
    return out.decode()


async def output(guest: Guest, process_id: str) -> str:
    stream = await guest.attach(process_id, follow=False)
    return b"".join([e.data async for e in stream if isinstance(e, Output)]).decode()


async def test_everything_survives_the_fifth_rest_as_it_did_the_first(engine: Engine) -> None:
    await engine.create("sb1", SPEC)
    guest = engine.guest("sb1")
    boot = await run(guest, "cat /proc/sys/kernel/random/boot_id")
    counter = await run(guest, "i=0; while :; do echo $((i += 1)); sleep 0.1; done", background=True)
    await run(guest, "sudo mount -t tmpfs tmpfs /mnt; sudo chmod 777 /mnt; exec 9>/tmp/open; echo kept > /mnt/memory")
    for n in range(1, 6):
        await run(guest, f"echo {n} >> /tmp/disk; echo {n} >> /mnt/memory")  # the instant before
        await engine.pause("sb1")
        await engine.resume("sb1")
        guest = engine.guest("sb1")
        wanted = "".join(f"{k}\n" for k in range(1, n + 1))
        assert await run(guest, "cat /tmp/disk") == wanted
        assert await run(guest, "cat /mnt/memory") == "kept\n" + wanted
        assert await run(guest, "cat /proc/sys/kernel/random/boot_id") == boot
        asked = time.time()
        assert asked - 5 <= float(await run(guest, "date +%s.%N")) <= time.time() + 5
    await asyncio.sleep(1)
    lines = (await output(guest, counter)).splitlines()
    assert lines == [str(k) for k in range(1, len(lines) + 1)]
    assert len(lines) > 10
    await run(
        guest, "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches; sudo dmesg | grep -iE 'ext4.*error' && exit 1; true"
    )
    assert await run(guest, "cat /tmp/disk") == "1\n2\n3\n4\n5\n"


async def test_a_long_chain_of_layers_is_made_shorter_and_holds_the_same(engine: Engine, config: NodeConfig) -> None:
    await engine.create("sb1", SPEC)
    for n in range(11):
        await run(engine.guest("sb1"), f"head -c 100000 /dev/urandom > /tmp/f{n}; sha256sum /tmp/f* > /tmp/sums; sync")
        await engine.pause("sb1")
        await engine.resume("sb1")
    guest = engine.guest("sb1")
    await run(guest, "echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert (await run(guest, "sha256sum -c /tmp/sums")).count("OK") == 11
    assert len(list((config.state_dir / "layers").glob("*"))) < 12


DRAW = """
import os, secrets, sys, time, uuid
while True:
    print(os.urandom(8).hex(), secrets.token_hex(8), uuid.uuid4().hex, flush=True)
    time.sleep(0.01)
"""


async def test_copies_never_draw_the_same_random_bytes(engine: Engine) -> None:
    """Not even in a process that was running when they were made."""
    await engine.create("sb1", SPEC)
    guest = engine.guest("sb1")
    await guest.write_file("/tmp/draw.py", _once(DRAW.encode()))
    process = await run(guest, "exec python3 /tmp/draw.py", background=True)
    await asyncio.sleep(2)
    copies = await engine.fork("sb1", {f"sb{n}": SPEC for n in range(2, 5)})
    assert not [c for c in copies.values() if isinstance(c, SkerryError)], copies
    await engine.snapshot("sb1", "snp1")
    await engine.create("sb5", SPEC, snapshot_id="snp1")
    await engine.create("sb6", SPEC, snapshot_id="snp1")
    await asyncio.sleep(2)
    drawn = {}
    for name in ("sb1", "sb2", "sb3", "sb4", "sb5", "sb6"):
        drawn[name] = (await output(engine.guest(name), process)).split()
        assert len(drawn[name]) > 30, name
    # what was drawn before the copy is in all of them; what came after is in one
    seen: dict[str, set[str]] = {}
    for name, words in drawn.items():
        for word in words:
            seen.setdefault(word, set()).add(name)
    for name, words in drawn.items():
        shared = [n for n, word in enumerate(words) if len(seen[word]) > 1]
        assert shared == list(range(len(shared))), f"{name} drew again what a copy drew"
        assert len(words) > len(shared), f"{name} drew nothing of its own"
    identities = {n: await run(engine.guest(n), "cat /etc/machine-id /etc/hostname; hostname") for n in drawn}
    assert len(set(identities.values())) == len(identities)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_twenty_forks_all_answer(engine: Engine) -> None:
    await engine.create("sb1", SPEC)
    await run(engine.guest("sb1"), "echo mine > /dev/shm/x")
    copies = await engine.fork("sb1", {f"f{n}": SPEC for n in range(20)})
    assert not [c for c in copies.values() if isinstance(c, SkerryError)], copies
    answers = await asyncio.gather(*(run(engine.guest(n), "cat /dev/shm/x; hostname") for n in copies))
    assert answers == [f"mine\n{n}\n" for n in copies]
    await run(engine.guest("f0"), "echo other > /dev/shm/x")
    assert await run(engine.guest("f1"), "cat /dev/shm/x") == "mine\n"
    assert await run(engine.guest("sb1"), "cat /dev/shm/x") == "mine\n"


async def test_a_snapshot_is_of_its_moment_and_outlives_its_sandbox(engine: Engine) -> None:
    await engine.create("sb1", SPEC)
    await run(engine.guest("sb1"), "echo before > /tmp/x; echo before > /dev/shm/x")
    snapshot = await engine.snapshot("sb1", "snp1")
    assert snapshot.timings_ms["stood_still"] > 0
    await run(engine.guest("sb1"), "echo after > /tmp/x; echo after > /dev/shm/x; sync")
    disk = await engine.snapshot("sb1", "snp2", memory=False)
    assert not disk.memory
    await engine.kill("sb1")
    await engine.create("sb2", SPEC, snapshot_id="snp1")
    assert await run(engine.guest("sb2"), "cat /tmp/x /dev/shm/x") == "before\nbefore\n"
    await engine.create("sb3", SandboxSpec(memory_mb=512, cpu=2), snapshot_id="snp2")
    assert await run(engine.guest("sb3"), "cat /tmp/x; test -e /dev/shm/x || echo none; nproc") == "after\nnone\n2\n"


async def test_a_disk_alone_comes_back_with_a_new_boot(engine: Engine) -> None:
    await engine.create("sb1", SandboxSpec(memory_mb=256, env={"MINE": "1"}))
    guest = engine.guest("sb1")
    boot = await run(guest, "cat /proc/sys/kernel/random/boot_id")
    await run(guest, "echo unsynced > /tmp/x; echo gone > /dev/shm/x; sleep 500 & echo", background=True)
    await asyncio.sleep(1)
    await engine.pause("sb1", memory=False)
    assert (await engine.resume("sb1")).start_kind == "boot"
    guest = engine.guest("sb1")
    assert await run(guest, "cat /tmp/x; test -e /dev/shm/x || echo none; pgrep -c '^sleep$' || true; echo $MINE") == (
        "unsynced\nnone\n0\n1\n"
    )
    assert await run(guest, "cat /proc/sys/kernel/random/boot_id") != boot


async def test_a_larger_disk_is_seen_by_a_clone(engine: Engine) -> None:
    await engine.create("sb1", SandboxSpec(memory_mb=256, disk_mb=12_288))
    blocks = int((await run(engine.guest("sb1"), "df --output=size -k / | tail -1")).strip())
    assert 11_000_000 < blocks <= 12_288 * 1024
    assert len(engine.images()) >= 1
    assert engine.sandboxes()[0].start_kind == "clone"


async def test_a_damaged_image_is_named_and_the_sandbox_stays(engine: Engine, config: NodeConfig) -> None:
    await engine.create("sb1", SPEC)
    await engine.pause("sb1")
    image = next(p for p in (config.state_dir / "images").iterdir() if p.name.startswith("im"))
    with (image / "ram").open("r+b") as file:
        at = os.lseek(file.fileno(), 0, os.SEEK_DATA) + 5000
        whole = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([whole[0] ^ 1]), at)
        with pytest.raises(InternalError) as damaged:
            await engine.resume("sb1")
        assert damaged.value.code == "image_damaged"
        assert [p.id for p in engine.paused()] == ["sb1"]
        os.pwrite(file.fileno(), whole, at)
    await engine.resume("sb1")
    assert await run(engine.guest("sb1"), "echo back") == "back\n"


async def test_a_qemu_that_dies_in_a_pause_ends_the_sandbox_and_leaves_nothing(engine: Engine) -> None:
    made = await engine.create("sb1", SPEC)
    under_way = asyncio.ensure_future(engine.pause("sb1"))
    await asyncio.sleep(secrets.randbelow(200) / 1000)
    os.kill(made.vmm_pid, signal.SIGKILL)
    try:
        await under_way
    except SkerryError:
        await until(lambda: not engine.sandboxes())
        assert engine.paused() == []
    else:  # it was kept before it died
        assert [p.id for p in engine.paused()] == ["sb1"]
        await engine.resume("sb1")


async def test_paused_and_running_ones_survive_the_server(config: NodeConfig, tmp_path: Path) -> None:
    async with vm_engine(config) as first:
        await first.create("sb1", SPEC)
        await first.create("sb2", SPEC)
        await run(first.guest("sb2"), "echo kept > /dev/shm/x")
        await first.pause("sb2")
        await first.snapshot("sb1", "snp1")
    async with vm_engine(config) as second:
        assert [s.id for s in second.sandboxes()] == ["sb1"]
        assert [p.id for p in second.paused()] == ["sb2"]
        await second.resume("sb2")
        assert await run(second.guest("sb2"), "cat /dev/shm/x") == "kept\n"
        await second.create("sb3", SPEC, snapshot_id="snp1")
        for name in ("sb1", "sb2", "sb3"):
            await second.kill(name)
        await second.delete_snapshot("snp1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=420m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_a_host_whose_disk_is_full_keeps_the_sandbox_running(small_disk: Path) -> None:
    config = NodeConfig(small_disk / "data", cache_dir(), slots=1, pool_floor=0, pool_ceiling=0, disk_floor_mb=0)
    async with vm_engine(config) as engine:
        await engine.create("sb1", SPEC)
        await run(engine.guest("sb1"), "echo kept > /dev/shm/x")
        ballast = small_disk / "ballast"
        for left_mb in (2, 40, 90):  # too little for the base, for what was written, for nothing
            with ballast.open("wb") as file:
                free = os.statvfs(small_disk)
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (left_mb << 20))
            for act in (lambda: engine.pause("sb1"), lambda: engine.snapshot("sb1", "snp1")):
                with pytest.raises(NoSpace) as full:
                    await act()
                assert full.value.code == "host_disk_full"
                assert [s.id for s in engine.sandboxes()] == ["sb1"]
                assert engine.snapshots() == []
                assert await run(engine.guest("sb1"), "cat /dev/shm/x") == "kept\n"
            ballast.unlink()
        await engine.pause("sb1")
        await engine.resume("sb1")
        assert await run(engine.guest("sb1"), "cat /dev/shm/x") == "kept\n"
        await engine.kill("sb1")
