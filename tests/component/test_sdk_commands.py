"""Streams of commands: whole, cut, reset, slow, silent. The same for both clients, over real sockets."""

import asyncio
import base64
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry import (
    AsyncSandbox,
    CommandDeadline,
    CommandFailed,
    CommandResult,
    Conflict,
    Gone,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    Sandbox,
)
from skerry.sdk import Exited, Gap, Output, Started
from support.scripted_server import (
    PROCESS,
    SANDBOX,
    STARTED,
    Answer,
    Exchange,
    ScriptedServer,
    exited,
    problem,
    streaming,
)
from support.scripted_server import found as connected

KEY = "skerrytest"
PROCESS_ID = PROCESS["process_id"]


def out(offset: int, data: bytes, stream: str = "stdout") -> dict[str, Any]:
    return {"type": stream, "offset": offset, "data": base64.b64encode(data).decode()}


def box(server: ScriptedServer) -> Sandbox:
    return Sandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY)


def run_blocking(server: ScriptedServer, command: Any, **options: Any) -> CommandResult:
    with box(server) as sandbox:
        return sandbox.run(command, **options)


def run_async(server: ScriptedServer, command: Any, **options: Any) -> CommandResult:
    async def run() -> CommandResult:
        async with AsyncSandbox.connect(SANDBOX["id"], url=server.url, api_key=KEY) as sandbox:
            return await sandbox.run(command, **options)

    return asyncio.run(run())


both = pytest.mark.parametrize("run", [run_blocking, run_async])
Run = Callable[..., CommandResult]


@both
def test_a_command_and_its_result(run: Run) -> None:
    seen: list[str] = []
    errors: list[str] = []
    with ScriptedServer(
        connected,
        streaming(STARTED, out(0, b"a\n"), {"type": "keepalive"}, out(0, b"e", "stderr"), out(2, b"b\xff"), exited(7)),
    ) as server:
        result = run(
            server,
            "x",
            cwd="/tmp",
            env={"A": "1"},
            user=1000,
            stdin="in",
            on_stdout=seen.append,
            on_stderr=errors.append,
        )
    assert (result.stdout, result.stderr, result.stdout_bytes) == ("a\nb�", "e", b"a\nb\xff")
    assert (result.exit_code, result.signal, result.reason, result.duration) == (7, None, "exit", 0.012)
    assert (result.process_id, result.pid, result.ok) == (PROCESS_ID, 412, False)
    assert ("".join(seen), errors) == ("a\nb�", ["e"])
    assert server.requests[1].json() == {
        "command": "x",
        "cwd": "/tmp",
        "env": {"A": "1"},
        "user": "1000",
        "timeout_ms": 55000,
        "stdin": "aW4=",
        "stream": True,
    }


@both
def test_arguments_and_no_deadline(run: Run) -> None:
    with ScriptedServer(connected, streaming(STARTED, exited())) as server:
        run(server, ["printf", "%s", "\udcff"], timeout=None)
    assert server.requests[1].json() == {"argv": ["printf", "%s", "\udcff"], "timeout_ms": None, "stream": True}


@both
@pytest.mark.parametrize("ending", ["end", "close", "reset"])
@pytest.mark.parametrize("cut", [b"", b'{"type": "ex', b'{"type":"exit","reason":"exit","exit_code":0,"signal":null'])
def test_a_stream_without_an_exit_is_an_unknown_outcome(run: Run, ending: str, cut: bytes) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        exchange.event(**out(0, b"four"))
        if cut:
            exchange.chunk(cut)
        getattr(exchange, ending)()

    with ScriptedServer(connected, answer) as server, pytest.raises(OutcomeUnknown) as caught:
        run(server, "x")
    context = caught.value.context
    # A reset may throw away what was on its way: the offset says what was received.
    assert context["process_id"] == PROCESS_ID or ending == "reset"
    assert context.get("stdout_offset") in {4, 0, None} if ending == "reset" else context["stdout_offset"] == 4
    assert context["sandbox_id"] == SANDBOX["id"]
    assert caught.value.retry == "unknown"


@both
def test_a_deadline_is_an_error_that_holds_what_was_printed(run: Run) -> None:
    stream = streaming(STARTED, out(0, b"half"), exited(None, reason="deadline", signal="SIGKILL"))
    with ScriptedServer(connected, stream) as server, pytest.raises(CommandDeadline) as caught:
        run(server, "x")
    assert caught.value.code == "command_deadline"
    assert (caught.value.result.stdout, caught.value.result.code) == ("half", 137)
    assert caught.value.context == {"sandbox_id": SANDBOX["id"], "process_id": PROCESS_ID}


