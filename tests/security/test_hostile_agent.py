"""A guest agent that was replaced by the guest's root says whatever it likes: fuzzed, over real connections.

Whatever it answers, each call of the host ends in time, with a result or a typed error, and leaves no connection open
and no memory behind.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.core.errors import SkerryError
from skerry.core.models import ProcessSpec
from skerry.guest import protocol
from skerry.node.guestlink import GuestLink
from support.guest_agent import TOKEN

INFO = {
    "process_id": "pr1", "pid": 5, "argv": ["x"], "cwd": "/", "user": "root", "tag": None, "pty": False,
    "stdin": False, "background": False, "state": "running", "started_at_ms": 1, "exit": None,
}  # fmt: skip
FILE = {
    "path": "/a", "name": "a", "kind": "file", "size": 9, "mode": 420, "uid": 0, "gid": 0, "owner": "", "group": "",
    "mtime_ns": 1, "target": None,
}  # fmt: skip
STATUS = {"reason": "exit", "exit_code": 0, "signal": None, "duration_ms": 1}
KNOWN = [INFO, FILE, STATUS, {"process": INFO}, {"info": FILE, "length": 9}, {"processes": [INFO]}, {"items": [FILE]}]
CALLS = ("ping", "processes", "start", "stat", "list", "read", "metrics", "watch", "connect")
ENDS_WITHIN_S = 60
GROWTH_BYTES = 48 << 20

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def bent(draw: st.DrawFn) -> object:
    """An answer that the host knows, with some of it replaced by nonsense."""
    answer = dict(draw(st.sampled_from(KNOWN)))
    for key in draw(st.lists(st.sampled_from(sorted(answer)), max_size=3)):
        answer[key] = draw(values)
    return answer


def _framed(kind: int, payload: bytes) -> bytes:
    return protocol.HEADER.pack(len(payload), kind) + payload


payloads = (bent() | values).map(lambda v: protocol.json.dumps(v).encode()) | st.binary(max_size=300)
offsets = st.integers(0, 2**64 - 1).map(protocol.OFFSET.pack)
frames = st.one_of(
    st.builds(_framed, st.integers(0, 255), payloads),
    st.builds(_framed, st.sampled_from(sorted(protocol.FROM_GUEST)), payloads),
    st.builds(lambda k, o, d: _framed(k, o + d), st.sampled_from([8, 9, 10]), offsets, st.binary(max_size=300)),
    st.builds(lambda size, kind: protocol.HEADER.pack(size, kind), st.integers(0, 2**32 - 1), st.integers(0, 255)),
    st.binary(max_size=60),
)


@asynccontextmanager
async def link_to(answer: bytes) -> AsyncIterator[GuestLink]:
    """A link to an agent that says this to everybody and hangs up."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        link = GuestLink("sb0", socket.socket, address=("127.0.0.1", port), token=TOKEN, generation=1)
        try:
            yield link
        finally:
            link.abort()


async def call(link: GuestLink, name: str) -> None:
    """One operation, and everything of what it gives."""
    match name:
        case "ping":
            await link.ping(timeout=5)
        case "processes":
            await link.processes()
        case "metrics":
            await link.metrics()
        case "stat":
            await link.stat("/a")
        case "start":
            await drain(await link.start(ProcessSpec("pr1", argv=("x",))))
        case "list":
            await drain(link.list_dir("/a"))
        case "read":
            await drain(await link.read_file("/a"))
        case "watch":
            await drain(await link.watch("/a"))
        case "connect":
            connection = await link.connect(80)
            try:
                while await connection.read():
                    pass
            finally:
                await connection.aclose()


async def drain(stream: object) -> None:
    try:
        async for _ in stream:  # type: ignore[attr-defined]
            pass
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(frames, max_size=6).map(b"".join))
def test_whatever_it_says_a_call_ends_with_a_result_or_a_typed_error(name: str, said: bytes) -> None:
    async def body() -> None:
        async with link_to(said) as link, asyncio.timeout(ENDS_WITHIN_S):
            with contextlib.suppress(SkerryError):
                await call(link, name)
            assert link.open_connections == 0

    asyncio.run(body())


async def test_a_flood_of_frames_is_not_kept() -> None:
    """A million small frames, then the largest that there may be, to a host that reads on."""
    part = protocol.OFFSET.pack(0) + b"x" * 100
    flood = protocol.frame(protocol.OK, protocol.dump({"process": INFO}))
    flood += protocol.frame(protocol.STDOUT, part) * 200_000
    flood += protocol.HEADER.pack(2**32 - 1, protocol.STDOUT) + b"x" * 1_000_000
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(3):
        async with link_to(flood) as link, asyncio.timeout(ENDS_WITHIN_S):
            with pytest.raises(SkerryError):
                await call(link, "start")
            assert link.open_connections == 0
    assert process.memory_info().rss - before < GROWTH_BYTES
