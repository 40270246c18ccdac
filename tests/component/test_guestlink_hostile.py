"""Either side hostile to the other: no crash, no hang, no growth, and a typed error."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from skerry.core.errors import Conflict, Gone, GuestUnreachable, InvalidRequest, OutcomeUnknown, SkerryError
from skerry.core.models import ProcessSpec
from skerry.guest import protocol
from skerry.node.guestlink import GuestLink
from support.guest_agent import TOKEN, RunningAgent, collect, identity, running_agent
from support.waiting import stands_still

INFO = {
    "process_id": "pr1", "pid": 5, "argv": ["x"], "cwd": "/", "user": "root", "tag": None, "pty": False,
    "stdin": False, "background": False, "state": "running", "started_at_ms": 1, "exit": None,
}  # fmt: skip
STARTED = protocol.frame(protocol.OK, protocol.dump({"process": INFO}))
EXIT = protocol.frame(
    protocol.EXIT, protocol.dump({"reason": "exit", "exit_code": 0, "signal": None, "duration_ms": 1})
)


def out(offset: int, data: bytes) -> bytes:
    return protocol.frame(protocol.STDOUT, protocol.OFFSET.pack(offset) + data)


@asynccontextmanager
async def guest_that(
    act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[GuestLink]:
    """A link to a guest that does just this on each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await act(reader, writer)
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield GuestLink("sb0", socket.socket, address=("127.0.0.1", port), token=TOKEN, generation=1)


async def request_read(reader: asyncio.StreamReader) -> None:
    for _ in range(2):
        length, _kind = protocol.HEADER.unpack(await reader.readexactly(protocol.HEADER.size))
        await reader.readexactly(length)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 10_000,
        b"HTTP/1.1 200 OK\r\n\r\n",
        protocol.HEADER.pack(100, protocol.OK) + b"{}",
        protocol.frame(protocol.OK, b"[" * 100_000),
        protocol.frame(protocol.OK, b"[]"),
        protocol.frame(protocol.OK, b"{}"),
        protocol.frame(protocol.EXIT, b"{}"),
        protocol.frame(protocol.ERROR, b"{}"),
        protocol.frame(protocol.ERROR, protocol.dump({"error": "Gone", "code": "x", "message": "", "context": {}})),
        STARTED + out(0, b""),
        STARTED + out(0, b"a") + out(5, b"b"),
        STARTED + out(2**64 - 1, b"a"),
        STARTED + out(0, b"a") + protocol.frame(protocol.EXIT, b"{}"),
        STARTED + protocol.frame(protocol.GAP, protocol.dump({"stream": "stdout", "offset": 0, "missed": -1})),
        STARTED + protocol.frame(protocol.DATA, b"x"),
        STARTED + out(0, b"a"),
    ],
)
async def test_a_guest_that_speaks_nonsense_gives_an_unknown_outcome_and_never_an_exit(answer: bytes) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_read(reader)
        writer.write(answer)

    async with guest_that(act) as link, asyncio.timeout(60):
        with pytest.raises(OutcomeUnknown):
            await collect(await link.start(ProcessSpec("pr1", argv=("x",))))
        assert link.open_connections == 0


async def test_a_cut_line_is_not_an_exit() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_read(reader)
        writer.write(STARTED + out(0, b"part"))
        await writer.drain()
        writer.transport.abort()

    async with guest_that(act) as link, asyncio.timeout(60):
        stream = await link.start(ProcessSpec("pr1", argv=("x",)))
        with pytest.raises(OutcomeUnknown) as e:
            await collect(stream)
        assert e.value.retry == "unknown"


async def test_what_was_never_dispatched_is_safe_to_retry() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = GuestLink("sb0", socket.socket, address=("127.0.0.1", port))

    def no_socket() -> socket.socket:
        raise FileNotFoundError(2, "the namespace is gone")

    for broken in (link, GuestLink("sb0", no_socket)):
        with pytest.raises(GuestUnreachable) as e:
            await broken.start(ProcessSpec("pr1", argv=("x",)))
        assert e.value.retry == "safe"
        with pytest.raises(GuestUnreachable):
            await broken.ping(timeout=1)