@both
def test_signals_and_kills_are_results(run: Run) -> None:
    for reason in ("signal", "killed"):
        stream = streaming(STARTED, exited(None, reason=reason, signal="SIGTERM"))
        with ScriptedServer(connected, stream) as server:
            result = run(server, "x")
        assert (result.reason, result.exit_code, result.signal, result.code) == (reason, None, "SIGTERM", 143)
        assert not result.ok


@both
def test_check_raises_with_the_result(run: Run) -> None:
    stream = streaming(STARTED, out(0, b"why", "stderr"), exited(3))
    with ScriptedServer(connected, stream) as server, pytest.raises(CommandFailed, match=r"exit code 3: why") as caught:
        run(server, "x", check=True)
    assert caught.value.result.exit_code == 3
    with ScriptedServer(connected, streaming(STARTED, exited())) as server:
        assert run(server, "x", check=True).ok


@both
def test_a_sandbox_that_ends_meanwhile_says_so(run: Run) -> None:
    error = {"status": 410, "code": "sandbox_killed", "detail": "was killed", "retry": "never", "context": {}}
    stream = streaming(STARTED, {"type": "error", "error": error})
    with ScriptedServer(connected, stream) as server, pytest.raises(Gone) as caught:
        run(server, "x")
    assert caught.value.code == "sandbox_killed"
    assert caught.value.context["process_id"] == PROCESS_ID


@both
def test_a_command_that_cannot_start_is_a_refusal(run: Run) -> None:
    with ScriptedServer(connected, problem(400, "cwd_not_found")) as server, pytest.raises(InvalidRequest) as caught:
        run(server, "x")
    assert caught.value.code == "cwd_not_found"


@both
def test_output_is_capped_and_callbacks_get_all(run: Run) -> None:
    seen: list[str] = []
    stream = streaming(STARTED, out(0, b"x" * 10), out(10, b"y" * 10), out(0, b"e", "stderr"), exited())
    with ScriptedServer(connected, stream) as server:
        result = run(server, "x", max_output=12, on_stdout=seen.append)
    assert result.stdout == "x" * 10 + "yy"
    assert (result.stdout_truncated, result.stderr_truncated) == (True, False)
    assert "".join(seen) == "x" * 10 + "y" * 10


@both
def test_an_error_of_a_callback_is_the_callers_and_closes_the_stream(run: Run) -> None:
    def fail(_text: str) -> None:
        raise ZeroDivisionError

    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        exchange.event(**out(0, b"x"))
        assert exchange.connection.recv(1) == b"", "the client closes the connection"
        exchange.after = False

    with ScriptedServer(connected, answer) as server, pytest.raises(ZeroDivisionError):
        run(server, "x", on_stdout=fail)


@both
def test_nonsense_in_a_stream_is_an_error_not_a_result(run: Run) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.chunk(b"<html>\n")
        exchange.end()

    with ScriptedServer(connected, answer) as server, pytest.raises(InternalError) as caught:
        run(server, "x")
    assert caught.value.code == "bad_answer"


@both
def test_a_run_is_not_sent_twice_when_its_answer_is_lost(run: Run) -> None:
    with ScriptedServer(connected, Exchange.reset) as server:
        with pytest.raises(OutcomeUnknown):
            run(server, "x")
        assert len(server.requests) == 2


def test_output_of_an_exit_in_the_same_packet_as_the_close_is_not_lost() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.chunk(b"".join(_line(e) for e in (STARTED, out(0, b"last"), exited(5))))
        exchange.close()  # no end of the chunked body: the exit was there, and that is what counts

    with ScriptedServer(connected, answer) as server:
        result = run_blocking(server, "x")
    assert (result.stdout, result.exit_code) == ("last", 5)


def _line(event: dict[str, Any]) -> bytes:
    import json

    return json.dumps(event).encode() + b"\n"


TEXT = "aé≤😀\n\x00z" * 3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12), st.lists(st.integers(1, 400), max_size=12))
def test_text_is_the_same_however_output_and_stream_are_cut(data_cuts: list[int], wire_cuts: list[int]) -> None:
    data = TEXT.encode() + b"\xff\xe2\x89"
    edges = [0, *sorted({c for c in data_cuts if c < len(data)}), len(data)]
    events = [out(a, data[a:b]) for a, b in itertools.pairwise(edges)]
    wire = b"".join(_line(e) for e in (STARTED, *events, exited()))
    places = [0, *sorted({c for c in wire_cuts if c < len(wire)}), len(wire)]

    def answer(exchange: Exchange) -> None:
        exchange.stream()
        for a, b in itertools.pairwise(places):
            exchange.chunk(wire[a:b])
        exchange.end()

    seen: list[str] = []
    with ScriptedServer(connected, answer) as server:
        result = run_blocking(server, "x", on_stdout=seen.append)
    assert result.stdout_bytes == data
    assert result.stdout == "".join(seen) == data.decode("utf-8", "replace")


