"""What one sandbox may take of the machine: a slow disk, bounds in the kernel's books, neighbours that misbehave."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from skerry import Client, Sandbox
from support.machine import instance
from support.misbehaviour import ATTACKS
from support.server import Server

pytestmark = pytest.mark.vm
MB_PER_S, OPERATIONS_PER_S = 16, 400


@pytest.fixture(scope="module")
def slow(new_server: Callable[..., Server]) -> Server:
    """A server whose sandboxes have a slow disk."""
    return new_server(
        SKERRY_DISK_MB_PER_S=str(MB_PER_S), SKERRY_DISK_OPERATIONS_PER_S=str(OPERATIONS_PER_S), SKERRY_POOL_CEILING="0"
    )


def seconds(sandbox: Sandbox, command: str) -> float:
    begun = time.monotonic()
    sandbox.run(command, user="root", check=True, timeout=120)
    return time.monotonic() - begun


def test_a_disk_is_no_faster_than_its_bound_also_after_a_rest_and_over_a_snapshot(slow: Server) -> None:
    write = "dd if=/dev/zero of=/root/f bs=4M count=12 oflag=direct 2>/dev/null"
    read = "dd if=/root/f of=/dev/null bs=4M iflag=direct 2>/dev/null"
    small = "dd if=/root/f of=/dev/null bs=4k count=1200 iflag=direct 2>/dev/null"
    least, least_small = 0.8 * 48 / MB_PER_S, 0.8 * 1200 / OPERATIONS_PER_S
    with Sandbox.create(memory_mb=256, **slow.client) as sandbox, Client(**slow.client) as client:
        for change in ("nothing", "rest", "snapshot"):
            if change == "rest":
                sandbox.pause()
                Sandbox.resume(sandbox.id, **slow.client)
            elif change == "snapshot":
                client.snapshots.delete(sandbox.snapshot("under-it"))
            assert seconds(sandbox, write) > least, change
            assert seconds(sandbox, read) > least, change
            assert seconds(sandbox, small) > least_small, change


def test_every_bound_stands_in_the_kernels_books(slow: Server) -> None:
    with Sandbox.create(memory_mb=256, cpu=1, **slow.client):
        found: dict[str, str] = {}
        for group in Path("/sys/fs/cgroup").glob(f"**/skerry-{instance(slow.data_dir)}/*/"):
            found |= {f.name: f.read_text().strip() for f in group.iterdir() if f.is_file() and _is_bound(f.name)}
    assert found["pids.max"] == "256"
    assert str((256 + 512) << 20) in {found.get("memory.max"), found.get("memory.limit_in_bytes")}
    assert "200000" in {found.get("cpu.cfs_quota_us"), found.get("cpu.max", "").split(" ")[0]}
    disk = [value for name, value in found.items() if name == "io.max" or name.startswith("blkio.throttle.")]
    assert all(str(MB_PER_S << 20) in value or str(OPERATIONS_PER_S) in value for value in disk), disk


def _is_bound(name: str) -> bool:
    bounds = ("pids.max", "memory.max", "memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.max", "io.max")
    return name in bounds or (name.startswith("blkio.throttle.") and name.endswith("ps_device"))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_neighbour_that_misbehaves_harms_nobody(server: Server, attack: str) -> None:
    with (
        Sandbox.create(memory_mb=256, disk_mb=3000, **server.client) as attacker,
        Sandbox.create(memory_mb=256, **server.client) as victim,
    ):
        attacker.commands.start(attack, timeout=None)
        until = time.monotonic() + 8
        while time.monotonic() < until:
            assert victim.run("echo $((6 * 7))", timeout=50).stdout == "42\n"
            victim.files.write("/home/user/mine", b"x" * 10_000)
            assert httpx.get(f"{server.url}/health", timeout=20).status_code == httpx.codes.OK
        assert victim.files.read("/home/user/mine") == "x" * 10_000
        with Sandbox.create(memory_mb=256, **server.client) as another:
            assert another.run("echo $((6 * 7))", timeout=50).stdout == "42\n"
