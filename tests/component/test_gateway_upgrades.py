"""Upgrades through the gateway: WebSockets of a real client and a real server, other protocols, bare TCP."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

from support.gateway import DOMAIN, Gateway, head_of, listening, running_gateway
from support.server import free_port


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def websocket(gateway: Gateway, box: str, port: int, path: str = "/", **options: Any) -> Any:
    """A client whose connection goes to the gateway and whose Host names the port."""
    return connect(
        f"ws://{port}-{box}.{DOMAIN}:{gateway.port}{path}", host="127.0.0.1", port=gateway.port, proxy=None,
        max_size=None, **options,
    )  # fmt: skip


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


async def test_messages_pings_subprotocols_and_large_ones(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    async with serve(echo, "127.0.0.1", 0, max_size=None, subprotocols=["b", "a"]) as server:  # type: ignore[list-item]
        port = server.sockets[0].getsockname()[1]
        async with websocket(gateway, box.id, port, "/x?y=1", subprotocols=["a"]) as client:
            assert isinstance(client, ClientConnection)
            assert client.subprotocol == "a"
            assert client.protocol.extensions, "permessage-deflate passes too"
            for message in ("text é", b"\0\1\2", "", b"x" * 20_000_000):
                await client.send(message)
                assert await client.recv() == message
            async with asyncio.timeout(30):
                await (await client.ping(b"are you there"))


async def test_a_server_that_speaks_first(gateway: Gateway) -> None:
    """Its first frame comes in one piece with the handshake."""
    box = await gateway.sandbox()

    async def greet(connection: ServerConnection) -> None:
        await connection.send("hello")

    async with serve(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for _ in range(20):
            async with websocket(gateway, box.id, port) as client:
                assert await client.recv() == "hello"


@pytest.mark.parametrize("who", ["server", "client"])
async def test_close_codes_pass_both_ways(gateway: Gateway, who: str) -> None:
    box = await gateway.sandbox()
    seen: list[tuple[int, str]] = []

    async def closing(connection: ServerConnection) -> None:
        if who == "server":
            await connection.close(4321, "enough")
            return
        try:
            await connection.recv()
        except ConnectionClosed as error:
            assert error.rcvd is not None
            seen.append((error.rcvd.code, error.rcvd.reason))

    async with (
        serve(closing, "127.0.0.1", 0) as server,
        websocket(gateway, box.id, server.sockets[0].getsockname()[1]) as client,
    ):
        if who == "server":
            with pytest.raises(ConnectionClosed):
                await client.recv()
            seen.append((client.close_code, client.close_reason))
        else:
            await client.close(4321, "enough")
    assert seen == [(4321, "enough")]


async def test_a_sandbox_that_is_killed_breaks_its_sockets(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    async with (
        serve(echo, "127.0.0.1", 0) as server,
        websocket(gateway, box.id, server.sockets[0].getsockname()[1]) as client,
    ):
        await client.send("a")
        await client.recv()
        await gateway.services.sandboxes.kill(gateway.me, box.id)
        gateway.node.link.abort()
        with pytest.raises(ConnectionClosedError) as caught:
            await client.recv()
        assert caught.value.rcvd is None  # no close frame: it broke


async def test_a_client_that_vanishes_closes_the_servers_socket(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    over = asyncio.Event()

    async def waiting(connection: ServerConnection) -> None:
        try:
            await connection.recv()
        except ConnectionClosed:
            over.set()

    async with serve(waiting, "127.0.0.1", 0) as server:
        async with websocket(gateway, box.id, server.sockets[0].getsockname()[1]) as client:
            client.transport.abort()
        async with asyncio.timeout(30):
            await over.wait()


async def test_what_refuses_a_handshake(gateway: Gateway) -> None:
    box = await gateway.sandbox(public_ports=False)
    token = gateway.services.tokens.traffic(box.id)

    def nothing_here(connection: ServerConnection, request: Any) -> Any:
        return connection.respond(404, "no socket here\n")

    async with serve(echo, "127.0.0.1", 0, process_request=nothing_here) as server:
        port = server.sockets[0].getsockname()[1]
        for port_, headers, status, said in (
            (port, {}, 403, b"is missing"),
            (port, {"e2b-traffic-access-token": token}, 404, b"no socket here"),
            (free_port(), {"e2b-traffic-access-token": token}, 502, b"port is not open"),
        ):
            with pytest.raises(InvalidStatus) as caught:
                async with websocket(gateway, box.id, port_, additional_headers=headers):
                    pass
            assert caught.value.response.status_code == status
            assert said in (caught.value.response.body or b"")


async def test_by_path_with_a_key(gateway: Gateway) -> None:
    box = await gateway.sandbox(public_ports=False)
    async with serve(echo, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{gateway.port}/v1/sandboxes/{box.id}/ports/{server.sockets[0].getsockname()[1]}/"
        headers = {"X-API-Key": gateway.key}
        async with connect(url, additional_headers=headers, proxy=None) as client:
            await client.send("a")
            assert await client.recv() == "a"
        with pytest.raises(InvalidStatus, match="401"):
            async with connect(url, proxy=None):
                pass


async def test_a_slow_reader_holds_the_server_back(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    sent = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal sent
        for _ in range(1000):
            await connection.send(bytes(100_000))
            sent += 100_000

    async with serve(flood, "127.0.0.1", 0, compression=None) as server:
        port = server.sockets[0].getsockname()[1]
        async with websocket(gateway, box.id, port, compression=None, max_queue=1) as client:
            before = -1
            while sent != before:
                before = sent
                await asyncio.sleep(1)
            assert sent < 60_000_000
            for _ in range(1000):
                assert len(await client.recv()) == 100_000


async def test_another_protocol_with_a_half_close(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = dict((await head_of(reader))[1])
        assert (headers[b"upgrade"], headers[b"connection"]) == (b"shout/1", b"Upgrade")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: shout/1\r\nConnection: Upgrade\r\nX-A: 1\r\n\r\nGO")
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.write(b"END")
        await writer.drain()

    async with listening(upper) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"GET / HTTP/1.1\r\nHost: {port}-{box.id}.{DOMAIN}\r\nConnection: keep-alive, Upgrade\r\n"
        writer.write(f"{head}Upgrade: shout/1\r\n\r\nearly".encode())
        got = await reader.readuntil(b"GO")
        assert got.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"x-a: 1\r\n" in got
        assert b"transfer-encoding" not in got
        assert await reader.readexactly(5) == b"EARLY"
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readexactly(18) == b"GET / HTTP/1.1\r\n\r\n"
        writer.write_eof()
        assert await reader.read() == b"END"
        writer.close()


async def test_an_upgrade_that_is_not_taken_is_an_ordinary_answer(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
        await writer.drain()

    async with listening(plain) as port:
        got = await gateway.talk(
            f"GET / HTTP/1.1\r\nHost: {port}-{box.id}.{DOMAIN}\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n".encode()
        )
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert got.endswith(b"2\r\nhi\r\n0\r\n\r\n")


async def test_an_upgrade_with_a_body_is_passed_on_without_the_upgrade(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen: list[Any] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(dict((await head_of(reader))[1]))
        seen.append(await reader.readexactly(5))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()

    async with listening(plain) as port:
        answer = await gateway.http.post(
            "/", headers={**gateway.to(box, port), "Connection": "Upgrade", "Upgrade": "x"}, content=b"hello"
        )
    assert (answer.text, seen[1]) == ("hi", b"hello")
    assert b"upgrade" not in seen[0]


async def test_bare_tcp_by_path(gateway: Gateway) -> None:
    box = await gateway.sandbox(public_ports=False)

    async def database(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello first\n")
        while line := await reader.readline():
            writer.write(line.upper())
        writer.write(b"bye")
        await writer.drain()

    async with listening(database) as port:
        path = f"/v1/sandboxes/{box.id}/ports/{port}"
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: skerry-tcp\r\n"
        assert (await gateway.talk(f"{head}\r\n".encode())).startswith(b"HTTP/1.1 401 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(f"{head}X-API-Key: {gateway.key}\r\n\r\n".encode())
        got = await reader.readuntil(b"\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 101 ")
        assert b"upgrade: skerry-tcp\r\n" in got
        assert await reader.readline() == b"hello first\n"
        writer.write(b"select\n")
        assert await reader.readline() == b"SELECT\n"
        writer.write_eof()
        assert await reader.read() == b"bye"
        writer.close()


async def test_a_reset_of_a_bare_line_is_no_end(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")
        await writer.drain()
        await reader.readline()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with listening(broken) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            f"GET /v1/sandboxes/{box.id}/ports/{port} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
            f"Upgrade: skerry-tcp\r\nX-API-Key: {gateway.key}\r\n\r\n".encode()
        )
        await reader.readuntil(b"half")
        writer.write(b"go\n")
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(30):
                await reader.read()
        writer.close()


async def test_a_stopping_server_ends_what_is_endless(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    async with (
        serve(echo, "127.0.0.1", 0) as server,
        websocket(gateway, box.id, server.sockets[0].getsockname()[1]) as client,
    ):
        await client.send("a")
        await client.recv()
        gateway.front.native.state.stopping.set()
        async with asyncio.timeout(30):
            with pytest.raises(ConnectionClosedError):
                await client.recv()


async def test_the_native_terminal_is_still_a_websocket(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    url = f"ws://127.0.0.1:{gateway.port}/v1/sandboxes/{box.id}/pty"
    async with connect(url, additional_headers={"X-API-Key": gateway.key}, proxy=None) as client:
        assert '"started"' in str(await client.recv())