def test_an_asynchronous_callback_is_awaited_and_refused_by_the_blocking_client() -> None:
    seen: list[str] = []

    async def take(text: str) -> None:
        await asyncio.sleep(0)
        seen.append(text)

    stream = streaming(STARTED, out(0, b"x"), exited())
    with ScriptedServer(connected, stream) as server:
        run_async(server, "x", on_stdout=take)
    assert seen == ["x"]
    with ScriptedServer(connected, stream) as server, pytest.raises(InvalidRequest) as caught:
        run_blocking(server, "x", on_stdout=take)
    assert caught.value.code == "needs_async"


# ------------------------------------------------------------------------------------------------------ in background


def started(exchange: Exchange) -> None:
    exchange.reply(201, PROCESS)


def test_start_and_wait() -> None:
    stream = streaming(STARTED, out(0, b"a"), out(1, b"b"), exited(5))
    with ScriptedServer(connected, started, stream) as server:
        process = box(server).commands.start("x", stdin=True, tag="t", pty=(80, 24))
        assert (process.process_id, process.pid, process.result) == (PROCESS_ID, 412, None)
        result = process.wait()
        assert process.wait() == result, "a second wait asks nobody"
    assert (result.stdout, result.exit_code, process.stdout, process.result) == ("ab", 5, "ab", result)
    assert server.requests[1].json() == {
        "command": "x",
        "timeout_ms": None,
        "stdin": True,
        "tag": "t",
        "pty": {"cols": 80, "rows": 24},
    }


def test_a_broken_stream_is_taken_up_where_it_broke() -> None:
    def cut(*events: dict[str, Any]) -> Answer:
        def answer(exchange: Exchange) -> None:
            exchange.stream()
            exchange.event(**STARTED)
            for event in events:
                exchange.event(**event)
            exchange.close()

        return answer

    stopping = {"status": 503, "code": "server_stopping", "retry": "unknown", "detail": "bye"}
    with ScriptedServer(
        connected,
        started,
        cut(out(0, b"one\xe2"), out(0, b"E", "stderr")),
        Exchange.close,
        streaming(STARTED, out(4, b"\x89"), {"type": "error", "error": stopping}),
        streaming(STARTED, out(5, b"\xa4 two"), exited(3)),
    ) as server:
        process = box(server).commands.start("x")
        events = list(process)
    assert "".join(event.text for event in events if event.text != "E") == "one≤ two"
    assert isinstance(events[-1], Exited)
    assert (process.stdout_bytes, process.stderr) == ("one≤ two".encode(), "E")
    offsets = [request.target.partition("?")[2] for request in server.requests[2:]]
    assert offsets == [
        "stdout_offset=0&stderr_offset=0",
        "stdout_offset=4&stderr_offset=1",
        "stdout_offset=4&stderr_offset=1",
        "stdout_offset=5&stderr_offset=1",
    ]


def test_a_stream_that_stays_broken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.sdk.process.REATTACH_BACKOFF", 0.001)
    with ScriptedServer(connected, started, *[streaming(STARTED)] * 7) as server:
        process = box(server).commands.start("x")
        with pytest.raises(OutcomeUnknown) as caught:
            process.wait()
    assert caught.value.context["process_id"] == PROCESS_ID


def test_a_process_whose_sandbox_is_over() -> None:
    with ScriptedServer(connected, started, problem(410, "sandbox_expired")) as server:
        process = box(server).commands.start("x")
        with pytest.raises(Gone):
            process.wait()


def test_poll_tells_what_is_there() -> None:
    with ScriptedServer(
        connected,
        started,
        streaming(STARTED, out(0, b"a"), {"type": "end"}),
        streaming(STARTED, out(1, b"b"), exited()),
    ) as server:
        process = box(server).commands.start("x")
        assert process.poll() is None
        assert process.stdout == "a"
        result = process.poll()
    assert result is not None
    assert result.stdout == "ab"
    assert server.requests[2].target.endswith("follow=false")


def test_attach_goes_on_from_an_offset_and_marks_what_it_did_not_see() -> None:
    with ScriptedServer(
        connected,
        lambda e: e.reply(200, PROCESS),
        streaming(STARTED, out(10, b"x"), {"type": "gap", "stream": "stdout", "offset": 11, "missed": 4}, exited()),
    ) as server:
        process = box(server).commands.attach(412, stdout_offset=10)
        events = list(process)
    assert events[:2] == [Output("stdout", 10, b"x", "x"), Gap("stdout", 11, 4)]
    assert process.result is not None
    assert process.result.stdout_truncated
    assert server.requests[1].target.endswith("/processes/412")
    assert "stdout_offset=10" in server.requests[2].target