async def test_a_guest_that_says_nothing_is_given_up() -> None:
    async def act(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with guest_that(act) as link:
        with pytest.raises(GuestUnreachable):
            await link.ping(timeout=0.2)
        assert link.open_connections == 0


async def test_a_flood_of_items_is_read_as_it_is_asked_for() -> None:
    """The guest sends entries without end; who reads a few holds a few."""
    entry = {
        "path": "/a", "name": "a", "kind": "file", "size": 1, "mode": 1, "uid": 0, "gid": 0, "owner": "", "group": "",
        "mtime_ns": 0, "target": None, "error": None,
    }  # fmt: skip
    sent = 0

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_read(reader)
        writer.write(protocol.frame(protocol.OK, b"{}"))
        items = protocol.frame(protocol.ITEMS, protocol.dump([entry] * 1000))
        while True:
            writer.write(items)
            await writer.drain()
            sent += len(items)

    async with guest_that(act) as link:
        listing = link.list_dir("/")
        for _ in range(5):
            await listing.__anext__()
        await stands_still(lambda: sent, 0.3)
        await listing.aclose()  # type: ignore[attr-defined]
        assert link.open_connections == 0


async def test_a_download_longer_or_shorter_than_announced_is_refused() -> None:
    info = {
        "path": "/a", "name": "a", "kind": "file", "size": 4, "mode": 1, "uid": 0, "gid": 0, "owner": "", "group": "",
        "mtime_ns": 0, "target": None, "error": None,
    }  # fmt: skip
    for body in (
        protocol.frame(protocol.DATA, b"12345"),
        protocol.frame(protocol.DATA, b"123") + protocol.frame(protocol.END, b"{}"),
        protocol.frame(protocol.DATA, b""),
        protocol.frame(protocol.DATA, b"1234"),
    ):

        async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = body) -> None:
            await request_read(reader)
            writer.write(protocol.frame(protocol.OK, protocol.dump({"info": info, "length": 4})) + body)

        async with guest_that(act) as link, asyncio.timeout(60):
            with pytest.raises(OutcomeUnknown) as e:
                async for _ in await link.read_file("/a"):
                    pass
            assert e.value.retry == "safe"


async def test_a_refusal_in_the_middle_of_an_upload_is_heard() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_read(reader)
        refusal = {"error": "Conflict", "code": "is_a_directory", "message": "m", "context": {}}
        writer.write(protocol.frame(protocol.ERROR, protocol.dump(refusal)))
        await writer.drain()
        await asyncio.sleep(0.2)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    async with guest_that(act) as link, asyncio.timeout(60):
        with pytest.raises(Conflict):
            await link.write_file("/a", endless())
        assert link.open_connections == 0


# ------------------------------------------------------------------------------------------------------- hostile hosts


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


def exchange(port: int, data: bytes, *, half_close: bool = True) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=15) as s:
        s.sendall(data)
        if half_close:
            s.shutdown(socket.SHUT_WR)
        got = b""
        try:
            while part := s.recv(65536):
                got += part
        except ConnectionError:
            pass
        return got


def hello(**changes: object) -> dict[str, object]:
    return {"v": 1, "op": "stat", "token": TOKEN, "generation": 1, **changes}


async def test_an_agent_survives_whatever_it_is_sent(agent: RunningAgent) -> None:
    good = protocol.frame(protocol.HELLO, protocol.dump(hello()))
    cases = [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(5000),
        struct.pack(">IB", 2**32 - 1, protocol.HELLO),
        protocol.frame(protocol.HELLO, b"[]"),
        protocol.frame(protocol.HELLO, b"{" * 4000),
        protocol.frame(protocol.HELLO, b" " * 5000),
        protocol.frame(protocol.REQUEST, b"{}"),
        good,
        good + protocol.frame(protocol.REQUEST, b"[]"),
        good + protocol.frame(protocol.DATA, b"{}"),
        good + protocol.frame(protocol.REQUEST, b"{}"),
        good + protocol.frame(protocol.PART, b"x" * protocol.MAX_PAYLOAD) * 81,
        protocol.request_frames(hello(op=["x"]), {}),
        protocol.request_frames(hello(op="write_file"), {"path": "/tmp/skerry-never"}) + b"\xff" * 600_000,
        protocol.request_frames(hello(op="write_file"), {"path": "/tmp/skerry-never"}) + b"\0\0\0\5\6abc",
        protocol.request_frames(hello(op="start"), {"process_id": "p", "argv": []}),
        protocol.request_frames(hello(op="start"), {"process_id": "p", "argv": ["true"], "timeout_ms": True}),
        protocol.request_frames(hello(op="stat"), {"path": "\ud800"}),
    ]
    before = agent.rss_kb()
    for data in cases:
        answer = await asyncio.to_thread(exchange, agent.port, data)
        assert b'"guest_error"' not in answer, data[:100]
    assert agent.rss_kb() - before < 64_000
    assert not os.path.exists("/tmp/skerry-never")
    assert (await agent.run("echo alive")).stdout == b"alive\n"
    assert await agent.link.processes()
    assert not [name for name in os.listdir("/tmp") if name.startswith(".skerry-")]


