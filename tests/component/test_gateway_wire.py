"""What no well-behaved client sends: the gateway reads a request in one way only, or not at all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway import DOMAIN, Gateway, head_of, listening, running_gateway

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


class Recorder:
    """Servers in the sandbox that note every byte they get."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = len(self.seen)
        self.seen.append(b"")
        writer.write(ANSWER)
        while data := await reader.read(65536):
            self.seen[at] += data


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 0x5",
        "Content-Length: 5 5",
        "Content-Length: 99999999999999999999999",
        "Content-Length:",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked, gzip",
        "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding : chunked",
        " Transfer-Encoding: chunked",
        "X: a\r\n folded: b",
        "X: a\nContent-Length: 5",
        "X: a\rContent-Length: 5",
        "X: a\0b",
        "X y: a",
        "X",
        ": a",
    ],
)
async def test_what_two_readers_might_read_differently_reaches_no_sandbox(gateway: Gateway, headers: str) -> None:
    box = await gateway.sandbox()
    recorder = Recorder()
    async with listening(recorder) as port:
        smuggled = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
        request = f"POST / HTTP/1.1\r\nHost: {port}-{box.id}.{DOMAIN}\r\n{headers}\r\nConnection: close\r\n\r\n"
        got = await gateway.talk(request.encode("latin-1") + smuggled)
    assert got.split(b" ", 2)[1] in {b"400", b"501"}, got
    assert all(b"smuggled" not in seen for seen in recorder.seen)
    assert recorder.seen == []


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("GET http://other/ HTTP/1.1", None),
        ("GET http://evil@{host}/ HTTP/1.1", None),
        ("CONNECT {host}:80 HTTP/1.1", None),
        ("CONNECT 127.0.0.1:22 HTTP/1.1", "127.0.0.1:22"),
        ("OPTIONS * HTTP/1.1", None),
        ("GET //[ HTTP/1.1", "\x00"),
        ("GET / HTTP/1.1", ""),
        ("GET / HTTP/1.1", "{host}\r\nHost: {host}"),
        ("GET / HTTP/1.1", "{host}\r\nHost: other"),
        ("GET / HTTP/2.0", None),
        ("GET /\x80 HTTP/1.1", None),
        ("GET /a b HTTP/1.1", None),
        ("GET /\x01 HTTP/1.1", None),
        ("get / HTTP/1.1", None),
        ("GE\x00T / HTTP/1.1", None),
    ],
)
async def test_targets_and_hosts_that_are_refused(gateway: Gateway, line: str, host: str | None) -> None:
    box = await gateway.sandbox()
    recorder = Recorder()
    async with listening(recorder) as port:
        own = f"{port}-{box.id}.{DOMAIN}"
        said = (own if host is None else host).replace("{host}", own)
        request = f"{line.replace('{host}', own)}\r\nHost: {said}\r\nConnection: close\r\n\r\n"
        got = await gateway.talk(request.encode("latin-1"))
    assert got.split(b" ", 2)[1] in {b"400", b"401", b"404"}, got
    assert recorder.seen == []


async def test_an_absolute_target_that_names_its_host_is_read(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen: list[Any] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await head_of(reader))
        writer.write(ANSWER)
        await writer.drain()

    async with listening(server) as port:
        host = f"{port}-{box.id}.{DOMAIN}"
        got = await gateway.talk(
            f"GET http://{host}/a?b HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
    assert got.startswith(b"HTTP/1.1 200 ")
    assert seen[0][0] == b"GET /a?b HTTP/1.1"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
        b"GET /" + b"a" * 300_000,
        b"GET / HTTP/1.1\r\n" + b"X: aaaaaaaaaaaaaaaa\r\n" * 20_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: aaaaaaaaaaaaaaaa\r\n" * 5000 + b"\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=["value", "target", "many", "many and whole", "one and whole"],
)
async def test_a_head_without_end_is_refused(gateway: Gateway, request_: bytes) -> None:
    try:
        got = await gateway.talk(request_)
    except ConnectionError:  # refused while we were still sending
        return
    assert got.startswith(b"HTTP/1.1 431 ") or got == b""


async def test_a_large_body_is_no_large_head(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await reader.readexactly(3_000_000)
        writer.write(ANSWER)
        await writer.drain()

    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for _ in range(3):  # one connection
            head = f"POST / HTTP/1.1\r\nHost: {port}-{box.id}.{DOMAIN}\r\nContent-Length: 3000000\r\n\r\n"
            writer.write(head.encode() + bytes(3_000_000))
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, _ = await head_of(reader)
        await asyncio.sleep(0.2 if b"/a1" in line else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + line.split()[1])
        await writer.drain()

    async with listening(server) as port:
        host = f"{port}-{box.id}.{DOMAIN}"
        requests = (
            f"GET /a1 HTTP/1.1\r\nHost: {host}\r\n\r\n"
            # A request behind another is not upgraded.
            f"GET /a2 HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
            f"GET /a3 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        got = await gateway.talk(requests.encode())
    assert got.index(b"/a1") < got.index(b"/a2") < got.index(b"/a3")


async def test_a_client_of_http_1_0_gets_no_chunks(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    content = b"0123456789" * 100_000

    async def chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(content) + content)
        writer.write(b"\r\n0\r\n\r\n")
        await writer.drain()

    async with listening(chunks) as port:
        got = await gateway.talk(f"GET / HTTP/1.0\r\nHost: {port}-{box.id}.{DOMAIN}\r\n\r\n".encode())
    head, _, body = got.partition(b"\r\n\r\n")
    assert body == content
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head


async def test_a_broken_answer_to_http_1_0_is_no_end_either(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        await asyncio.sleep(0.3)

    async with listening(half) as port:
        with pytest.raises(ConnectionResetError):
            await gateway.talk(f"GET / HTTP/1.0\r\nHost: {port}-{box.id}.{DOMAIN}\r\n\r\n".encode())


async def test_header_injection_by_what_is_decoded(gateway: Gateway) -> None:
    """Percent-encoded line breaks stay encoded on the way."""
    box = await gateway.sandbox()
    recorder = Recorder()
    async with listening(recorder) as port:
        host = f"{port}-{box.id}.{DOMAIN}"
        await gateway.talk(f"GET /%0d%0aX-Injected:%201 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert recorder.seen[0].startswith(b"GET /%0d%0aX-Injected:%201 HTTP/1.1\r\n")
    assert b"\r\nX-Injected" not in recorder.seen[0]


async def test_connection_cannot_take_away_what_the_gateway_says(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen: list[Any] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = (await head_of(reader))[1]
        seen.append((dict(headers), await reader.readexactly(5)))
        writer.write(ANSWER)
        await writer.drain()

    async with listening(server) as port:
        named = "close, host, content-length, x-forwarded-for, x-forwarded-host"
        await gateway.http.post("/", headers={**gateway.to(box, port), "Connection": named}, content=b"hello")
    headers, body = seen[0]
    assert body == b"hello"
    assert headers[b"content-length"] == b"5"
    assert headers[b"host"] == headers[b"x-forwarded-host"] == f"{port}-{box.id}.{DOMAIN}".encode()
    assert headers[b"x-forwarded-for"] == b"127.0.0.1"
