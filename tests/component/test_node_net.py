"""The namespace of a sandbox, seen from the inside. Root is needed, as for the product."""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator

import pytest

from skerry.core.errors import InternalError
from skerry.node.net import namespace
from skerry.node.net.slots import SlotPool


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"sk-test-{secrets.token_hex(4)}"
    namespace.create(name)
    yield name
    namespace.delete(name)
    assert name not in namespace.names("sk-test-")


def inside(netns: str, *command: str) -> str:
    return subprocess.run(["ip", "netns", "exec", netns, *command], check=True, capture_output=True, text=True).stdout


def test_it_holds_a_tap_and_no_way_out(netns: str) -> None:
    assert "inet 169.254.0.1/30" in inside(netns, "ip", "-4", "addr", "show", "tap0")
    assert [line.split()[0] for line in inside(netns, "ip", "route").splitlines()] == ["169.254.0.0/30"]
    assert inside(netns, "ip", "-6", "addr") == ""
    assert inside(netns, "cat", "/proc/sys/net/ipv4/ip_forward").strip() == "0"
    assert "02:00:00:00:00:01 PERMANENT" in inside(netns, "ip", "neigh", "show", "dev", "tap0")
    assert inside(netns, "nft", "list", "ruleset").count("policy drop") == 3  # from the guest, through, to the guest


def test_the_rules_are_there_before_the_tap_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"sk-test-{secrets.token_hex(4)}"
    monkeypatch.setattr(namespace.rules, "ruleset", lambda: "this is no ruleset")
    with pytest.raises(InternalError) as failure:
        namespace.create(name)
    assert failure.value.context["step"] == "netns"
    assert "syntax error" in str(failure.value)
    assert name not in namespace.names("sk-test-")


def test_a_socket_lives_inside_while_its_maker_stays_outside(netns: str) -> None:
    home = os.stat("/proc/thread-self/ns/net").st_ino
    fd = namespace.open_namespace(netns)
    try:
        with namespace.socket_in(fd, socket.SOCK_DGRAM) as made:
            made.bind(("169.254.0.1", 0))  # an address that exists in there only
            assert not made.getblocking()
    finally:
        os.close(fd)
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


def test_delete_is_idempotent_and_a_missing_one_is_said() -> None:
    namespace.delete("sk-test-none")
    with pytest.raises(InternalError):
        namespace.open_namespace("sk-test-none")


async def test_a_pool_keeps_slots_ready_and_leaves_none_behind() -> None:
    instance = secrets.token_hex(3)
    pool = SlotPool(instance, 2)
    pool.start()
    try:
        taken = [await pool.take() for _ in range(4)]
        assert len({slot.netns for slot in taken}) == 4
        async with asyncio.timeout(60):
            while len(namespace.names(pool.prefix)) < 6:
                await asyncio.sleep(0.01)
        for slot in taken:
            pool.remove(slot)
    finally:
        await pool.aclose()
    assert namespace.names(pool.prefix) == []


async def test_a_cancelled_take_leaves_nothing() -> None:
    pool = SlotPool(secrets.token_hex(3), 0)
    for delay in (0, 0.001, 0.002, 0.004):
        taking = asyncio.create_task(pool.take())
        await asyncio.sleep(delay)
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            pool.remove(await taking)
    await pool.aclose()
    assert namespace.names(pool.prefix) == []
