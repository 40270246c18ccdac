"""One request and its answer: retries, broken lines, what may have happened. Over real sockets."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    AsyncSandbox,
    Client,
    Gone,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    Sandbox,
    Unavailable,
)
from support.scripted_server import SANDBOX, Exchange, ScriptedServer, created, found, killed, problem

KEY = "skerrytest"


def box(server: ScriptedServer) -> Sandbox:
    return Sandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY)


def test_create_sends_what_was_given_and_kills_at_the_end() -> None:
    with ScriptedServer(created, killed) as server:
        with Sandbox.create(
            "base", cpu=2, timeout=600, idle_timeout=None, env={"A": "1"}, url=server.url, api_key=KEY
        ) as sandbox:
            assert sandbox.id == SANDBOX["id"]
        first, last = server.requests
    assert first.json() == {
        "template": "base",
        "cpu": 2,
        "timeout_ms": 600_000,
        "idle_timeout_ms": None,
        "env": {"A": "1"},
    }
    assert first.headers["authorization"] == f"Bearer {KEY}"
    assert (last.method, last.target) == ("DELETE", f"/v1/sandboxes/{SANDBOX['id']}")


def test_a_lost_answer_of_create_is_asked_for_again_with_the_same_key() -> None:
    with ScriptedServer(Exchange.reset, Exchange.close, created) as server:
        Sandbox.create(url=server.url, api_key=KEY).close()
    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert len(server.requests) == 3
    assert len(keys) == 1


def test_two_creates_have_two_keys() -> None:
    with ScriptedServer(created, created) as server:
        for _ in range(2):
            Sandbox.create(url=server.url, api_key=KEY).close()
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 2


def test_an_unknown_option_is_refused_before_anything_is_sent() -> None:
    with ScriptedServer() as server, pytest.raises(TypeError, match="cpus"):
        Sandbox.create(cpus=2, url=server.url, api_key=KEY)  # pyright: ignore[reportCallIssue]


def test_connect_does_not_kill_unless_asked() -> None:
    with ScriptedServer(found) as server, box(server):
        pass
    with (
        ScriptedServer(found, killed) as server,
        Sandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY, kill_on_exit=True),
    ):
        pass


def test_an_error_inside_is_not_hidden_by_one_at_the_end() -> None:
    refused = problem(503, "unavailable", retry="unknown")
    with (
        ScriptedServer(created, refused) as server,
        pytest.raises(ZeroDivisionError),
        Sandbox.create(url=server.url, api_key=KEY),
    ):
        _ = 1 / 0
    with (
        ScriptedServer(created, refused) as server,
        pytest.raises(Unavailable),
        Sandbox.create(url=server.url, api_key=KEY),
    ):
        pass


@pytest.mark.parametrize(("status", "code"), [(410, "sandbox_expired"), (404, "sandbox_not_found")])
def test_one_that_is_over_at_the_end_is_no_error(status: int, code: str) -> None:
    with ScriptedServer(created, problem(status, code)) as server, Sandbox.create(url=server.url, api_key=KEY):
        pass


def test_safe_refusals_are_repeated_a_few_times() -> None:
    busy = problem(503, "unavailable", retry="safe")
    with ScriptedServer(found, busy, busy, found) as server:
        assert box(server).info().state == "running"
    with ScriptedServer(found, busy, busy, busy, busy) as server:
        with pytest.raises(Unavailable):
            box(server).info()
        assert len(server.requests) == 5


@pytest.mark.parametrize("retry", ["never", "unknown"])
def test_other_refusals_are_not_repeated(retry: str) -> None:
    refusal = problem(429, "limit_exceeded", retry=retry)
    with ScriptedServer(found, refusal) as server, pytest.raises(LimitExceeded) as caught:
        box(server).info()
    assert caught.value.retry == retry
    assert caught.value.context["sandbox_id"] == SANDBOX["id"]


def test_a_long_waiting_time_is_the_callers() -> None:
    def later(exchange: Exchange) -> None:
        body = {"status": 503, "code": "unavailable", "detail": "later", "retry": "safe"}
        exchange.reply(503, body, Retry_After="30")

    with ScriptedServer(found, later) as server, pytest.raises(Unavailable) as caught:
        box(server).info()
    assert caught.value.retry_after == 30


@pytest.mark.parametrize("broken", [Exchange.reset, Exchange.close])
def test_a_line_that_breaks_leaves_the_outcome_unknown_and_is_not_repeated(broken: object) -> None:
    with ScriptedServer(found, broken) as server:  # pyright: ignore[reportArgumentType]
        with pytest.raises(OutcomeUnknown) as caught:
            box(server).files.mkdir("/x")
        assert len(server.requests) == 2
    assert caught.value.retry == "unknown"


def test_a_read_whose_line_breaks_is_repeated() -> None:
    with ScriptedServer(found, Exchange.reset, found) as server:
        assert box(server).info().id == SANDBOX["id"]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(Unavailable) as caught:
        Sandbox.create(url=f"http://127.0.0.1:{port}", api_key=KEY)
    assert (caught.value.code, caught.value.retry) == ("server_unreachable", "safe")


def test_a_server_that_comes_back_meanwhile_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    answered: list[bool] = []

    def ask() -> None:
        answered.append(Client(f"http://127.0.0.1:{port}", KEY).server() == {})

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    with socket.create_server(("127.0.0.1", port)) as listening:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            thread.join(10)
    assert answered == [True]


@pytest.mark.parametrize("answer", [b"", b"no json", b"[]", b"{}", b'{"id": 1}'])
def test_an_answer_that_is_no_sandbox_is_an_error_of_ours(answer: bytes) -> None:
    with ScriptedServer(lambda e: e.reply(200, answer)) as server, pytest.raises(InternalError) as caught:
        box(server)
    assert caught.value.code == "bad_answer"


def test_a_refusal_that_is_no_problem_document() -> None:
    with ScriptedServer(lambda e: e.reply(404, b"<html>")) as server, pytest.raises(NotFound):
        box(server)
    with ScriptedServer(lambda e: e.reply(302, b"", Location="/x")) as server, pytest.raises(InternalError):
        box(server)


def test_new_fields_of_a_newer_server_are_left_out() -> None:
    with ScriptedServer(lambda e: e.reply(200, {**SANDBOX, "state": "dreaming", "new": 1})) as server:
        assert box(server).created.state == "dreaming"


def test_a_list_is_read_page_after_page() -> None:
    def page(ids: list[str], following: str | None) -> object:
        return lambda e: e.reply(200, {"items": [{**SANDBOX, "id": i} for i in ids], "next_cursor": following})

    with ScriptedServer(page(["sba", "sbb"], "c/1"), page([], "c2"), page(["sbc"], None)) as server:  # pyright: ignore[reportArgumentType]
        found = Sandbox.list(state="running", metadata={"job": "7 &"}, page_size=2, url=server.url, api_key=KEY)
        assert [info.id for info in found] == ["sba", "sbb", "sbc"]
    assert server.requests[0].target == "/v1/sandboxes?state=running&metadata=job%3D7%20%26&limit=2"
    assert server.requests[1].target.endswith("&cursor=c/1")


def test_a_key_that_no_list_can_be_asked_for_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        list(Sandbox.list(metadata={"a=b": "c"}, url="http://127.0.0.1:1", api_key=KEY))
    assert (refused.value.problems[0].field, refused.value.problems[0].given) == ("metadata", "a=b")


def test_a_list_that_leads_to_itself_ends() -> None:
    def again(exchange: Exchange) -> None:
        exchange.reply(200, {"items": [], "next_cursor": "same"})

    with ScriptedServer(again, again) as server, pytest.raises(InternalError):
        list(Sandbox.list(url=server.url, api_key=KEY))


NAMES = ["a b.txt", "'q\"", "%2e%2e", "+", "#", "a&b=c", "new\nline", "日本語", "é", "é", "\udcff\udc80", "?", "\\"]


@pytest.mark.parametrize("name", NAMES)
def test_names_go_through_byte_for_byte(name: str) -> None:
    from urllib.parse import parse_qsl

    entry = {"path": f"/{name}", "name": name, "kind": "file", "size": 0, "mode": "0640", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5, "target": None, "error": None}

    def same(exchange: Exchange) -> None:
        exchange.reply(200, entry)

    with ScriptedServer(found, same, same) as server:
        sandbox = box(server)
        stat = sandbox.files.stat(f"/{name}")
        sandbox.files.move(f"/{name}", "/y")
    assert (stat.name, stat.mode) == (name, 0o640)
    query = server.requests[1].target.partition("?")[2]
    assert parse_qsl(query, errors="surrogateescape") == [("path", f"/{name}")]
    assert server.requests[2].json()["source"] == f"/{name}"


def test_half_of_a_surrogate_pair_is_refused_before_anything_is_sent() -> None:
    with ScriptedServer(found) as server:
        sandbox = box(server)
        for act in (lambda: sandbox.files.read("/\ud800"), lambda: sandbox.files.write("/x", "\ud800")):
            with pytest.raises(InvalidRequest):
                act()


def test_an_upload_is_streamed_and_longer_than_any_read_may_take() -> None:
    seen: list[int] = []

    def produce() -> Iterator[bytes]:
        for n in range(50):
            seen.append(n)
            yield b"x" * 1000

    entry = {"path": "/f", "name": "f", "kind": "file", "size": 50_000, "mode": "0644", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5}
    with ScriptedServer(found, lambda e: e.reply(200, entry)) as server:
        assert box(server).files.write("/f", produce(), mode=0o644).size == 50_000
    assert server.requests[1].body == b"x" * 50_000
    assert server.requests[1].headers["transfer-encoding"] == "chunked"
    assert server.requests[1].target.endswith("path=/f&mode=0644")


def test_an_upload_whose_source_fails_raises_that_and_sends_no_end() -> None:
    def broken() -> Iterator[bytes]:
        yield b"begin"
        raise ValueError("mine")

    with ScriptedServer(found, found) as server, pytest.raises(ValueError, match="mine"):
        box(server).files.write("/f", broken())
    assert len(server.requests) == 1, "the upload was never a whole request"


def test_what_cannot_be_content_is_refused() -> None:
    async def numbers() -> object:
        await asyncio.sleep(0)
        yield b"x"

    with ScriptedServer(found) as server:
        sandbox = box(server)
        for content in (5, [5], numbers()):
            with pytest.raises(InvalidRequest):
                sandbox.files.write("/f", content)  # pyright: ignore[reportArgumentType]


def test_a_listing_without_its_end_is_not_a_listing() -> None:
    entry = {"path": "/d/f", "name": "f", "kind": "file", "size": 0, "mode": "0644", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5}

    def cut(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**entry)
        exchange.end()

    def wrong(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**entry)
        exchange.event(type="end", count=2)
        exchange.end()

    with ScriptedServer(found, cut, wrong) as server:
        sandbox = box(server)
        with pytest.raises(Unavailable):
            sandbox.files.list("/d")
        with pytest.raises(InternalError):
            sandbox.files.list("/d")


def test_ranges() -> None:
    def bytes_of(exchange: Exchange) -> None:
        exchange.reply(206, b"abc")

    with ScriptedServer(found, bytes_of, bytes_of) as server:
        sandbox = box(server)
        assert sandbox.files.read_bytes("/f", offset=5, length=3) == b"abc"
        assert sandbox.files.read_bytes("/f", offset=5) == b"abc"
        assert sandbox.files.read_bytes("/f", length=0) == b""
        with pytest.raises(InvalidRequest):
            sandbox.files.read_bytes("/f", offset=-1)
    assert [r.headers.get("range") for r in server.requests[1:]] == ["bytes=5-7", "bytes=5-"]


def test_a_download_that_breaks_off_is_not_a_file(tmp_path: Path) -> None:
    entry = {"path": "/f", "name": "f", "kind": "file", "size": 9, "mode": "0644", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5}

    def half(exchange: Exchange) -> None:
        exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        exchange.close()

    def there(exchange: Exchange) -> None:
        exchange.reply(200, entry)

    (tmp_path / "f").write_text("old")
    for root, kind, code in (
        (there, Unavailable, "connection_lost"),
        (problem(410, "sandbox_killed"), Gone, "sandbox_killed"),
    ):
        with ScriptedServer(found, there, half, root) as server, pytest.raises(kind) as caught:
            box(server).files.download("/f", tmp_path / "f")
        assert caught.value.code == code
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
        assert (tmp_path / "f").read_text() == "old"


def test_timeouts_are_seconds() -> None:
    with ScriptedServer(found, found, found) as server:
        sandbox = box(server)
        sandbox.set_timeout(90.5)
        sandbox.extend_timeout(60)
        for bad in (-1, float("nan"), "60", True):
            with pytest.raises(InvalidRequest):
                sandbox.set_timeout(bad)  # pyright: ignore[reportArgumentType]
    assert [r.json() for r in server.requests[1:]] == [{"timeout_ms": 90500}, {"extend_timeout_ms": 60000}]


async def test_the_asynchronous_client_is_cancelled_at_once() -> None:
    release = threading.Event()

    def silent(exchange: Exchange) -> None:
        release.wait(10)
        exchange.close()

    with ScriptedServer(found, silent) as server:
        sandbox = await AsyncSandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.info()
        release.set()
        await sandbox.aclose()


async def test_many_at_once_over_one_asynchronous_client() -> None:
    with ScriptedServer(*itertools.repeat(found, 21)) as server:
        async with AsyncSandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY) as sandbox:
            infos = await asyncio.gather(*(sandbox.info() for _ in range(20)))
    assert {info.id for info in infos} == {SANDBOX["id"]}


async def test_asynchronous_content(tmp_path: Path) -> None:
    async def produce() -> object:
        yield b"a"
        await asyncio.sleep(0)
        yield "b"

    (tmp_path / "f").write_bytes(b"from a file")
    entry = {"path": "/f", "name": "f", "kind": "file", "size": 2, "mode": "0644", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5}

    def took(exchange: Exchange) -> None:
        exchange.reply(200, entry)

    with ScriptedServer(found, took, took) as server:
        async with AsyncSandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY) as sandbox:
            await sandbox.files.write("/f", produce())  # pyright: ignore[reportArgumentType]
            with (tmp_path / "f").open("rb") as file:
                await sandbox.files.write("/f", file)
    assert [r.body for r in server.requests[1:]] == [b"ab", b"from a file"]


def test_beyond_the_end_of_a_file_there_is_nothing() -> None:
    with ScriptedServer(found, problem(416, "range_not_satisfiable"), problem(400, "invalid_path")) as server:
        files = box(server).files
        assert files.read_bytes("/f", offset=9, length=3) == b""
        assert b"".join(files.stream("/f", length=0)) == b""
        with pytest.raises(InvalidRequest):
            files.read_bytes("/f", offset=1)
