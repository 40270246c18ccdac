"""Commands over HTTP and WebSocket: complete streams, honest ends, clients that leave."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from skerry.core.errors import InvalidRequest
from support.api_server import Api, lines, running_api


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path, keepalive_s=0.1) as found:
        yield found


@pytest_asyncio.fixture
async def box(api: Api) -> str:
    return await api.sandbox()


def path(box: str, rest: str) -> str:
    return f"/v1/sandboxes/{box}/{rest}"


async def stays(api: Api, box: str, **more: Any) -> str:
    """A process that runs until the test ends it."""
    answer = await api.http.post(path(box, "processes"), json={"command": "stay", **more})
    assert answer.status_code == 201, answer.text
    return answer.json()["process_id"]


# ------------------------------------------------------------------------------------------------------- blocking run


async def test_blocking_run(api: Api, box: str) -> None:
    found = (await api.http.post(path(box, "run"), json={"command": "hällo"})).json()
    assert found["stdout"] == "hällo"
    assert found["stdout_base64"] is None
    assert (found["reason"], found["exit_code"], found["signal"]) == ("exit", 0, None)
    assert (found["stdout_truncated"], found["stderr_truncated"]) == (False, False)


async def test_bytes_that_are_not_text_come_as_base64_too(api: Api, box: str) -> None:
    body = json.dumps({"argv": ["a\udcffb"]})  # ASCII, with the odd byte as a lone surrogate
    answer = await api.http.post(path(box, "run"), content=body, headers={"Content-Type": "application/json"})
    found = answer.json()
    assert found["stdout"] == "a�b"
    assert base64.b64decode(found["stdout_base64"]) == b"a\xffb"
    assert found["stderr_base64"] is None


@pytest.mark.parametrize(("limit", "kept", "cut"), [(0, "", True), (3, "abc", True), (6, "abcdef", False)])
async def test_a_cap_is_told(api: Api, box: str, limit: int, kept: str, cut: bool) -> None:
    body = {"command": "abcdef", "max_output_bytes": limit}
    found = (await api.http.post(path(box, "run"), json=body)).json()
    assert (found["stdout"], found["stdout_truncated"]) == (kept, cut)


async def test_standard_input_is_delivered_whole_and_closed(api: Api, box: str) -> None:
    data = bytes(range(256)) * 1000
    body = {"command": "x", "stdin": base64.b64encode(data).decode()}
    assert (await api.http.post(path(box, "run"), json=body)).status_code == 200
    async with asyncio.timeout(60):
        while api.guest(box).stdin != data:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"argv": ["a"], "command": "b"}, "command"),
        ({"argv": []}, "argv"),
        ({"command": "x", "stdin": "!!"}, "stdin"),
        ({"command": "x", "timeout_ms": -1}, "timeout_ms"),
        ({"command": "x", "timeout_ms": "1"}, "timeout_ms"),
        ({"command": "x", "max_output_bytes": 2**40}, "max_output_bytes"),
        ({"command": "x", "stream": True, "max_output_bytes": 5}, "max_output_bytes"),
        ({"command": "x", "env": {"1A": "x"}}, "env.1A"),
        ({"command": "x", "cwd": ""}, "cwd"),
        ({"command": "a\0b"}, "command"),
    ],
)
async def test_a_wrong_run_names_its_field(api: Api, box: str, body: dict[str, Any], field: str) -> None:
    answer = await api.http.post(path(box, "run"), json=body)
    assert answer.status_code == 400
    assert field in {e["field"] for e in answer.json()["errors"]}


async def test_what_cannot_start_is_a_problem_and_never_a_stream(api: Api, box: str) -> None:
    api.node.faults.guest = InvalidRequest("there is no /nowhere", code="cwd_not_found")
    for accept in ("application/x-ndjson", "text/event-stream"):
        body = {"command": "x", "stream": True, "cwd": "/nowhere"}
        answer = await api.http.post(path(box, "run"), json=body, headers={"Accept": accept})
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "cwd_not_found"


# ------------------------------------------------------------------------------------------------------------ streams


async def test_a_stream_begins_with_started_and_ends_with_exit(api: Api, box: str) -> None:
    answer = await api.http.post(path(box, "run"), json={"command": "abc", "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = lines(answer.text)
    assert [e["type"] for e in found] == ["started", "stdout", "exit"]
    assert base64.b64decode(found[1]["data"]) == b"abc"
    assert found[1]["offset"] == 0
    assert set(found[0]) == {"type", "process_id", "pid", "argv", "cwd", "user", "started_at_ms"}
    assert found[2] == {"type": "exit", "reason": "exit", "exit_code": 0, "signal": None, "duration_ms": 5}


async def test_server_sent_events_say_the_same(api: Api, box: str) -> None:
    answer = await api.http.post(
        path(box, "run"), json={"command": "a\nb", "stream": True}, headers={"Accept": "text/event-stream"}
    )
    assert answer.headers["content-type"] == "text/event-stream"
    events = [block.split("\n") for block in answer.text.removesuffix("\n\n").split("\n\n")]
    assert [e[0] for e in events] == ["event: started", "event: stdout", "event: exit"]
    assert json.loads(events[1][1].removeprefix("data: "))["type"] == "stdout"


async def test_silence_is_filled_with_keepalives(api: Api, box: str) -> None:
    pid = await stays(api, box)
    async with api.http.stream("GET", path(box, f"processes/{pid}/output")) as answer:
        kinds: list[str] = []
        async for line in answer.aiter_lines():
            kinds.append(json.loads(line)["type"])
            if kinds.count("keepalive") == 3:
                api.guest(box).finish(pid, 7)
        assert kinds[0] == "started"
        assert kinds[-1] == "exit"


async def test_a_client_that_leaves_does_not_touch_the_process(api: Api, box: str) -> None:
    async with api.http.stream("POST", path(box, "run"), json={"command": "stay", "stream": True}) as answer:
        started = json.loads(await anext(answer.aiter_lines()))
    pid = started["process_id"]
    assert (await api.http.get(path(box, f"processes/{pid}"))).json()["state"] == "running"
    api.guest(box).emit(pid, b"later")
    api.guest(box).finish(pid, 5)
    found = lines((await api.http.get(path(box, f"processes/{pid}/output"))).text)
    assert [e["type"] for e in found] == ["started", "stdout", "exit"]
    assert found[-1]["exit_code"] == 5


async def test_a_client_that_leaves_a_blocking_run_lets_go_of_the_stream(api: Api, box: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post(path(box, "run"), json={"command": "stay"}, timeout=httpx.Timeout(60, read=1))
    async with asyncio.timeout(60):
        while 'status="499"' not in (await api.http.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def test_a_stream_of_a_sandbox_that_dies_ends_with_the_reason(api: Api, box: str) -> None:
    pid = await stays(api, box)
    async with api.http.stream("GET", path(box, f"processes/{pid}/output")) as answer:
        source = answer.aiter_lines()
        await anext(source)
        await api.http.delete(f"/v1/sandboxes/{box}")
        rest = [json.loads(line) async for line in source]
    assert rest[-1]["type"] == "error"
    assert rest[-1]["error"]["code"] == "sandbox_killed"
    assert rest[-1]["error"]["status"] == 410
    assert "exit" not in {e["type"] for e in rest}


async def test_a_stopping_server_says_so(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        box = await api.sandbox()
        async with api.http.stream("POST", path(box, "run"), json={"command": "stay", "stream": True}) as answer:
            source = answer.aiter_lines()
            await anext(source)
            api.app.state.stopping.set()
            last = json.loads(await anext(source))
        assert last["type"] == "error"
        assert last["error"]["code"] == "stopping"
        assert last["error"]["retry"] == "unknown"
        blocked = await api.http.post(path(box, "run"), json={"command": "stay"})
        assert (blocked.status_code, blocked.json()["code"]) == (503, "stopping")


async def test_output_without_following(api: Api, box: str) -> None:
    pid = await stays(api, box)
    api.guest(box).emit(pid, b"so far")
    found = lines((await api.http.get(path(box, f"processes/{pid}/output?follow=false"))).text)
    assert [e["type"] for e in found] == ["started", "stdout", "end"]
    api.guest(box).finish(pid)
    found = lines((await api.http.get(path(box, f"processes/{pid}/output?follow=false"))).text)
    assert [e["type"] for e in found] == ["started", "stdout", "exit", "end"]


async def test_a_slow_reader_holds_the_writer(api: Api, box: str) -> None:
    """Nothing is buffered whole: while nobody reads, the server takes no more than sockets hold."""
    pid = await stays(api, box)
    guest = api.guest(box)
    chunk, count = b"x" * 100_000, 400
    for _ in range(count):
        guest.emit(pid, chunk)
    guest.finish(pid)
    taken = 0
    streams: list[Any] = []
    attach = guest.attach

    async def counted(*args: Any, **more: Any) -> Any:
        stream = await attach(*args, **more)
        streams.append(stream)
        return stream

    guest.attach = counted  # pyright: ignore[reportAttributeAccessIssue]
    async with api.http.stream("GET", path(box, f"processes/{pid}/output")) as answer:
        await asyncio.sleep(0.5)
        assert streams[0]._next < count / 2
        async for line in answer.aiter_lines():
            event = json.loads(line)
            if event["type"] == "stdout":
                taken += len(base64.b64decode(event["data"]))
    assert taken == count * len(chunk)
    assert event["type"] == "exit"


# ---------------------------------------------------------------------------------------------------------- processes


async def test_a_process_from_start_to_end(api: Api, box: str) -> None:
    pid = await stays(api, box, stdin=True, tag="web", cwd="/tmp")
    found = (await api.http.get(path(box, f"processes/{pid}"))).json()
    assert (found["tag"], found["stdin"], found["background"], found["state"]) == ("web", True, True, "running")
    assert (await api.http.get(path(box, f"processes/{found['pid']}"))).json() == found
    assert [p["process_id"] for p in (await api.http.get(path(box, "processes"))).json()["items"]] == [pid]
    written = await api.http.post(path(box, f"processes/{pid}/stdin"), content=b"\x00\xffabc")
    assert written.json() == {"written": 5}
    assert api.guest(box).stdin == b"\x00\xffabc"
    assert (await api.http.delete(path(box, f"processes/{pid}/stdin"))).status_code == 204
    assert (await api.http.post(path(box, f"processes/{pid}/resize"), json={"cols": 1, "rows": 2})).status_code == 204
    assert (await api.http.delete(path(box, f"processes/{pid}"))).json() == {"killed": True}
    assert (await api.http.delete(path(box, f"processes/{pid}"))).json() == {"killed": False}
    refused = await api.http.post(path(box, f"processes/{pid}/signal"), json={"signal": "INT"})
    assert (refused.status_code, refused.json()["code"]) == (409, "process_exited")


async def test_signals(api: Api, box: str) -> None:
    pid = await stays(api, box)
    refused = await api.http.post(path(box, f"processes/{pid}/signal"), json={"signal": "NOPE"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "signal")
    sent = await api.http.post(path(box, f"processes/{pid}/signal"), json={"signal": "SIGINT"})
    assert (sent.status_code, sent.content) == (204, b"")


async def test_an_unknown_process(api: Api, box: str) -> None:
    for ref in ("pr00000000000000000000", "1", "x%2Fy"):
        answer = await api.http.get(path(box, f"processes/{ref}/output"))
        assert answer.status_code == 404


# ---------------------------------------------------------------------------------------------------------- terminals


def terminal(api: Api, box: str, query: str = "", key: str | None = None) -> connect:
    url = api.url.replace("http", "ws") + path(box, f"pty?{query}")
    headers = {} if key == "" else {"X-API-Key": key or api.key}
    return connect(url, additional_headers=headers, proxy=None)


async def until_exit(socket: ClientConnection) -> list[Any]:
    """All frames to the end of the socket."""
    frames: list[Any] = []
    try:
        while True:
            frame = await socket.recv()
            frames.append(frame if isinstance(frame, bytes) else json.loads(frame))
    except ConnectionClosed:
        return frames


async def test_a_terminal_from_start_to_exit(api: Api, box: str) -> None:
    async with terminal(api, box, "command=stay&cols=100&rows=30&env=%7B%22A%22%3A%221%22%7D") as socket:
        started = json.loads(await socket.recv())
        assert started["type"] == "started"
        pid = started["process_id"]
        await socket.send(b"typed\r\x03")
        await socket.send(json.dumps({"type": "resize", "cols": 80, "rows": 24}))
        api.guest(box).emit(pid, b"\xff\x1b[0m")
        assert await socket.recv() == b"\xff\x1b[0m"
        async with asyncio.timeout(60):
            while api.guest(box).stdin != b"typed\r\x03":
                await asyncio.sleep(0.01)
        api.guest(box).finish(pid, 3)
        rest = await until_exit(socket)
        assert rest == [{"type": "exit", "reason": "exit", "exit_code": 3, "signal": None, "duration_ms": 5}]
        assert socket.close_code == 1000


async def test_a_terminal_outlives_its_socket(api: Api, box: str) -> None:
    async with terminal(api, box, "command=stay") as socket:
        pid = json.loads(await socket.recv())["process_id"]
    assert (await api.http.get(path(box, f"processes/{pid}"))).json()["state"] == "running"
    async with terminal(api, box, f"process={pid}") as socket:
        assert json.loads(await socket.recv())["process_id"] == pid


async def test_refused_terminals_are_problems(api: Api, box: str) -> None:
    other = await stays(api, box)
    cases = [
        ("", 401, "key_missing"),
        ("cols=0", 400, "invalid_request"),
        ("nope=1", 400, "invalid_request"),
        ("env=1", 400, "invalid_request"),
        (f"process={other}", 409, "not_a_pty"),
        (f"process={other}&command=x", 400, "invalid_request"),
        ("process=pr00000000000000000000", 404, "process_not_found"),
    ]
    for query, status, code in cases:
        with pytest.raises(InvalidStatus) as caught:
            async with terminal(api, box, query, key="" if status == 401 else None):
                pass
        answer = caught.value.response
        assert answer.status_code == status, query
        assert json.loads(answer.body or b"{}")["code"] == code
        assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize("frame", ["{", "[]", '{"type":"nope"}', '{"type":"resize","cols":0,"rows":1}'])
async def test_a_wrong_frame_ends_the_socket_and_says_why(api: Api, box: str, frame: str) -> None:
    async with terminal(api, box, "command=stay") as socket:
        await socket.recv()
        await socket.send(frame)
        rest = await until_exit(socket)
        assert rest[-1]["error"]["status"] == 400
        assert socket.close_code == 4000


async def test_a_terminal_of_a_sandbox_that_dies(api: Api, box: str) -> None:
    async with terminal(api, box, "command=stay") as socket:
        await socket.recv()
        await api.http.delete(f"/v1/sandboxes/{box}")
        rest = await until_exit(socket)
        assert rest[-1]["error"]["code"] == "sandbox_killed"
        assert socket.close_code == 4010