async def test_only_the_token_and_generation_of_now_are_served(agent: RunningAgent) -> None:
    for changes in ({"token": "another token of that length"}, {"token": None}, {"generation": 0}, {"generation": 2}):
        with pytest.raises(GuestUnreachable) as e:
            await agent.new_link(**changes).processes()
        assert e.value.context["guest_code"] in {"wrong_token", "stale_generation"}
    with pytest.raises(GuestUnreachable):
        await agent.new_link(token="wrong " * 5).identify(identity(generation=2, token="taken over by a stranger"))
    with pytest.raises(GuestUnreachable):
        await agent.link.identify(identity(generation=1))
    assert (await agent.run("echo alive")).stdout == b"alive\n"


async def test_a_new_identity_ends_what_spoke_with_the_old_one(agent: RunningAgent) -> None:
    stream = await agent.start("echo one; sleep 600.75", background=True)
    await stream.__anext__()
    old = agent.new_link()
    await agent.link.identify(identity(generation=2, token="the token of the second life", env={"A": "2"}))
    with pytest.raises(OutcomeUnknown):
        await collect(stream)
    with pytest.raises(GuestUnreachable):
        await old.processes()
    assert (await agent.run("echo $A")).stdout == b"2\n"
    assert await agent.link.kill_process(stream.process.process_id)


async def test_other_addresses_are_not_served() -> None:
    async with running_agent() as agent:
        with socket.socket() as s:
            s.settimeout(10)
            s.bind(("127.0.0.2", 0))
            s.connect(("127.0.0.1", agent.port))
            s.sendall(protocol.request_frames(hello(op="ping"), {}))
            with suppress(ConnectionResetError):
                assert s.recv(100) == b""


async def test_a_killed_sandbox_is_gone_for_those_who_wait_and_those_who_come(agent: RunningAgent) -> None:
    stream = await agent.start("sleep 600.5")
    waiting = asyncio.create_task(collect(stream))

    async def idle() -> AsyncIterator[bytes]:
        await asyncio.sleep(600)
        yield b""

    upload = asyncio.create_task(agent.link.write_file("/tmp/skerry-never", idle()))
    await asyncio.sleep(0.2)
    assert agent.link.open_connections == 2
    error = Gone("killed", code="sandbox_killed")
    agent.link.gone = lambda: error
    agent.link.abort(error)
    for task in (waiting, upload):
        with pytest.raises(Gone):
            async with asyncio.timeout(60):
                await task
    with pytest.raises(Gone):
        await agent.link.stat("/")
    assert agent.link.open_connections == 0


async def test_closing_a_stream_that_somebody_waits_for_wakes_them(agent: RunningAgent) -> None:
    stream = await agent.start("sleep 600.5", background=True)
    waiting = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.1)
    await stream.aclose()
    with pytest.raises(SkerryError):
        async with asyncio.timeout(60):
            await waiting
    assert await agent.link.kill_process(stream.process.process_id)


async def test_unserialisable_texts_are_refused(agent: RunningAgent) -> None:
    with pytest.raises(InvalidRequest):
        await agent.run(argv=("echo", "\ud800"))
    with pytest.raises(InvalidRequest) as e:
        await agent.run(argv=("echo", "x" * 30_000_000))
    assert e.value.code == "command_too_long"


async def test_a_fresh_life_knows_nothing_of_what_ran_before_and_forgets_as_ever(agent: RunningAgent) -> None:
    for n in range(5):
        await agent.run(f"echo {n}")
    kept = await agent.start("sleep 600.76", background=True)
    await agent.link.identify(identity(generation=2, token="the token of the second life", fresh=True))
    assert [p.process_id for p in await agent.link.processes()] == [kept.process.process_id]
    for n in range(80):  # more than are remembered
        assert (await agent.run(f"echo {n}")).stdout == f"{n}\n".encode()
    assert len(await agent.link.processes()) <= 66
    await agent.link.kill_process(kept.process.process_id)
