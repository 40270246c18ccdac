"""Connections to guest ports through a real agent."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from skerry.core.errors import Conflict, Gone, OutcomeUnknown, Unavailable
from support.guest_agent import RunningAgent, running_agent


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_bytes_both_ways_with_half_close(agent: RunningAgent, host: str) -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"END")  # after the client's end of file
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(upper, host, 0) as server:
        connection = await agent.link.connect(server.sockets[0].getsockname()[1])
        payload = b"abc" * 2_000_000

        async def send() -> None:
            for at in range(0, len(payload), 300_000):
                await connection.write(payload[at : at + 300_000])
            await connection.write_eof()

        got = bytearray()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(send())
            while data := await connection.read():
                got += data
        assert bytes(got) == payload.upper() + b"END"
        await connection.aclose()


async def test_a_server_that_speaks_first_loses_nothing(agent: RunningAgent) -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        for _ in range(50):
            connection = await agent.link.connect(server.sockets[0].getsockname()[1])
            got = b""
            while data := await connection.read(3):
                got += data
            assert got == b"hello"
            await connection.aclose()


async def test_a_reset_is_not_an_end(agent: RunningAgent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = await agent.link.connect(server.getsockname()[1])
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        accepted.close()
        with pytest.raises(OutcomeUnknown):
            async with asyncio.timeout(60):
                while await connection.read():
                    pass
                raise AssertionError("a reset looked like an end")


async def test_a_line_that_is_ended_by_the_host_is_not_an_end(agent: RunningAgent) -> None:
    """As when its sandbox is killed: what was sent until then may be half."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = await agent.link.connect(server.getsockname()[1])
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"half")
            assert await connection.read() == b"half"
            reading = asyncio.create_task(connection.read())
            await asyncio.sleep(0.1)
            agent.link.abort(Gone("killed", code="sandbox_killed"))
            for attempt in (reading, connection.read()):
                with pytest.raises(Gone):
                    async with asyncio.timeout(60):
                        await attempt


@pytest.mark.slow
async def test_a_server_whose_queue_is_full_is_waited_for(agent: RunningAgent) -> None:
    """It is busy, not closed: many come at once, and its queue is short."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # the queue has room for this one only
            connecting = asyncio.create_task(agent.link.connect(port))
            await asyncio.sleep(6)
            assert not connecting.done()
            server.accept()[0].close()
            connection = await connecting
            await connection.aclose()
            # That one is in the queue now, and nobody takes it out.
            with pytest.raises(Unavailable) as caught:
                await agent.link.connect(port)
            assert caught.value.code == "guest_busy"


async def test_closed_ports_and_the_agents_own_are_refused(agent: RunningAgent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for closed in (port, 1024):
        with pytest.raises(Conflict) as e:
            await agent.link.connect(closed)
        assert e.value.code == "port_not_open"
