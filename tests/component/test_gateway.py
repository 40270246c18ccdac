"""The gateway to ports: through the real front and a real agent to servers that say exactly what the test wants."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.control import ports
from skerry.core import ids
from skerry.core.errors import Unavailable
from support.fake_node import Fault
from support.gateway import DOMAIN, Gateway, Handler, head_of, listening, running_gateway
from support.server import free_port

PAUSED = {"message": "The sandbox was not found", "code": 502}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def says(answer: bytes, *, seen: list[Any] | None = None, body: bool = False) -> Handler:
    """A server that reads one request (with its body, if it is to) and says this."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, headers = await head_of(reader)
        got = b""
        if body:
            length = int(dict(headers)[b"content-length"])
            got = await reader.readexactly(length)
        if seen is not None:
            seen.append((line, headers, got))
        writer.write(answer)
        await writer.drain()

    return handler


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


# ------------------------------------------------------------------------------------------------------------- finding


async def test_by_host_by_headers_and_by_path(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen: list[Any] = []
    async with listening(says(OK, seen=seen)) as port:
        by_host = await gateway.http.get("/a%2Fb?q=%20", headers=gateway.to(box, port))
        by_localhost = await gateway.http.get("/", headers={"Host": f"{port}-{box.id}.localhost:{gateway.port}"})
        by_headers = await gateway.http.get("/", headers={"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(port)})
        by_path = await gateway.http.get(
            f"/v1/sandboxes/{box.id}/ports/{port}/x%2Fy?z=1", headers={"X-API-Key": gateway.key}
        )
    for answer in (by_host, by_localhost, by_headers, by_path):
        assert (answer.status_code, answer.text) == (200, "hi")
    assert [line for line, _, _ in seen] == [
        b"GET /a%2Fb?q=%20 HTTP/1.1",
        b"GET / HTTP/1.1",
        b"GET / HTTP/1.1",
        b"GET /x%2Fy?z=1 HTTP/1.1",
    ]


async def test_what_the_server_is_told_about_the_client(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen: list[Any] = []
    forged = {
        "X-Forwarded-For": "1.2.3.4",
        "X-Forwarded-Host": "evil",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Prefix": "/evil",
        "Forwarded": "for=evil",
        "Connection": "keep-alive, X-Secret-Hop",
        "X-Secret-Hop": "1",
        "Keep-Alive": "5",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
    }
    async with listening(says(OK, seen=seen)) as port:
        await gateway.http.get("/", headers={**gateway.to(box, port), **forged})
        await gateway.http.get(
            f"/v1/sandboxes/{box.id}/ports/{port}",
            headers={"X-API-Key": gateway.key, "Authorization": "Basic YTpi", "X-Forwarded-Prefix": "/evil"},
        )
    first, second = (dict(headers) for _, headers, _ in seen)
    assert first[b"host"] == f"{port}-{box.id}.{DOMAIN}".encode()
    assert first[b"x-forwarded-for"] == b"1.2.3.4, 127.0.0.1"
    assert first[b"x-forwarded-host"] == first[b"host"]
    assert first[b"x-forwarded-proto"] == b"http"
    assert first[b"connection"] == b"close"
    gone = {b"x-forwarded-prefix", b"forwarded", b"x-secret-hop", b"keep-alive", b"te", b"proxy-authorization"}
    assert gone & set(first) == set()
    assert second[b"x-forwarded-prefix"] == f"/v1/sandboxes/{box.id}/ports/{port}".encode()
    assert second[b"authorization"] == b"Basic YTpi"
    assert b"x-api-key" not in second


async def test_no_key_and_no_token_of_ours_reaches_a_sandbox(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    tokens = gateway.services.tokens
    seen: list[Any] = []
    spelled = "e2b_" + gateway.key.encode().hex()
    async with listening(says(OK, seen=seen)) as port:
        for headers in (
            {"Authorization": f"Bearer {gateway.key}"},
            {"X-API-Key": gateway.key, "Authorization": f"bearer  {gateway.key}"},
            {"X-API-Key": spelled, "X-Access-Token": tokens.access(box.id)},
            {"E2b-Traffic-Access-Token": tokens.traffic(box.id), "E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "1"},
        ):
            assert (await gateway.http.get("/", headers={**gateway.to(box, port), **headers})).status_code == 200
        await gateway.http.get("/", headers={**gateway.to(box, port), "X-Access-Token": "the app's own"})
        await gateway.http.get(
            f"/v1/sandboxes/{box.id}/ports/{port}/", headers={"Authorization": f"Bearer {gateway.key}"}
        )
    assert len(seen) == 6
    said = repr(seen)
    for secret in (gateway.key, spelled, tokens.access(box.id), tokens.traffic(box.id)):
        assert secret not in said
    assert (b"x-access-token", b"the app's own") in seen[4][1]


async def test_the_host_can_be_masked(gateway: Gateway) -> None:
    seen: list[Any] = []
    async with listening(says(OK, seen=seen)) as port:
        for mask, host in (("localhost:${PORT}", f"localhost:{port}"), ("app.internal", "app.internal")):
            box = await gateway.sandbox(mask_request_host=mask)
            await gateway.http.get("/", headers=gateway.to(box, port))
            headers = dict(seen[-1][1])
            assert headers[b"host"] == host.encode()
            assert headers[b"x-forwarded-host"] == f"{port}-{box.id}.{DOMAIN}".encode()


# ------------------------------------------------------------------------------------------------------------ refusals


async def test_what_clients_of_e2b_match_on(gateway: Gateway) -> None:
    box, closed = await gateway.sandbox(), free_port()
    answer = await gateway.http.get("/", headers=gateway.to(box, closed))
    assert (answer.status_code, answer.json()) == (
        502,
        {"sandboxId": box.id, "message": "The sandbox is running but port is not open", "port": closed, "code": 502},
    )
    stranger = replace(box, id=ids.new_id(ids.SANDBOX))
    for other in (stranger, replace(box, id="abc")):
        answer = await gateway.http.get("/", headers=gateway.to(other, 80))
        assert (answer.status_code, answer.json()) == (502, {"sandboxId": other.id, **PAUSED})
        assert answer.headers["should-retry"] == "false"
    await gateway.services.sandboxes.kill(gateway.me, box.id)
    answer = await gateway.http.get("/", headers=gateway.to(box, 80))
    assert (answer.status_code, answer.json()) == (502, {"sandboxId": box.id, **PAUSED})


async def test_ports_that_are_not_public_take_the_traffic_token(gateway: Gateway) -> None:
    box, other = await gateway.sandbox(public_ports=False), await gateway.sandbox()
    tokens = gateway.services.tokens
    async with listening(says(OK)) as port:
        to = gateway.to(box, port)
        answer = await gateway.http.get("/", headers=to)
        assert (answer.status_code, answer.json()) == (
            403,
            {
                "sandboxId": box.id,
                "message": "Sandbox is secured with traffic access token. "
                "Token header 'e2b-traffic-access-token' is missing",
                "code": 403,
            },
        )
        for wrong in ("x", tokens.traffic(other.id), tokens.access(box.id)):
            answer = await gateway.http.get("/", headers={**to, "e2b-traffic-access-token": wrong})
            assert answer.status_code == 403
            assert answer.json()["message"].endswith("Provided token in header 'e2b-traffic-access-token' is invalid")
        answer = await gateway.http.get("/", headers={**to, "e2b-traffic-access-token": tokens.traffic(box.id)})
        assert answer.text == "hi"


async def test_by_path_a_key_or_the_token_is_needed_and_problems_are_native(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    stranger, closed = ids.new_id(ids.SANDBOX), free_port()
    key = {"X-API-Key": gateway.key}
    token = {"e2b-traffic-access-token": gateway.services.tokens.traffic(box.id)}
    async with listening(says(OK)) as port:
        path = f"/v1/sandboxes/{box.id}/ports/{port}/"
        for headers, status, code in (
            ({}, 401, "key_missing"),
            ({"X-API-Key": "no"}, 401, "key_unknown"),
            ({"Authorization": "Basic x"}, 401, "key_missing"),
            ({"e2b-traffic-access-token": "no"}, 403, "traffic_token_wrong"),
        ):
            answer = await gateway.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
        for headers in (key, token):
            assert (await gateway.http.get(path, headers=headers)).text == "hi"
    for path, status, code in (
        (f"/v1/sandboxes/{box.id}/ports/{closed}/", 409, "port_not_open"),
        (f"/v1/sandboxes/{stranger}/ports/{closed}/", 404, "sandbox_not_found"),
        (f"/v1/sandboxes/{box.id}/ports/0/", 400, "bad_route"),
    ):
        answer = await gateway.http.get(path, headers=key)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    other, secret = await gateway.services.keys.create(gateway.me, "reader", ["sandboxes:read"])
    answer = await gateway.http.get(f"/v1/sandboxes/{box.id}/ports/{closed}/", headers={"X-API-Key": secret})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), other.id


async def test_a_browser_gets_a_page(gateway: Gateway) -> None:
    browser = {"User-Agent": "Mozilla/5.0 (X11)", "Accept": "text/html,*/*"}
    stranger = replace(await gateway.sandbox(), id="abc")
    answer = await gateway.http.get("/", headers={**gateway.to(stranger, 80), **browser})
    assert answer.status_code == 502
    assert answer.headers["content-type"].startswith("text/html")
    assert "The sandbox was not found" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_the_agents_own_port_cannot_be_reached(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    answer = await gateway.http.get("/", headers=gateway.to(box, 1024))
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox is running but port is not open")


# ------------------------------------------------------------------------------------------------------ rest and return


async def test_a_paused_one_is_not_found_unless_it_resumes_by_itself(gateway: Gateway) -> None:
    async with listening(says(OK)) as port:
        for auto_resume in (False, True):
            box = await gateway.sandbox(auto_resume=auto_resume)
            await gateway.services.sandboxes.pause(gateway.me, box.id)
            answer = await gateway.http.get("/", headers=gateway.to(box, port))
            if auto_resume:
                assert answer.text == "hi"
            else:
                assert (answer.status_code, answer.json()) == (502, {"sandboxId": box.id, **PAUSED})


async def test_the_request_waits_for_the_resume_and_the_record_says_who_came(gateway: Gateway) -> None:
    box = await gateway.sandbox(auto_resume=True)
    await gateway.services.sandboxes.pause(gateway.me, box.id)
    gate = asyncio.Event()
    gateway.node.faults.resume = Fault(gate=gate)
    async with listening(says(OK, body=True)) as port:
        waiting = asyncio.create_task(gateway.http.post("/", headers=gateway.to(box, port), content=b"x" * 100_000))
        while f"resume {box.id}" not in gateway.node.acts:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        assert (await waiting).text == "hi"
    page = await gateway.services.sandboxes.events(gateway.me, box.id)
    assert [e.actor for e in page.items if e.action == "sandbox.resumed"] == [f"visitor:{box.id}"]


async def test_a_resume_that_fails_says_so(gateway: Gateway) -> None:
    box = await gateway.sandbox(auto_resume=True)
    await gateway.services.sandboxes.pause(gateway.me, box.id)
    gateway.node.faults.resume = Fault(error=Unavailable("no room", code="node_full", retry_after=7))
    answer = await gateway.http.get("/", headers=gateway.to(box, 80))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["message"] == "no room"


async def test_an_open_exchange_is_activity(gateway: Gateway) -> None:
    box = await gateway.sandbox(idle_timeout_ms=1000)
    done = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await done.wait()
        writer.write(OK)
        await writer.drain()

    async with listening(slow) as port:
        waiting = asyncio.create_task(gateway.http.get("/", headers=gateway.to(box, port)))
        await asyncio.sleep(3)
        assert (await gateway.services.sandboxes.get(gateway.me, box.id)).state.value == "running"
        done.set()
        assert (await waiting).text == "hi"
    async with asyncio.timeout(30):
        while (await gateway.services.sandboxes.get(gateway.me, box.id)).state.value == "running":
            await asyncio.sleep(0.1)


# -------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_upload_arrives_byte_by_byte(gateway: Gateway, chunked: bool) -> None:
    box = await gateway.sandbox()
    content = b"0123456789abcdef" * 500_000
    got: list[tuple[dict[bytes, bytes], str]] = []

    async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = dict((await head_of(reader))[1])
        found = hashlib.sha256()
        if chunked:
            while size := int(await reader.readline(), 16):
                found.update((await reader.readexactly(size + 2))[:-2])
        else:
            left = int(headers[b"content-length"])
            while left:
                data = await reader.read(min(left, 65536))
                left -= len(data)
                found.update(data)
        got.append((headers, found.hexdigest()))
        writer.write(OK)
        await writer.drain()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 100_000):
            yield content[at : at + 100_000]

    async with listening(digest) as port:
        answer = await gateway.http.post("/", headers=gateway.to(box, port), content=pieces() if chunked else content)
    assert answer.text == "hi"
    assert got[0][1] == hashlib.sha256(content).hexdigest()
    assert (b"transfer-encoding" in got[0][0]) is chunked
    assert (b"content-length" in got[0][0]) is not chunked


@pytest.mark.parametrize("how", ["length", "chunks", "close"])
async def test_a_download_arrives_byte_by_byte(gateway: Gateway, how: str) -> None:
    box = await gateway.sandbox()
    content = b"0123456789abcdef" * 500_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nX-Own: 1\r\n")
        if how == "length":
            writer.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        elif how == "close":
            writer.write(b"\r\n" + content)
        else:
            writer.write(b"Transfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n")
            for at in range(0, len(content), 70_001):
                piece = content[at : at + 70_001]
                writer.write(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
            writer.write(b"0\r\nX-T: dropped\r\n\r\n")
        await writer.drain()

    async with listening(serve) as port:
        answer = await gateway.http.get("/", headers=gateway.to(box, port))
    assert answer.content == content
    assert answer.headers["x-own"] == "1"
    assert ("content-length" in answer.headers) is (how == "length")


@pytest.mark.parametrize("how", ["length", "chunks", "reset"])
async def test_a_server_that_breaks_off_never_looks_finished(gateway: Gateway, how: str) -> None:
    box = await gateway.sandbox()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        framing = {"length": b"Content-Length: 100\r\n", "chunks": b"Transfer-Encoding: chunked\r\n", "reset": b""}
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing[how] + b"\r\n")
        writer.write(b"5\r\nhello\r\n" if how == "chunks" else b"hello")
        await writer.drain()
        await asyncio.sleep(0.3)
        if how == "reset":
            writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER: reset
            writer.transport.abort()

    async with listening(half) as port:
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with gateway.http.stream("GET", "/", headers=gateway.to(box, port)) as answer:
                assert answer.status_code == 200
                async for piece in answer.aiter_raw():
                    got += piece
        assert got == b"hello"


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",  # its end would be that of the connection
    ],
    ids=["chunks", "to the connection's end"],
)
async def test_a_sandbox_that_is_killed_breaks_its_answers(gateway: Gateway, begun: bytes) -> None:
    box = await gateway.sandbox()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(begun)
        await reader.read()

    async with listening(endless) as port:
        with pytest.raises(httpx.RemoteProtocolError):
            async with gateway.http.stream("GET", "/", headers=gateway.to(box, port)) as answer:
                async for _ in answer.aiter_raw():
                    await gateway.services.sandboxes.kill(gateway.me, box.id)
                    gateway.node.link.abort()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x01b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 700 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    ],
    ids=lambda answer: answer[:40].decode("latin-1"),
)
async def test_what_is_no_answer_is_a_bad_gateway(gateway: Gateway, answer: bytes) -> None:
    box = await gateway.sandbox()
    async with listening(says(answer)) as port:
        got = await gateway.http.get("/", headers=gateway.to(box, port))
    assert got.status_code == 502
    assert "was not found" not in got.text
    assert "port is not open" not in got.text


async def test_answers_without_a_body(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    for method, answer, length in (
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n", "12345"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 77\r\n\r\n", None),
        ("DELETE", b"HTTP/1.1 204 No Content\r\n\r\n", None),
        ("GET", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "0"),
    ):
        async with listening(says(answer)) as port:
            for _ in range(2):  # the client's connection is used again
                got = await gateway.http.request(method, "/", headers=gateway.to(box, port))
                assert (got.content, got.headers.get("content-length")) == (b"", length)


async def test_repeated_headers_and_odd_statuses_pass(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    answer = (
        b"HTTP/1.1 418 Teapot\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Request-Id: own\r\nServer: mine\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 1\r\n\r\nt"
    )
    async with listening(says(answer)) as port:
        got = await gateway.http.get("/", headers=gateway.to(box, port))
    assert got.status_code == 418
    assert got.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert got.headers.get_list("x-request-id") == ["own"]
    assert got.headers["server"] == "mine"
    assert not {"x-hop", "keep-alive", "connection"} & set(got.headers)


async def test_events_come_one_by_one(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    seen = asyncio.Semaphore(0)

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n in range(20):
            text = b"data: %d\n\n" % n
            writer.write(b"%x\r\n%b\r\n" % (len(text), text))
            await seen.acquire()  # the next one only after the client has this one
        writer.write(b"0\r\n\r\n")

    async with listening(events) as port, gateway.http.stream("GET", "/", headers=gateway.to(box, port)) as answer:
        lines = []
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
                seen.release()
    assert lines == [f"data: {n}" for n in range(20)]


async def test_a_client_that_leaves_closes_the_servers_connection(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        try:
            await reader.read()
        finally:
            closed.set()

    async with listening(endless) as port:
        async with gateway.http.stream("GET", "/", headers=gateway.to(box, port)) as answer:
            async for _ in answer.aiter_raw():
                break
        async with asyncio.timeout(30):
            await closed.wait()
        live = gateway.services.ports._live.get(box.id)
        assert live is not None
        async with asyncio.timeout(30):
            while live.active:
                await asyncio.sleep(0.01)


async def test_a_slow_client_holds_the_server_back(gateway: Gateway) -> None:
    """Far less than the whole answer may be under way between the two."""
    box = await gateway.sandbox()
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n")
        for _ in range(2000):
            writer.write(bytes(100_000))
            await writer.drain()
            written += 100_000

    async with listening(flood) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(f"GET / HTTP/1.1\r\nHost: {port}-{box.id}.{DOMAIN}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(1)
        assert written < 60_000_000  # what the sockets' buffers on the way take
        total = 0
        while total < 200_000_000:
            total += len(await reader.read(1_000_000))
        writer.close()
    assert written == 200_000_000


async def test_a_slow_server_holds_the_client_back(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    go = asyncio.Event()
    got = 0

    async def lazy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await head_of(reader)
        await go.wait()
        while got < 100_000_000:
            got += len(await reader.read(1_000_000))
        writer.write(OK)
        await writer.drain()

    async with listening(lazy) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        host = f"{port}-{box.id}.{DOMAIN}"
        writer.write(f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000000\r\n\r\n".encode())
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(1000):
                writer.write(bytes(100_000))
                await writer.drain()
                sent += 100_000

        sending = asyncio.create_task(send())
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(1)
        assert sent < 60_000_000
        go.set()
        await sending
        assert (await reader.readuntil(b"hi")).endswith(b"hi")
        writer.close()


async def test_an_answer_before_the_body_has_ended(gateway: Gateway) -> None:
    """A server may refuse an upload without reading it."""
    box = await gateway.sandbox()
    async with listening(says(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")) as port:
        answer = await gateway.http.post("/", headers=gateway.to(box, port), content=bytes(30_000_000))
    assert (answer.status_code, answer.text) == (413, "big")


@pytest.mark.parametrize("polite", [True, False])
async def test_expect_continue(gateway: Gateway, polite: bool) -> None:
    box = await gateway.sandbox()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert dict((await head_of(reader))[1])[b"expect"] == b"100-continue"
        if polite:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        got = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + got)
        await writer.drain()

    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        host = f"{port}-{box.id}.{DOMAIN}"
        writer.write(f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(30):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hello")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_expect_continue_refused(gateway: Gateway) -> None:
    """Whether the body comes is not known then: the connection ends."""
    box = await gateway.sandbox()
    async with listening(says(b"HTTP/1.1 417 No\r\nContent-Length: 2\r\n\r\nno")) as port:
        host = f"{port}-{box.id}.{DOMAIN}"
        got = await gateway.talk(
            f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n".encode()
        )
    assert got.startswith(b"HTTP/1.1 417 ")
    assert b"100 Continue" not in got
    assert b"connection: close\r\n" in got


async def test_many_at_once(gateway: Gateway) -> None:
    box = await gateway.sandbox()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, _ = await head_of(reader)
        body = line.split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    async with listening(echo) as port:
        answers = await asyncio.gather(*(gateway.http.get(f"/{n}", headers=gateway.to(box, port)) for n in range(200)))
    assert [answer.text for answer in answers] == [f"/{n}" for n in range(200)]


async def test_visitors_leave_room_for_the_owner(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "OPEN_MAX", 3)
    box, other = await gateway.sandbox(), await gateway.sandbox()
    go = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await go.wait()
        writer.write(OK)
        await writer.drain()

    async with listening(slow) as port:
        waiting = [asyncio.create_task(gateway.http.get("/", headers=gateway.to(box, port))) for _ in range(3)]
        live = gateway.services.ports._live.get(box.id)
        while live is None or live.active < 3:
            await asyncio.sleep(0.01)
        refused = await gateway.http.get("/", headers=gateway.to(box, port))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        go.set()
        assert [(await one).text for one in waiting] == ["hi"] * 3
        for sandbox in (box, other):
            assert (await gateway.http.get("/", headers=gateway.to(sandbox, port))).text == "hi"
    assert not gateway.services.ports._open
    assert live.active == 0


async def test_the_servers_numbers_and_log_tell_of_it(gateway: Gateway) -> None:
    box = await gateway.sandbox()
    async with listening(says(OK)) as port:
        await gateway.http.get("/", headers=gateway.to(box, port))
    numbers = (await gateway.http.get("/metrics")).text
    assert 'skerry_http_requests_total{method="GET",route="port",status="200"} 1.0' in numbers


async def test_json_bodies_have_no_surprise(gateway: Gateway) -> None:
    answer = await gateway.http.get("/", headers={"Host": f"80-abc.{DOMAIN}"})
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.content)["code"] == 502
