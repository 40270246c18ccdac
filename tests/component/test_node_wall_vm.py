"""A real VM before a real wall: what its programs see of names, addresses and ports, and what is written down."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from ipaddress import ip_address, ip_network

import pytest

from skerry.core import ids
from skerry.core.errors import InvalidRequest
from skerry.core.models import EgressLayer, Exited, NetworkEvent, Output, ProcessSpec, SandboxSpec
from skerry.core.netaddr import Address
from skerry.egress.upstream import Upstream
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from support.node import Left, cache_dir, vm_engine

pytestmark = pytest.mark.vm


async def run(guest: Guest, command: str) -> str:
    """Standard output and error, and the exit code on a line of its own."""
    stream = await guest.start(ProcessSpec(ids.new_id(ids.PROCESS), shell=command, timeout_ms=60_000))
    out = b""
    async for event in stream:
        if isinstance(event, Output):
            out += event.data
        elif isinstance(event, Exited):
            out += f"exit {event.status.exit_code}\n".encode()
    return out.decode()


class World:
    """An engine, a sandbox whose names lead to this machine's loopback, and a web server there."""

    def __init__(self, engine: Engine, port: int, heard: list[bytes]) -> None:
        self.engine = engine
        self.port = port
        self.heard = heard
        self.events: list[NetworkEvent] = []

    def layer(self, *allow: str, mode: str = "deny") -> EgressLayer:
        return EgressLayer("project", mode, tuple(rule.replace("PORT", str(self.port)) for rule in allow))

    async def guest(self, *layers: EgressLayer, name: str = "sb1") -> Guest:
        await self.engine.create(name, SandboxSpec(memory_mb=256, egress=layers))
        return self.engine.guest(name)

    async def saw(self, **what: object) -> NetworkEvent:
        """The event with these attributes, once it has come."""
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if all(getattr(event, name) == value for name, value in what.items()):
                        return event
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> NodeConfig:
    data = tmp_path_factory.mktemp("wall")
    return NodeConfig(data, cache_dir(), slots=1, pool_floor=0, pool_ceiling=0)


@pytest.fixture
async def world(config: NodeConfig) -> AsyncIterator[World]:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n")
        await writer.drain()
        writer.close()

    async def resolve(name: str) -> Sequence[Address]:
        assert not name.startswith("10."), name
        return [ip_address("127.0.0.1")]

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await asyncio.start_server(answer, "127.0.0.1", 0))
        upstream = Upstream(allow=[ip_network("127.0.0.0/8")], resolve=resolve)
        engine = await stack.enter_async_context(vm_engine(config, upstream=upstream))
        world = World(engine, server.sockets[0].getsockname()[1], heard)

        async def follow(events: AsyncIterator[NetworkEvent]) -> None:
            async for event in events:
                world.events.append(event)

        events = await stack.enter_async_context(engine.network_events())
        following = asyncio.create_task(follow(events))
        yield world
        following.cancel()
        for sandbox in [*engine.sandboxes(), *engine.paused()]:
            await engine.kill(sandbox.id)
        for snapshot in engine.snapshots():
            await engine.delete_snapshot(snapshot)
    left = Left.of(config)
    assert left.nothing, left


FETCH = "curl -sS -m 10 http://%s/"


async def test_what_is_allowed_passes_and_what_is_not_fails_at_once_with_a_reason(world: World) -> None:
    guest = await world.guest(world.layer("a.test:80 -> 127.0.0.1:PORT", "*.w.test:PORT"))
    assert await run(guest, FETCH % "a.test") == "hello\nexit 0\n"
    assert await run(guest, FETCH % f"x.w.test:{world.port}") == "hello\nexit 0\n"
    assert "Could not resolve host: evil.test" in await run(guest, FETCH % "evil.test")
    assert "403" in await run(guest, "curl -sS -m 10 -i -H 'Host: evil.test' http://a.test/")
    assert "exit 0" not in await run(guest, "curl -sS --resolve a.test:80:198.18.99.99 http://a.test/")
    assert len(world.heard) == 2
    passed = await world.saw(kind="connection", allowed=True, name="a.test")
    assert (passed.port, passed.sent_bytes > 0, passed.received_bytes > 0) == (80, True, True)
    assert (await world.saw(kind="look_up", name="evil.test")).rule == "project: no rule allows it"
    assert "evil.test" in (await world.saw(kind="connection", allowed=False, name="a.test")).rule


async def test_bare_addresses_are_refused_by_the_kernel_and_written_down(world: World) -> None:
    guest = await world.guest(world.layer("a.test"))
    for where in ("1.1.1.1:443", "169.254.169.254:80", "169.254.0.1:15001", "169.254.0.1:22", "10.0.0.1:5432"):
        address, _, port = where.partition(":")
        said = await run(guest, f"python3 -c \"import socket; socket.create_connection(('{address}', {port}), 20)\"")
        assert "Connection refused" in said, (where, said)
        event = await world.saw(kind="packet", address=address, port=int(port))
        assert (event.protocol, event.allowed) == ("tcp", False)
    udp = "s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(20); "
    udp += "s.connect(('1.1.1.1', 443)); s.send(b'x'); s.recv(1)"
    assert "Errno" in await run(guest, f'python3 -c "import socket; {udp}"')
    await world.saw(kind="packet", address="1.1.1.1", protocol="udp")
    assert not world.heard


