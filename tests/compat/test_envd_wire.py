"""E2B's in-VM API on the wire: what the clients' own code hides from their users."""

import base64
import json
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from skerry import Sandbox
from skerry.api.e2b.gen import process_pb as pb
from skerry.cli.serve import token_key
from skerry.control.live import LiveSandboxes
from skerry.control.tokens import SandboxTokens
from support.server import Server

JSON_STREAM = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}


def token_of(server: Server, sandbox_id: str) -> str:
    live = LiveSandboxes(lambda: None, 1.0)  # type: ignore[arg-type,return-value]
    return SandboxTokens(token_key(server.data_dir / "token-key"), live).access(sandbox_id)


def headers_of(server: Server, sandbox_id: str) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": token_of(server, sandbox_id),
    }


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    with Sandbox.create(timeout=1800, idle_timeout=None, url=server.url, api_key=server.api_key) as sandbox:
        yield sandbox


@pytest.fixture
def http(server: Server, box: Sandbox) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=headers_of(server, box.id), timeout=60) as client:
        yield client


def envelope(message: Any, flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def frames(body: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    held = b""
    for chunk in body:
        held += chunk
        while len(held) >= 5 and len(held) >= 5 + (size := struct.unpack(">I", held[1:5])[0]):
            yield held[0], held[5 : 5 + size]
            held = held[5 + size :]
    assert not held, "the stream ends within a frame"


def command(text: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-c", text]}, **more}


def start(http: httpx.Client, wanted: dict[str, Any], **headers: str) -> Any:
    return http.stream("POST", "/process.Process/Start", content=envelope(wanted), headers={**JSON_STREAM, **headers})


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for flags, data in frames(answer.iter_bytes()):
        yield {"end of stream": json.loads(data)} if flags & 2 else json.loads(data)["event"]


def test_a_start_begins_with_its_pid_and_ends_with_how_it_ended(http: httpx.Client) -> None:
    with start(http, command("printf out; printf err >&2; exit 4"), **{"Content-Encoding": "identity"}) as answer:
        assert answer.headers["content-type"] == "application/connect+json"
        told = list(events(answer))
    assert list(told[0]) == ["start"]
    assert told[0]["start"]["pid"] > 0
    data = {stream: base64.b64decode(text) for event in told[1:-2] for stream, text in event["data"].items()}
    assert data == {"stdout": b"out", "stderr": b"err"}
    end = {"exitCode": 4, "exited": True, "status": "exit status 4", "error": "exit status 4"}
    assert told[-2:] == [{"end": end}, {"end of stream": {}}]


def test_binary_messages_are_answered_in_kind(http: httpx.Client) -> None:
    wanted = pb.StartRequest(process=pb.ProcessConfig(cmd="/bin/echo", args=["hi"]))
    headers = {"Content-Type": "application/connect+proto"}
    with http.stream("POST", "/process.Process/Start", content=envelope(wanted.to_binary()), headers=headers) as answer:
        found = list(frames(answer.iter_bytes()))
    told = [pb.StartResponse.from_binary(data).event for flags, data in found if not flags & 2]
    assert [event.event.field for event in told] == ["start", "data", "end"]
    assert told[1].event.value.output.value == b"hi\n"
    listed = http.post("/process.Process/List", content=b"", headers={"Content-Type": "application/proto"})
    assert listed.status_code == 200
    assert pb.ListResponse.from_binary(listed.content).processes == []


def test_large_output_comes_in_pieces_of_32_kib(http: httpx.Client) -> None:
    with start(http, command("head -c 500000 /dev/zero")) as answer:
        sizes = [len(base64.b64decode(event["data"]["stdout"])) for event in events(answer) if "data" in event]
    assert sum(sizes) == 500_000
    assert max(sizes) <= 32_768


def test_an_idle_stream_says_that_it_lives(http: httpx.Client) -> None:
    with start(http, command("sleep 2.5"), **{"Keepalive-Ping-Interval": "1"}) as answer:
        told = list(events(answer))
    assert {"keepalive": {}} in told
    assert "end" in told[-2]


def test_the_deadline_is_told_in_the_stream_and_ends_the_process(http: httpx.Client) -> None:
    with start(http, command("exec sleep 300"), **{"Connect-Timeout-Ms": "1500"}) as answer:
        told = list(events(answer))
    assert told[-1]["end of stream"]["error"]["code"] == "deadline_exceeded"
    pid = told[0]["start"]["pid"]
    deadline = time.monotonic() + 30
    while any(process["pid"] == pid for process in listed(http)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listed(http: httpx.Client) -> list[dict[str, Any]]:
    return http.post("/process.Process/List", json={}).json().get("processes", [])


def test_a_process_is_found_by_its_tag(http: httpx.Client) -> None:
    with start(http, command("read x; echo $x", tag="mine")) as answer:
        told = events(answer)
        pid = next(told)["start"]["pid"]
        (shown,) = [process for process in listed(http) if process.get("tag") == "mine"]
        assert (shown["pid"], shown["config"]["cmd"]) == (pid, "/bin/bash")
        text = base64.b64encode(b"tagged\n").decode()
        sent = http.post("/process.Process/SendInput", json={"process": {"tag": "mine"}, "input": {"stdin": text}})
        assert (sent.status_code, sent.json()) == (200, {})
        assert base64.b64decode(next(told)["data"]["stdout"]) == b"tagged\n"
    again = http.post("/process.Process/SendSignal", json={"process": {"tag": "none"}, "signal": "SIGNAL_SIGKILL"})
    assert (again.status_code, again.json()) == (
        404,
        {"code": "not_found", "message": "process with tag none not found"},
    )


def test_input_that_is_streamed_is_answered_as_a_stream(http: httpx.Client) -> None:
    with start(http, command("cat")) as answer:
        told = events(answer)
        selector = {"process": {"pid": next(told)["start"]["pid"]}}
        text = base64.b64encode(b"streamed").decode()
        body = [{"start": selector}, {"keepalive": {}}, {"data": {"input": {"stdin": text}}}]
        done = http.post("/process.Process/StreamInput", content=b"".join(map(envelope, body)), headers=JSON_STREAM)
        assert list(frames(iter([done.content]))) == [(0, b"{}"), (2, b"{}")]
        assert base64.b64decode(next(told)["data"]["stdout"]) == b"streamed"
        http.post("/process.Process/CloseStdin", json=selector)
        assert "end" in next(told)


def test_errors_have_connects_form(http: httpx.Client) -> None:
    missing = http.post("/filesystem.Filesystem/Stat", json={"path": "/no/such"})
    assert (missing.status_code, missing.json()) == (
        404,
        {"code": "not_found", "message": "path '/no/such' does not exist"},
    )
    http.post("/filesystem.Filesystem/MakeDir", json={"path": "/tmp/once", "unknownField": 1})
    twice = http.post("/filesystem.Filesystem/MakeDir", json={"path": "/tmp/once"})
    assert (twice.status_code, twice.json()["code"]) == (409, "already_exists")
    basic = {"Authorization": f"Basic {base64.b64encode(b'who:').decode()}"}
    user = http.post("/filesystem.Filesystem/ListDir", json={"path": "/"}, headers=basic)
    assert (user.status_code, user.json()) == (
        401,
        {"code": "unauthenticated", "message": "invalid username: 'who'"},
    )
    assert http.post("/process.Process/List", json={}, headers={"Content-Type": "application/grpc"}).status_code == 415
    assert http.post("/process.Process/NoSuch", json={}).status_code == 404


@pytest.mark.parametrize(
    "message",
    [b"", b"{", b"[]", b'{"process":{"pid":-1}}', b'{"process":7}', b'{"process":{"tag":"\xff"}}', b'{"a":' * 100_000],
    ids=["empty", "cut", "list", "range", "type", "utf8", "deep"],
)
def test_a_message_that_cannot_be_read_is_the_clients_fault(http: httpx.Client, message: bytes) -> None:
    answer = http.post("/process.Process/CloseStdin", content=message, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    with http.stream("POST", "/process.Process/Connect", content=envelope(message), headers=JSON_STREAM) as streamed:
        (flags, end) = next(frames(streamed.iter_bytes()))
    assert (flags & 2, json.loads(end)["error"]["code"]) == (2, "invalid_argument")


def test_nothing_answers_without_the_token_but_health(server: Server, http: httpx.Client, box: Sandbox) -> None:
    for token in (None, "", "0" * 64, token_of(server, "another")):
        headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983"}
        headers |= {} if token is None else {"X-Access-Token": token}
        for method, path in (
            ("POST", "/process.Process/List"), ("POST", "/filesystem.Filesystem/Stat"), ("GET", "/metrics"),
            ("GET", "/envs"), ("GET", "/files?path=/etc/passwd"), ("POST", "/files?path=/tmp/x"),
            ("POST", "/files/compose"), ("POST", "/init"),
        ):  # fmt: skip
            answer = httpx.request(
                method, f"{server.url}{path}", headers=headers, json={} if method == "POST" else None
            )
            assert answer.status_code == 401, (path, token)
            assert answer.json()["code"] == 401
        assert httpx.get(f"{server.url}/health", headers=headers).status_code == 204


def test_internal_calls_are_not_there(http: httpx.Client) -> None:
    for path in ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"):
        assert http.post(path, json={}).status_code == 404


def test_numbers_and_environment(http: httpx.Client) -> None:
    found = http.get("/metrics").json()
    names = {
        "ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib", "mem_used_mib",
        "disk_used", "disk_total",
    }  # fmt: skip
    assert set(found) == names
    assert abs(found["ts"] - time.time()) < 300
    assert 0 < found["mem_used"] < found["mem_total"]
    assert http.get("/envs").json() == {}


# -------------------------------------------------------------------------------------------------------------- files


def test_a_download_in_parts_and_whole(http: httpx.Client) -> None:
    assert http.post("/files?path=/tmp/digits", files={"file": ("ignored", b"0123456789")}).status_code == 200
    whole = http.get("/files?path=/tmp/digits", headers={"Accept-Encoding": "gzip, deflate"})
    assert (whole.content, whole.headers["content-length"]) == (b"0123456789", "10")
    assert "content-encoding" not in whole.headers
    for wanted, text, said in (
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
    ):
        part = http.get("/files?path=/tmp/digits", headers={"Range": wanted})
        assert (part.status_code, part.content, part.headers["content-range"]) == (206, text, said)
    assert http.get("/files?path=/tmp/digits", headers={"Range": "bytes=99-"}).status_code == 416
    packed = http.get("/files?path=/tmp/digits", headers={"Accept-Encoding": "gzip"})
    assert (packed.headers["content-encoding"], packed.content) == ("gzip", b"0123456789")
    refused = http.get("/files?path=/tmp/digits", headers={"Accept-Encoding": "br, identity;q=0"})
    assert (refused.status_code, refused.json()["code"]) == (406, 406)


def test_what_is_wrong_with_an_upload_is_told(http: httpx.Client) -> None:
    plain = {"Content-Type": "application/octet-stream"}
    form = "multipart/form-data"
    for path, headers, body, status, text in (
        ("/files", plain, b"x", 400, "path query parameter is required"),
        ("/files?path=/tmp/x", {"Content-Type": "text/plain"}, b"x", 400, "unsupported content type: text/plain"),
        ("/files?path=/tmp/x", {**plain, "Content-Encoding": "gzip"}, b"not gzip", 400, "decompressing"),
        ("/files?path=/tmp/x", {**plain, "Content-Encoding": "br"}, b"x", 400, "unsupported Content-Encoding: br"),
        ("/files?path=/tmp/x", {**plain, "X-Metadata-k": "\xe9"}, b"x", 400, "printable ASCII"),
        (
            "/files?path=/tmp/x",
            {"Content-Type": "multipart/form-data; boundary=B"},
            b"--B\r\n\r\ncut",
            400,
            "ends early",
        ),
        ("/files?path=/tmp/x", {"Content-Type": form}, b"x", 400, "boundary"),
    ):
        answer = http.post(path, headers={k: v.encode("latin-1") for k, v in headers.items()}, content=body)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (status, status)
        assert text in answer.json()["message"]
    deadline = time.monotonic() + 30
    while http.get("/files?path=/tmp/x").status_code != 404:  # the guest takes it back when the line has ended
        assert time.monotonic() < deadline
    twice = http.post("/files", files=[("file", ("/tmp/twice", b"1")), ("file", ("/tmp/twice", b"2"))])
    assert (twice.status_code, "same path '/tmp/twice'" in twice.json()["message"]) == (400, True)
    assert http.get("/files?path=/tmp/twice").content == b"1"


def test_files_are_composed(http: httpx.Client) -> None:
    for name in "abc":
        http.post(f"/files?path=/tmp/part-{name}", files={"file": (name, name.encode() * 3)})
    wanted = {"source_paths": [f"/tmp/part-{name}" for name in "abc"], "destination": "/tmp/composed/whole"}
    done = http.post("/files/compose", json=wanted)
    assert (done.status_code, done.json()) == (200, {"name": "whole", "path": "/tmp/composed/whole", "type": "file"})
    assert http.get("/files?path=/tmp/composed/whole").content == b"aaabbbccc"
    assert http.get("/files?path=/tmp/part-a").status_code == 404
    gone = http.post("/files/compose", json=wanted)
    assert (gone.status_code, gone.json()["message"]) == (404, "source file not found: /tmp/part-a")


# ------------------------------------------------------------------------------------------------------------ the end


def test_a_sandbox_that_rests_is_not_found_and_one_that_wakes_is(server: Server) -> None:
    client = {"url": server.url, "api_key": server.api_key}
    with Sandbox.create(timeout=600, **client) as resting:
        headers = headers_of(server, resting.id)
        with httpx.stream(
            "POST", f"{server.url}/process.Process/Start", content=envelope(command("sleep 300")),
            headers={**headers, **JSON_STREAM}, timeout=60,
        ) as answer:  # fmt: skip
            told = events(answer)
            assert "start" in next(told)
            pausing = threading.Thread(target=resting.pause)
            pausing.start()
            with pytest.raises(httpx.RemoteProtocolError):
                next(told)
            pausing.join()
        gone = {"sandboxId": resting.id, "message": "The sandbox was not found", "code": 502}
        for path in ("/health", "/files?path=/etc/hostname"):
            answer = httpx.get(f"{server.url}{path}", headers=headers)
            assert (answer.status_code, answer.json()) == (502, gone)
    with Sandbox.create(timeout=600, auto_resume=True, **client) as waking:
        waking.pause()
        answer = httpx.get(f"{server.url}/files?path=/etc/hostname", headers=headers_of(server, waking.id), timeout=60)
        assert answer.status_code == 200


def test_a_kill_cuts_the_stream_and_health_says_why(server: Server) -> None:
    box = Sandbox.create(timeout=600, url=server.url, api_key=server.api_key)
    headers = headers_of(server, box.id)
    with httpx.stream(
        "POST", f"{server.url}/process.Process/Start", content=envelope(command("echo up; sleep 300")),
        headers={**headers, **JSON_STREAM}, timeout=60,
    ) as answer:  # fmt: skip
        told = events(answer)
        assert "start" in next(told)
        assert "data" in next(told)
        box.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(told)
    answer = httpx.get(f"{server.url}/health", headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
    unary = httpx.post(f"{server.url}/process.Process/List", json={}, headers=headers)
    assert (unary.status_code, unary.json()["code"]) == (502, 502)
