"""The relay with real sockets on both sides: what passes, what does not, and what a client is told."""

import asyncio
import contextlib
import datetime
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from skerry.core.netaddr import Address
from skerry.core.policy import Layer, Mode, Policy, parse_rules
from skerry.egress.names import NameTable
from skerry.egress.relay import Connection, Limits, Relay
from skerry.egress.upstream import Proxy, Upstream

LOOPBACK = ip_network("127.0.0.0/8")
GET = b"GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = directory / f"{name}.crt", directory / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return paths


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of one connection, non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class World:
    """A relay, real servers behind it, and clients before it."""

    policy: Policy = field(default_factory=lambda: Policy(()))
    table: NameTable = field(default_factory=NameTable)
    records: list[Connection] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    addresses: dict[str, list[Address]] = field(default_factory=dict)
    servers: list[asyncio.Server] = field(default_factory=list)
    heard: bytearray = field(default_factory=bytearray)
    """What reached any server."""
    relay: Relay | None = None

    def start(
        self,
        *,
        allow: Sequence[object] = (LOOPBACK,),
        private: Sequence[str] = (),
        proxy: Proxy | None = None,
        **limits: float,
    ) -> None:
        async def resolve(name: str) -> Sequence[Address]:
            self.resolved.append(name)
            return self.addresses.get(name, [ip_address("127.0.0.1")])

        opened = parse_rules("private", private)
        upstream = Upstream(allow=allow, private=opened, proxy=proxy, resolve=resolve)  # type: ignore[arg-type]
        self.relay = Relay(lambda: self.policy, self.table, upstream, self.records.append, Limits(**limits))  # type: ignore[arg-type]

    def allow(self, *rules: str, mode: Mode = Mode.DENY, deny: Sequence[str] = ()) -> None:
        rule_set = parse_rules("allow", rules, tunnels=True)
        self.policy = Policy((Layer("project", mode, rule_set, parse_rules("deny", deny)),))

    async def serve(self, handler: Handler | None = None, tls: ssl.SSLContext | None = None) -> int:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                self.heard += data
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" if tls is None else data)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(handler or echo, "127.0.0.1", 0, ssl=tls)
        self.servers.append(server)
        return server.sockets[0].getsockname()[1]

    def connect(self, to: str, port: int) -> socket.socket:
        """A client's end of a connection that the relay was given; `to` is a name that was looked up, or an address."""
        near, far = tcp_pair()
        assert self.relay is not None
        try:
            wanted = IPv4Address(to)
        except ValueError:
            found = self.table.address(to)
            assert found is not None
            wanted = found
        self.relay.take(far, wanted, port)
        return near

    async def say(self, to: str, port: int, *words: bytes) -> bytes:
        """Everything that comes back; b"" also where the connection breaks."""
        loop = asyncio.get_running_loop()
        with self.connect(to, port) as sock:
            got = b""
            try:
                for word in words:
                    await loop.sock_sendall(sock, word)
                    await asyncio.sleep(0)
                sock.shutdown(socket.SHUT_WR)
                while data := await loop.sock_recv(sock, 65536):
                    got += data
            except OSError:
                pass
        await self.settled()
        return got

    async def settled(self) -> None:
        assert self.relay is not None
        while self.relay.connections:
            await asyncio.sleep(0.01)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    if world.relay is not None:
        await world.relay.aclose()
        assert world.relay.connections == 0
    for server in world.servers:
        server.close()


def get(host: str) -> bytes:
    return GET.replace(b"{}", host.encode())