def test_stdin_signals_and_kill() -> None:
    with ScriptedServer(
        connected,
        started,
        lambda e: e.reply(200, {"written": len(e.body)}),
        lambda e: e.reply(200, {"written": len(e.body)}),
        lambda e: e.reply(204),
        lambda e: e.reply(204),
        lambda e: e.reply(204),
        lambda e: e.reply(200, {"killed": True}),
        problem(409, "process_exited"),
        lambda e: e.reply(200, {"killed": False}),
        problem(404, "process_not_found"),
    ) as server:
        sandbox = box(server)
        process = sandbox.commands.start("x", stdin=True)
        assert process.send_stdin("é") == 2
        assert process.send_stdin(b"x" for _ in range(3)) == 3
        process.close_stdin()
        process.signal(2)
        process.resize(80, 24)
        assert process.kill() is True
        with pytest.raises(Conflict):
            process.send_stdin("x")
        assert process.kill() is False
        assert sandbox.commands.kill("pr-none") is False
    assert [r.body for r in server.requests[2:4]] == ["é".encode(), b"xxx"]
    assert server.requests[5].json() == {"signal": "2"}


def test_stream_gives_events_and_the_deadline_as_one() -> None:
    stream = streaming(STARTED, out(0, b"x"), exited(None, reason="deadline", signal="SIGKILL"))
    with ScriptedServer(connected, stream) as server, box(server).commands.stream("x", timeout=5) as events:
        found = list(events)
    assert found[:2] == [Started(PROCESS_ID, 412), Output("stdout", 0, b"x", "x")]
    assert isinstance(found[2], Exited)
    assert found[2].exit.reason == "deadline"


def test_a_stream_that_is_left_closes_its_connection() -> None:
    closed = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        assert exchange.connection.recv(1) == b""
        closed.set()
        exchange.after = False

    with ScriptedServer(connected, answer) as server, box(server) as sandbox:
        with sandbox.commands.stream("x") as events:
            assert next(events) == Started(PROCESS_ID, 412)
        assert closed.wait(10)


def test_silence_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.sdk.commands.STREAM_READ_TIMEOUT", 0.2)
    release = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        release.wait(10)
        exchange.close()

    with ScriptedServer(connected, answer) as server:
        with pytest.raises(OutcomeUnknown) as caught:
            box(server).run("x")
        release.set()
    assert caught.value.context["process_id"] == PROCESS_ID


# --------------------------------------------------------------------------------------------------------------- watch


def test_a_watch_is_armed_when_it_is_returned() -> None:
    event = {"type": "create", "path": "f", "is_dir": False, "cookie": 0, "offset": 0}
    overflow = {"status": 409, "code": "watch_overflow", "detail": "list again", "retry": "never"}
    with ScriptedServer(
        connected,
        streaming({"type": "watching"}, {"type": "keepalive"}, event, {"type": "error", "error": overflow}),
        streaming(event),
    ) as server:
        sandbox = box(server)
        with sandbox.watch("/d", recursive=True) as watch:
            assert next(watch).path == "f"
            with pytest.raises(Conflict) as caught:
                next(watch)
        assert caught.value.code == "watch_overflow"
        with pytest.raises(InternalError):
            sandbox.files.watch("/d")
    assert server.requests[1].target.endswith("/files/watch?path=/d&recursive=true")
    assert len(server.requests) == 3  # what is over is not ended again


def test_a_watch_that_breaks_is_taken_up_where_it_broke_and_ended_at_the_end() -> None:
    begun = {"type": "watching", "watch_id": "wt1", "offset": 0}
    events = [{"type": "create", "path": f"f{n}", "is_dir": False, "cookie": 0, "offset": n} for n in range(4)]
    stopping = {"status": 503, "code": "stopping", "detail": "the server is stopping", "retry": "unknown"}
    with (
        ScriptedServer(
            connected,
            streaming(begun, *events[:2]),
            streaming(begun, {"type": "error", "error": stopping}),
            streaming(begun, events[2]),
            streaming(begun, events[2]),
            streaming(begun),
        ) as server,
        box(server).watch("/d") as watch,
    ):
        assert [next(watch).path for _ in range(3)] == ["f0", "f1", "f2"]
        with pytest.raises(InternalError):  # it is told again of what it has
            next(watch)
    targets = [(r.method, r.target.partition("watch?")[2]) for r in server.requests[1:]]
    attached = [("GET", f"watch_id=wt1&offset={n}") for n in (2, 2, 3)]
    assert targets == [("GET", "path=/d&recursive=false"), *attached]