async def test_every_resolver_is_ours(world: World) -> None:
    guest = await world.guest(world.layer("a.test"))
    ask = (
        "python3 - <<'E'\nimport socket, struct\n"
        "q = b'\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0'\n"
        "q += b''.join(bytes([len(l)]) + l.encode() for l in NAME.split('.')) + b'\\0\\0\\1\\0\\1'\n"
        "for to in ('169.254.0.1', '8.8.8.8'):\n"
        "  s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(10); s.connect((to, 53)); s.send(q)\n"
        "  r = s.recv(512); print(r[3] & 15, socket.inet_ntoa(r[-4:]) if r[7] else '')\n"
        "  t = socket.create_connection((to, 53), 10); t.sendall(struct.pack('!H', len(q)) + q)\n"
        "  r = t.recv(512)[2:]; print(r[3] & 15, socket.inet_ntoa(r[-4:]) if r[7] else '')\nE\n"
    )
    assert await run(guest, ask.replace("NAME", "'a.test'")) == "0 198.18.1.0\n" * 4 + "exit 0\n"
    assert await run(guest, ask.replace("NAME", "'secret.evil.test'")) == "3 \n" * 4 + "exit 0\n"


async def test_without_a_policy_nothing_passes(world: World) -> None:
    guest = await world.guest()
    assert "Could not resolve host" in await run(guest, FETCH % "a.test")
    assert not world.heard


async def test_a_listed_address_is_the_relays_to_judge(world: World) -> None:
    guest = await world.guest(world.layer("127.0.0.0/8", "10.1.2.0/24"))
    said = await run(guest, "python3 -c \"import socket; socket.create_connection(('10.1.3.1', 80), 20)\"")
    assert "Connection refused" in said
    await run(guest, "curl -sS -m 2 http://10.1.2.3/")  # to the relay, which goes to no private one by itself
    event = await world.saw(kind="connection", address="10.1.2.3")
    assert not event.allowed
    assert "its operator has not opened it" in event.rule


async def test_a_change_counts_at_once(world: World) -> None:
    guest = await world.guest(world.layer("a.test:80 -> 127.0.0.1:PORT"))
    assert await run(guest, FETCH % "a.test") == "hello\nexit 0\n"
    await world.engine.set_egress("sb1", [world.layer("b.test:80 -> 127.0.0.1:PORT")])
    assert "Could not resolve host" in await run(guest, FETCH % "a.test")
    assert await run(guest, FETCH % "b.test") == "hello\nexit 0\n"
    with pytest.raises(InvalidRequest):
        await world.engine.set_egress("sb1", [world.layer("http://no")])
    assert await run(guest, FETCH % "b.test") == "hello\nexit 0\n"


async def test_addresses_mean_the_same_after_a_rest_and_in_copies(world: World) -> None:
    layer = world.layer("a.test:80 -> 127.0.0.1:PORT", "b.test:80 -> 127.0.0.1:PORT", "c.test")
    guest = await world.guest(layer)
    look = "getent ahostsv4 %s | head -1 | cut -d' ' -f1"
    assert await run(guest, look % "b.test") == "198.18.1.0\nexit 0\n"
    assert await run(guest, look % "a.test") == "198.18.1.1\nexit 0\n"
    await world.engine.pause("sb1")
    await world.engine.resume("sb1")
    again = world.engine.guest("sb1")
    assert await run(again, "curl -sS -m 10 --resolve a.test:80:198.18.1.1 http://a.test/") == "hello\nexit 0\n"
    narrower = SandboxSpec(memory_mb=256, egress=(world.layer("a.test:80 -> 127.0.0.1:PORT"),))
    copies = await world.engine.fork("sb1", {"sb2": narrower})
    assert set(copies) == {"sb2"}
    copy = world.engine.guest("sb2")
    assert await run(copy, "curl -sS -m 10 --resolve a.test:80:198.18.1.1 http://a.test/") == "hello\nexit 0\n"
    assert "exit 0" not in await run(copy, "curl -sS -m 10 --resolve b.test:80:198.18.1.0 http://b.test/")


async def test_a_new_server_serves_what_the_old_one_did(config: NodeConfig, world: World) -> None:
    guest = await world.guest(world.layer("a.test:80 -> 127.0.0.1:PORT"))
    assert await run(guest, FETCH % "a.test") == "hello\nexit 0\n"
    await world.engine.stop()
    await world.engine.start()
    again = world.engine.guest("sb1")
    assert await run(again, "curl -sS -m 10 --resolve a.test:80:198.18.1.0 http://a.test/") == "hello\nexit 0\n"
