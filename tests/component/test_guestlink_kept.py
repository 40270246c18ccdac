"""Connections that are kept for the next command: used again, never trusted, and none while the guest is saved."""

import asyncio
import os
import socket

import pytest

from skerry.core.ids import new_id
from skerry.core.models import ProcessSpec
from skerry.node.guestlink import GuestLink
from skerry.node.guestlink.link import IDLE_MAX
from support.guest_agent import TOKEN, RunningAgent, collect, identity, running_agent


class Line:
    """Opens sockets, and remembers them."""

    def __init__(self) -> None:
        self.opened: list[socket.socket] = []

    def open(self) -> socket.socket:
        self.opened.append(socket.socket())
        return self.opened[-1]


def linked(agent: RunningAgent, line: Line) -> GuestLink:
    return GuestLink("sb0", line.open, address=("127.0.0.1", agent.port), token=TOKEN, generation=1)


def agent_spec(shell: str, user: str | None = None) -> ProcessSpec:
    return ProcessSpec(new_id("pr"), shell=shell, user=user)


async def run(agent: RunningAgent, link: GuestLink, shell: str) -> bytes:
    agent.link = link
    result = await agent.run(shell)
    assert result.status is not None
    return result.stdout


async def test_commands_and_short_questions_share_a_connection() -> None:
    line = Line()
    async with running_agent() as agent:
        link = linked(agent, line)
        for number in range(5):
            assert await run(agent, link, f"echo {number}") == f"{number}\n".encode()
        assert await link.ping()
        assert await run(agent, link, "head -c 300000 /dev/zero | tr '\\0' x") == b"x" * 300_000
        assert len(line.opened) == 1
        assert link.open_connections == 0
        link.abort()


async def test_what_uses_a_connection_up_leaves_none() -> None:
    line = Line()
    async with running_agent() as agent:
        link = linked(agent, line)
        stream = await link.start(agent_spec("sleep 60"))
        await stream.aclose()
        with pytest.raises(Exception, match="no-such-user"):
            await link.start(agent_spec("true", user="no-such-user"))
        await link.stat("/")
        assert await run(agent, link, "echo again") == b"again\n"
        assert line.opened[-1].fileno() >= 0
        assert all(sock.fileno() < 0 for sock in line.opened[:-1])
        link.abort()
        assert line.opened[-1].fileno() < 0


async def test_many_at_once_keep_a_few() -> None:
    line = Line()
    async with running_agent() as agent:
        link = linked(agent, line)
        streams = [await link.start(agent_spec("sleep 0.3; echo out")) for _ in range(IDLE_MAX + 3)]
        for stream in streams:
            assert (await collect(stream)).stdout == b"out\n"
        assert sum(sock.fileno() >= 0 for sock in line.opened) == IDLE_MAX
        link.abort()


async def test_one_that_the_agent_has_closed_is_not_used() -> None:
    line = Line()
    async with running_agent() as agent:
        link = linked(agent, line)
        assert await run(agent, link, "echo 1") == b"1\n"
        # Another link's identity: the agent closes all connections but its own.
        await agent.new_link().identify(identity(generation=2))
        renewed = GuestLink("sb0", line.open, address=("127.0.0.1", agent.port), token=TOKEN, generation=2)
        renewed._idle, link._idle = link._idle, []  # it is closed, and kept
        assert await run(agent, renewed, "echo 2") == b"2\n"
        assert len(line.opened) == 2
        renewed.abort()


async def test_none_is_kept_while_the_guest_is_saved() -> None:
    line = Line()
    async with running_agent() as agent:
        link = linked(agent, line)
        assert await run(agent, link, "echo 1") == b"1\n"
        await link.freeze(sync=False)
        assert all(sock.fileno() < 0 for sock in line.opened)
        await link.thaw()
        link.abort()


async def test_output_between_start_and_end_is_whole_whatever_its_size() -> None:
    """Around the room that the compiled half has, and with children that hold the pipes."""
    async with running_agent() as agent:
        for size in (0, 1, 16_383, 16_384, 16_385, 70_000):
            result = await agent.run(f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2; sleep 0.2 & exit 3")
            assert (len(result.stdout), len(result.stderr)) == (size, size)
            assert result.status is not None
            assert result.status.exit_code == 3
        async with asyncio.timeout(30):  # until the children that held pipes are over
            while held(agent) != {"pipe": 0, "pidfd": 0}:
                await asyncio.sleep(0.05)


def held(agent: RunningAgent) -> dict[str, int]:
    """How many descriptors of a kind the agent has."""
    folder = f"/proc/{agent.process.pid}/fd"
    targets = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if int(name) > 2]
    return {kind: sum(kind in target for target in targets) for kind in ("pipe", "pidfd")}