async def test_http_to_an_allowed_name_passes(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:80 -> 127.0.0.1:{port}")
    world.start()
    assert (await world.say("a.test", 80, get("A.test."))).endswith(b"ok")
    (record,) = world.records
    assert (record.name, record.port, record.verdict.allowed, record.error) == ("a.test", 80, True, None)
    assert record.sent == len(get("A.test."))
    assert record.received > 0


@pytest.mark.parametrize(
    "words",
    [
        (get("evil.test"),),
        (get("a.test").replace(b"close", b"keep-alive") + get("evil.test"),),
        (b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",),
        (b"GET / HTTP/1.0\r\n\r\n",),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
        tuple(bytes([byte]) for byte in get("evil.test")),
    ],
)
async def test_http_that_names_another_host_does_not(world: World, words: tuple[bytes, ...]) -> None:
    port = await world.serve()
    world.allow(f"a.test:80 -> 127.0.0.1:{port}")
    world.start()
    answer = await world.say("a.test", 80, *words)
    assert b"evil" not in world.heard
    assert b"403" in answer.split(b"\r\n")[0] or not answer
    assert not world.records[0].verdict.allowed


async def test_a_second_request_for_another_host_is_cut_off(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:80 -> 127.0.0.1:{port}")
    world.start()
    loop = asyncio.get_running_loop()
    with world.connect("a.test", 80) as sock:
        await loop.sock_sendall(sock, get("a.test").replace(b"close", b"keep-alive"))
        assert (await loop.sock_recv(sock, 65536)).endswith(b"ok")
        await loop.sock_sendall(sock, get("evil.test"))
        with pytest.raises(ConnectionError):
            assert await loop.sock_recv(sock, 65536) != b""
    await world.settled()
    assert b"evil" not in world.heard
    assert "evil.test" in world.records[0].verdict.rule


async def tls_exchange(world: World, to: str, sni: str | None, trusted: Path, port: int = 443) -> bytes:
    context = ssl.create_default_context(cafile=str(trusted))
    context.check_hostname = False
    reader, writer = await asyncio.open_connection(
        sock=world.connect(to, port), ssl=context, server_hostname=sni or "", ssl_handshake_timeout=10
    )
    writer.write(b"hello")
    await writer.drain()
    got = await reader.read(100)
    writer.close()
    return got


async def test_tls_goes_by_the_name_that_was_looked_up(world: World, tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "a.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    port = await world.serve(tls=context)
    world.allow(f"a.test:443 -> 127.0.0.1:{port}", f"a.test:8443 -> 127.0.0.1:{port}", "b.test")
    world.start()
    assert await tls_exchange(world, "a.test", "a.test", crt) == b"hello"
    assert await tls_exchange(world, "a.test", "a.test", crt, 8443) == b"hello"
    for name, where in (("b.test", 443), ("b.test", 8443), (None, 443)):
        with pytest.raises(ssl.SSLError, match=r"(?i)access[ _]denied"):
            await tls_exchange(world, "a.test", name, crt, where)
    await world.settled()
    assert sorted(record.verdict.allowed for record in world.records) == [False, False, False, True, True]
    assert world.heard == b"hellohello"


@pytest.mark.parametrize(("port", "words"), [(443, get("a.test")), (443, b"SSH-2.0-x\r\n"), (80, b"SSH-2.0-x\r\n")])
async def test_a_web_port_is_for_its_protocol(world: World, port: int, words: bytes) -> None:
    behind = await world.serve()
    world.allow(f"a.test:{port} -> 127.0.0.1:{behind}")
    world.start()
    await world.say("a.test", port, words)
    assert not world.heard
    assert not world.records[0].verdict.allowed


async def test_a_server_may_speak_first(world: World) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-test\r\n")
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    port = await world.serve(greet)
    world.allow(f"git.test:22 -> 127.0.0.1:{port}")
    world.start()
    loop = asyncio.get_running_loop()
    with world.connect("git.test", 22) as sock:
        assert await loop.sock_recv(sock, 100) == b"SSH-2.0-test\r\n"
        await loop.sock_sendall(sock, b"SSH-2.0-me\r\n")
        assert await loop.sock_recv(sock, 100) == b"SSH-2.0-me\r\n"


async def test_http_on_another_port_is_held_to_the_name_too(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:8080 -> 127.0.0.1:{port}")
    world.start()
    assert (await world.say("a.test", 8080, get("a.test:8080"))).endswith(b"ok")
    await world.say("a.test", 8080, get("evil.test"))
    await world.say("a.test", 8080, get("a.test:9090"))
    assert [record.verdict.allowed for record in world.records] == [True, False, False]


async def test_what_was_not_looked_up_goes_nowhere(world: World) -> None:
    world.allow("*.test", "9.9.9.9:53")
    world.start()
    assert await world.say("198.18.7.7", 443, b"x") == b""
    assert await world.say("127.0.0.1", 443, b"x") == b""
    assert await world.say("a.test", 22, b"x") == b""
    assert not any(record.verdict.allowed for record in world.records)
    assert not world.resolved


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "64:ff9b::a9fe:a9fe"])
async def test_a_name_that_leads_to_a_private_address_is_refused(world: World, address: str) -> None:
    world.addresses["a.test"] = [ip_address(address)]
    world.allow("a.test")
    world.start(allow=())
    answer = await world.say("a.test", 80, get("a.test"))
    assert answer.startswith(b"HTTP/1.1 403")
    assert address.encode() in answer
    assert not world.records[0].verdict.allowed


async def test_open_is_for_public_addresses(world: World) -> None:
    port = await world.serve()
    world.allow(mode=Mode.OPEN)
    world.start(allow=())
    await world.say("127.0.0.1", port, b"x")
    assert not world.heard
    assert not world.records[0].verdict.allowed


async def test_what_a_rule_names_itself_may_be_private_where_the_operator_has_opened_it(world: World) -> None:
    port = await world.serve()
    world.allow(f"127.0.0.0/8:{port}", f"db.test:80 -> localhost:{port}")
    world.start(allow=(), private=(f"127.0.0.0/8:{port}", f"localhost:{port}"))
    assert (await world.say("127.0.0.1", port, b"x")).endswith(b"ok")
    assert (await world.say("db.test", 80, get("db.test"))).endswith(b"ok")


@pytest.mark.parametrize("private", [(), ("127.0.0.1:1",), ("10.0.0.0/8",), ("other.test:*",)])
async def test_what_the_operator_has_not_opened_is_refused_although_a_rule_names_it(
    world: World, private: tuple[str, ...]
) -> None:
    port = await world.serve()
    world.allow(f"127.0.0.0/8:{port}", f"db.test:80 -> 127.0.0.1:{port}")
    world.start(allow=(), private=private)
    assert await world.say("127.0.0.1", port, b"x") == b""
    assert (await world.say("db.test", 80, get("db.test"))).startswith(b"HTTP/1.1 403")
    assert "egress_private_allow" in world.records[-1].verdict.rule
    assert not world.heard


async def test_a_denied_network_is_denied_behind_a_name_too(world: World) -> None:
    world.allow(mode=Mode.OPEN, deny=["127.0.0.0/8"])
    world.start()
    assert (await world.say("a.test", 80, get("a.test"))).startswith(b"HTTP/1.1 403")
    assert world.records[0].verdict.rule == "project: deny 127.0.0.0/8"


async def test_a_host_that_cannot_be_reached_is_told_as_such(world: World) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        world.allow(f"a.test:80 -> 127.0.0.1:{closed.getsockname()[1]}")
        world.start()
        answer = await world.say("a.test", 80, get("a.test"))
    assert answer.startswith(b"HTTP/1.1 502")
    assert world.records[0].verdict.allowed
    assert "could not be reached" in (world.records[0].error or "")


async def upgrade_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Upgrade" in head and b"/no" not in head:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 101 Switching Protocols\r\n\r\n")
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
        writer.write(await reader.read(65536))
    await writer.drain()
    writer.close()


async def test_an_upgrade_is_a_plain_stream_once_it_was_agreed_to(world: World) -> None:
    port = await world.serve(upgrade_server)
    world.allow(f"ws.test:80 -> 127.0.0.1:{port}")
    world.start()
    upgrade = get("ws.test").replace(b"close", b"Upgrade\r\nUpgrade: websocket")
    loop = asyncio.get_running_loop()
    with world.connect("ws.test", 80) as sock:
        await loop.sock_sendall(sock, upgrade)
        got = b""
        while b"101 Switching Protocols\r\n\r\n" not in got:
            got += await loop.sock_recv(sock, 65536)
        for _ in range(3):
            await loop.sock_sendall(sock, get("evil.test"))
            assert await loop.sock_recv(sock, 65536) == get("evil.test")


async def test_an_upgrade_that_was_refused_opens_nothing(world: World) -> None:
    port = await world.serve(upgrade_server)
    world.allow(f"ws.test:80 -> 127.0.0.1:{port}")
    world.start()
    upgrade = get("ws.test").replace(b"close", b"Upgrade\r\nUpgrade: websocket").replace(b"/ ", b"/no ")
    loop = asyncio.get_running_loop()
    with world.connect("ws.test", 80) as sock:
        await loop.sock_sendall(sock, upgrade)
        assert b"no" in await loop.sock_recv(sock, 65536)
        await loop.sock_sendall(sock, get("evil.test"))
        with pytest.raises(ConnectionError):
            assert await loop.sock_recv(sock, 65536) != b""


async def test_a_half_closed_connection_goes_on_in_the_other_direction(world: World) -> None:
    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.read()
        await asyncio.sleep(0.1)
        writer.write(said * 3)
        await writer.drain()
        writer.close()

    port = await world.serve(later)
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start()
    assert await world.say("a.test", 7000, b"\0abc") == b"\0abc" * 3


async def test_a_new_policy_cuts_what_it_forbids(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}", f"b.test:7000 -> 127.0.0.1:{port}")
    world.start()
    loop = asyncio.get_running_loop()
    with world.connect("a.test", 7000) as cut, world.connect("b.test", 7000) as kept:
        for sock in (cut, kept):
            await loop.sock_sendall(sock, b"\0x")
            assert await loop.sock_recv(sock, 100)
        world.allow(f"b.test:7000 -> 127.0.0.1:{port}")
        assert world.relay is not None
        assert world.relay.judge_again() == 1
        with pytest.raises(ConnectionError):
            assert await loop.sock_recv(cut, 100) != b""
        await loop.sock_sendall(kept, b"\0x")
        assert await loop.sock_recv(kept, 100)
    await world.settled()
    assert world.records[0].verdict.rule == "project: no rule allows it"


async def test_connections_are_bounded(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start(connections=2)
    with world.connect("a.test", 7000), world.connect("a.test", 7000):
        third = world.connect("a.test", 7000)
        with third, pytest.raises(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(third, 1) != b""
        assert "more than 2" in world.records[0].verdict.rule


async def test_as_many_as_may_be_open_may_come_at_once(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start()
    with contextlib.ExitStack() as open_ones:
        for _ in range(400):
            open_ones.enter_context(world.connect("a.test", 7000))
        assert not [record for record in world.records if not record.verdict.allowed]
    await world.settled()


async def test_new_connections_are_bounded_in_their_rate(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start(connections_per_s=5)
    begun = time.monotonic()
    for _ in range(40):
        world.connect("a.test", 7000).close()
    at_most = 5 + 5 * (time.monotonic() - begun) + 1
    await world.settled()
    refused = [record for record in world.records if record.verdict.rule == "more than 5 connections in a second"]
    assert not any(record.verdict.allowed for record in refused)
    assert 40 - at_most <= len(refused) <= 35


async def test_a_sandboxes_connections_share_its_rate(world: World) -> None:
    size = 600_000

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"x" * size)
        await writer.drain()
        writer.close()

    port = await world.serve(pour)
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start(bytes_per_s=1_000_000)
    begun = time.monotonic()
    said = await asyncio.gather(*(world.say("a.test", 7000, b"\0") for _ in range(2)))
    assert [len(each) for each in said] == [size, size]
    assert time.monotonic() - begun > 0.9 * 2 * size / 1_000_000


async def test_a_silent_connection_ends(world: World) -> None:
    port = await world.serve()
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start(idle_s=0.2)
    loop = asyncio.get_running_loop()
    with world.connect("a.test", 7000) as sock:
        await loop.sock_sendall(sock, b"\0x")
        assert await loop.sock_recv(sock, 100) != b""
        with pytest.raises(ConnectionError):
            assert await loop.sock_recv(sock, 100) != b""
    await world.settled()
    assert "nothing was said" in (world.records[0].error or "")


async def test_a_proxy_is_asked_to_connect(world: World) -> None:
    behind = await world.serve()
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if b"no.test" in asked[-1]:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", behind)
        there_writer.write(await reader.read(65536))
        writer.write(await there_reader.read(65536))
        await writer.drain()
        for each in (writer, there_writer):
            each.close()

    port = await world.serve(proxy)
    world.allow("a.test", "no.test")
    world.start(allow=(), proxy=Proxy("127.0.0.1", port, "Basic eDp5"))
    assert (await world.say("a.test", 80, get("a.test"))).endswith(b"ok")
    assert asked[0].startswith(b"CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\nProxy-Authorization: Basic eDp5\r\n")
    assert b"407" in await world.say("no.test", 80, get("no.test"))


async def test_much_passes_unchanged_and_a_slow_reader_slows_the_writer(world: World) -> None:
    total = 50_000_000

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        for number in range(total // 1_000_000):
            writer.write(bytes([number]) * 1_000_000)
            await writer.drain()
        writer.close()

    port = await world.serve(pour)
    world.allow(f"a.test:7000 -> 127.0.0.1:{port}")
    world.start()
    loop = asyncio.get_running_loop()
    with world.connect("a.test", 7000) as sock:
        await loop.sock_sendall(sock, b"\0")
        await asyncio.sleep(0.3)
        (flow,) = world.relay._flows.values()  # type: ignore[union-attr]
        assert flow.traffic.received < 8_000_000  # nobody reads: what the buffers hold, and no more
        got = bytearray()
        while data := await loop.sock_recv(sock, 1 << 20):
            got += data
    assert len(got) == total
    assert all(got[number * 1_000_000] == number for number in range(total // 1_000_000))
