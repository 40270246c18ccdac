"""The command line as a program of its own: exit codes, bytes, standard input, signals."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.scripted_server import (
    PROCESS,
    SANDBOX,
    STARTED,
    Answer,
    Exchange,
    ScriptedServer,
    created,
    exited,
    found,
    killed,
    problem,
    streaming,
)

SKERRY = str(Path(sys.executable).parent / "skerry")
BOX = SANDBOX["id"]
ALL_BYTES = bytes(range(256)) * 40


def out(offset: int, data: bytes, stream: str = "stdout") -> dict[str, Any]:
    return {"type": stream, "offset": offset, "data": base64.b64encode(data).decode()}


def environment(server: ScriptedServer | None = None, **more: str) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SKERRY_")}
    return {**own, "HOME": "/nonexistent", **(server.environment if server else {}), **more}


def skerry(
    server: ScriptedServer | None, *arguments: str, stdin: bytes | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [SKERRY, *arguments],
        env=environment(server, **env),
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def exits(*events: dict[str, Any]) -> Iterable[Answer]:
    return (created, streaming(STARTED, *events), killed)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (exited(0), 0),
        (exited(1), 1),
        (exited(137), 137),
        (exited(None, reason="signal", signal="SIGKILL"), 137),
        (exited(None, reason="signal", signal="SIGSEGV"), 139),
        (exited(None, reason="killed", signal="SIGKILL"), 137),
        (exited(None, reason="deadline", signal="SIGKILL"), 124),
        (exited(0, reason="deadline"), 124),
    ],
)
def test_the_commands_end_is_the_programs(ended: dict[str, Any], code: int) -> None:
    with ScriptedServer(*exits(ended)) as server:
        assert skerry(server, "run", "--", "false").returncode == code
        assert [r.method for r in server.requests] == ["POST", "POST", "DELETE"]


def test_bytes_pass_through_unchanged_and_apart() -> None:
    with ScriptedServer(*exits(out(0, ALL_BYTES), out(0, ALL_BYTES[::-1], "stderr"), exited())) as server:
        done = skerry(server, "run", "--", "x")
    assert done.stdout == ALL_BYTES
    assert done.stderr == ALL_BYTES[::-1]


def test_what_run_asks_for() -> None:
    with ScriptedServer(*exits(exited())) as server:
        arguments = ["--template", "t", "--cpu", "2", "--memory", "1024", "--disk", "4096", "--timeout", "30"]
        arguments += ["--env", "A=1=2", "-e", "PASSED", "-m", "job=7", "--user", "root", "--cwd", "/tmp"]
        assert skerry(server, "run", *arguments, "--", "sh", "-c", "echo --json", PASSED="own").returncode == 0
    assert server.requests[0].json() == {
        "template": "t",
        "cpu": 2,
        "memory_mb": 1024,
        "disk_mb": 4096,
        "env": {"A": "1=2", "PASSED": "own"},
        "metadata": {"job": "7"},
        "timeout_ms": 90_000,
    }
    assert server.requests[1].json() == {
        "argv": ["sh", "-c", "echo --json"],
        "timeout_ms": 30_000,
        "user": "root",
        "cwd": "/tmp",
        "stream": True,
    }


@pytest.mark.parametrize(("code", "ended"), [("command_not_found", 127), ("command_not_executable", 126)])
def test_a_command_that_cannot_start_ends_as_in_a_shell(code: str, ended: int) -> None:
    with ScriptedServer(found, problem(400, code)) as server:
        assert skerry(server, "exec", BOX, "--", "nope").returncode == ended


def test_a_kept_sandbox_is_not_killed_and_named() -> None:
    with ScriptedServer(created, streaming(STARTED, exited(4))) as server:
        done = skerry(server, "run", "--keep", "--", "x")
    assert done.returncode == 4
    assert BOX in done.stderr.decode()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem(400, "template_not_found"), 125),
        (problem(401, "key_unknown"), 125),
        (problem(429, "limit_exceeded"), 125),
        (problem(502, "outcome_unknown", retry="unknown"), 122),
        (problem(500, "internal_error"), 125),
    ],
)
def test_errors_have_codes_of_their_own(answer: Answer, code: int) -> None:
    with ScriptedServer(answer, answer) as server:
        plain = skerry(server, "run", "--", "x")
        as_json = skerry(server, "run", "--json", "--", "x")
    assert (plain.returncode, as_json.returncode) == (code, code)
    assert plain.stderr.startswith(b"skerry: ")
    assert b"Traceback" not in plain.stderr
    document = json.loads(as_json.stderr)
    assert document["code"] in {
        "template_not_found",
        "key_unknown",
        "limit_exceeded",
        "outcome_unknown",
        "internal_error",
    }
    assert as_json.stdout == b""


def test_no_server_and_no_address() -> None:
    assert skerry(None, "ls", SKERRY_API_URL="http://127.0.0.1:1", SKERRY_API_KEY="k").returncode == 123
    unknown = skerry(None, "ls", SKERRY_CLIENT_FILE="/nonexistent/client.json")
    # A server of this machine may have left its file; without one, the message tells all that was tried.
    if not Path("/run/skerry/client.json").exists():
        assert unknown.returncode == 125
        assert b"/nonexistent/client.json (is not there)" in unknown.stderr


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["run"], ["run", "--cpu", "x", "--", "y"], ["ls", "--nope"], ["exec", BOX], ["exec", BOX, "-Z", "x"]],
)
def test_wrong_usage(arguments: list[str]) -> None:
    plain = skerry(None, *arguments)
    assert plain.returncode == 2
    assert b"Traceback" not in plain.stderr
    as_json = skerry(None, arguments[0], "--json", *arguments[1:])
    assert as_json.returncode == 2
    assert json.loads(as_json.stderr)["code"] == "usage"


def test_events_as_json() -> None:
    with ScriptedServer(*exits(out(0, b"a\xff"), exited(3))) as server:
        done = skerry(server, "run", "--json", "--", "x")
    assert done.returncode == 3
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["started", "stdout", "exit"]
    assert base64.b64decode(lines[1]["data"]) == b"a\xff"
    assert lines[1]["text"] == "a�"
    assert lines[2]["exit_code"] == 3


def test_a_line_that_breaks_is_taken_up_again() -> None:
    def cut(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        exchange.event(**out(0, b"one "))
        exchange.close()

    rest = streaming(STARTED, out(4, b"two"), exited(6))
    with ScriptedServer(created, cut, lambda e: e.reply(200, PROCESS), rest, killed) as server:
        done = skerry(server, "run", "--", "x")
    assert (done.stdout, done.returncode) == (b"one two", 6)
    assert "stdout_offset=4" in server.requests[3].target


def test_a_line_that_cannot_be_taken_up_is_an_unknown_outcome() -> None:
    with ScriptedServer(created, Exchange.reset, killed) as server:
        assert skerry(server, "run", "--", "x").returncode == 122


def test_lost_bytes_are_told() -> None:
    gap = {"type": "gap", "stream": "stdout", "offset": 0, "missed": 99}
    with ScriptedServer(*exits(gap, exited())) as server:
        assert b"99 bytes of stdout are lost" in skerry(server, "run", "--", "x").stderr


# ------------------------------------------------------------------------------------------------------ standard input


def started(exchange: Exchange) -> None:
    exchange.reply(201, PROCESS)


def test_standard_input_is_the_callers_unless_it_is_asked_for() -> None:
    """while read l; do skerry exec …; done sees every line."""
    with ScriptedServer(found, streaming(STARTED, exited()), found, streaming(STARTED, exited())) as server:
        script = f'while read -r l; do "{SKERRY}" exec {BOX} -- echo "$l"; done'
        subprocess.run(
            ["sh", "-c", script], input=b"1\n2\n", env=environment(server), timeout=60, check=True, capture_output=True
        )
    bodies = [r.json() for r in server.requests if r.method == "POST"]
    assert [b["argv"] for b in bodies] == [["echo", "1"], ["echo", "2"]]
    assert not any("stdin" in b for b in bodies)


def test_standard_input_is_passed_on_and_closed() -> None:
    closed = threading.Event()

    def take(exchange: Exchange) -> None:
        exchange.reply(200, {"written": len(exchange.body)})

    def close(exchange: Exchange) -> None:
        assert (exchange.method, exchange.target.endswith("/stdin")) == ("DELETE", True)
        exchange.reply(204)
        closed.set()

    def output(exchange: Exchange) -> None:
        server.then(take, close)
        exchange.stream()
        exchange.event(**STARTED)
        assert closed.wait(20)
        exchange.event(**exited(9))
        exchange.end()

    with ScriptedServer(found, started) as server:
        server.then(output)
        process = subprocess.Popen(
            [SKERRY, "exec", "-i", BOX, "--", "cat"], stdin=subprocess.PIPE, env=environment(server)
        )
        assert process.stdin
        while len(server.requests) < 3:  # the order of the script: first the output is asked for, then we type
            time.sleep(0.01)
        process.communicate(ALL_BYTES[:1000], timeout=60)
    assert process.returncode == 9
    assert [r.body for r in server.requests if r.method == "POST"][1] == ALL_BYTES[:1000]
    assert next(r for r in server.requests if r.method == "POST").json()["stdin"] is True


def test_the_programs_end_does_not_wait_for_its_input_to_end() -> None:
    with ScriptedServer(found, started, streaming(STARTED, out(0, b"hi\n"), exited(3))) as server:
        ours, theirs = os.pipe()
        try:
            done = subprocess.run(
                [SKERRY, "exec", "-i", BOX, "--", "echo", "hi"],
                stdin=ours,
                env=environment(server),
                capture_output=True,
                timeout=30,
                check=False,
            )
        finally:
            os.close(ours)
            os.close(theirs)
    assert (done.stdout, done.returncode) == (b"hi\n", 3)


# ------------------------------------------------------------------------------------------------------------- signals


def endless(ready: threading.Event) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        exchange.event(**out(0, b"ready\n"))
        ready.set()
        exchange.connection.recv(1)  # until the client hangs up
        exchange.after = False

    return answer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_kills_the_command_and_the_sandbox(number: signal.Signals, code: int) -> None:
    ready = threading.Event()
    gone = lambda e: e.reply(200, {"killed": True})  # noqa: E731
    with ScriptedServer(created, endless(ready), gone, killed) as server:
        process = subprocess.Popen(
            [SKERRY, "run", "--", "sleep", "99"],
            env=environment(server),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert [r.target for r in server.requests if r.method == "DELETE"] == [
        f"/v1/sandboxes/{BOX}/processes/{PROCESS['process_id']}",
        f"/v1/sandboxes/{BOX}",
    ]


def test_a_signal_while_the_sandbox_is_made_kills_it() -> None:
    asked = threading.Event()

    def slow(exchange: Exchange) -> None:
        asked.set()
        exchange.connection.recv(1)
        exchange.after = False

    with ScriptedServer(slow, created, killed) as server:
        process = subprocess.Popen([SKERRY, "run", "--", "x"], env=environment(server), stderr=subprocess.PIPE)
        assert asked.wait(30)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert len({r.headers["idempotency-key"] for r in server.requests[:2]}) == 1


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    go = threading.Event()

    def flood(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event(**STARTED)
        exchange.event(**out(0, b"first\n"))
        assert go.wait(30)
        exchange.event(**out(6, b"second\n"))
        exchange.connection.recv(1)
        exchange.after = False

    with ScriptedServer(found, flood, lambda e: e.reply(200, {"killed": True})) as server:
        process = subprocess.Popen(
            [SKERRY, "exec", BOX, "--", "yes"], env=environment(server), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        go.set()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""
        process.stderr.close()
    assert server.requests[-1].target.endswith(PROCESS["process_id"])


# ---------------------------------------------------------------------------------------------------------- the others


def page(*boxes: dict[str, Any]) -> Answer:
    return lambda e: e.reply(200, {"items": list(boxes), "next_cursor": None})


def test_lists_for_people_and_programs() -> None:
    box = {**SANDBOX, "metadata": {"note": "red \x1b[31m"}}
    with ScriptedServer(page(box), page(box), page()) as server:
        table = skerry(server, "ls")
        document = skerry(server, "ls", "--json", "--all")
        empty = skerry(server, "ls", "--json")
    assert BOX in table.stdout.decode()
    assert b"\x1b" not in table.stdout, "neither colours nor what a guest's name would do to a terminal"
    assert json.loads(document.stdout)[0]["id"] == BOX
    assert json.loads(empty.stdout) == []
    assert "state=running" in server.requests[0].target
    assert "state" not in server.requests[1].target


def test_create_prints_the_id() -> None:
    with ScriptedServer(created, created) as server:
        assert skerry(server, "create", "--timeout", "60", "--idle-timeout", "0").stdout.decode() == f"{BOX}\n"
        assert json.loads(skerry(server, "create", "--json").stdout)["id"] == BOX
    assert server.requests[0].json() == {"template": "base", "timeout_ms": 60_000, "idle_timeout_ms": None}


METRICS = {"at_ms": 0, "uptime_s": 1.5, "cpu_count": 1, "cpu_used_pct": 2.5, "load_1m": 0.1}
METRICS |= {f"{kind}_bytes": 1 for kind in ("memory_total", "memory_used", "memory_cache", "disk_total", "disk_used")}
METRICS |= {"processes": 3}


def test_info_and_processes() -> None:
    with ScriptedServer(
        found,
        lambda e: e.reply(200, METRICS),
        found,
        lambda e: e.reply(200, METRICS),
        found,
        page(PROCESS),
        found,
        page(),
    ) as server:
        assert b"cpu_used_pct" in skerry(server, "info", BOX).stdout
        assert json.loads(skerry(server, "info", "--json", BOX).stdout)["metrics"]["uptime_s"] == 1.5
        assert PROCESS["process_id"] in skerry(server, "ps", BOX).stdout.decode()
        assert json.loads(skerry(server, "ps", "--json", BOX).stdout) == []


def test_logs() -> None:
    event = {"id": "ev1", "at": "2026-01-01T00:00:00Z", "action": "sandbox.created", "actor": "k", "outcome": "ok"}
    event |= {"detail": {"a": 1}}
    over = lambda e: e.reply(200, {**SANDBOX, "state": "killed"})  # noqa: E731
    with ScriptedServer(
        found, found, page(event), found, found, page(event), found, lambda e: e.reply(200, {"console": "a\x1b[2Jb\n"}),
        found, found, page(event), over, page(event, {**event, "id": "ev2", "action": "sandbox.killed"}),
    ) as server:  # fmt: skip
        assert b"sandbox.created  ok  k  a=1" in skerry(server, "logs", BOX).stdout
        assert json.loads(skerry(server, "logs", "--json", BOX).stdout) == event
        assert skerry(server, "logs", "--console", BOX).stdout == b"a\\x1b[2Jb\n"
        followed = skerry(server, "logs", "-f", BOX).stdout.splitlines()
    assert [re.split(rb"  ", line)[1] for line in followed] == [b"sandbox.created", b"sandbox.killed"]


def test_kill() -> None:
    with ScriptedServer(found, killed, problem(404, "sandbox_not_found")) as server:
        done = skerry(server, "kill", BOX, "sbnone")
    assert (done.returncode, done.stdout.decode()) == (1, f"{BOX}\n")
    with ScriptedServer(page(SANDBOX), found, killed) as server:
        assert json.loads(skerry(server, "kill", "--all", "--json").stdout)[0]["state"] == "killed"
    assert skerry(None, "kill", SKERRY_API_URL="http://127.0.0.1:1", SKERRY_API_KEY="k").returncode == 125


def test_keys() -> None:
    key = {"id": "key1", "name": "n", "prefix": "skerryabc", "scopes": ["admin"], "created_at": "2026-01-01T00:00:00Z"}
    key |= {"last_used_at": None, "revoked_at": None}
    with ScriptedServer(
        lambda e: e.reply(201, {**key, "secret": "skerrysecret"}),
        lambda e: e.reply(201, {**key, "secret": "skerrysecret"}),
        page(key),
        page(key),
        lambda e: e.reply(200, key),
    ) as server:
        shown = json.loads(skerry(server, "key", "create", "n", "--scope", "admin", "--json").stdout)
        assert (shown["secret"], shown["e2b_secret"]) == ("skerrysecret", "e2b_736b65727279736563726574")
        made = skerry(server, "key", "create", "n", "--scope", "admin")
        assert made.stdout == b"skerrysecret\n"
        assert b"secret" not in made.stderr
        assert b"skerryabc" in skerry(server, "key", "ls").stdout
        assert json.loads(skerry(server, "key", "ls", "--json").stdout)[0]["scopes"] == ["admin"]
        assert skerry(server, "key", "revoke", "key1").returncode == 0
    assert server.requests[0].json() == {"name": "n", "scopes": ["admin"]}


def test_the_environment_for_e2bs_clients() -> None:
    where = {"SKERRY_API_URL": "http://127.0.0.1:1/", "SKERRY_API_KEY": "skerrysecret"}
    expected = {
        "E2B_API_URL": "http://127.0.0.1:1",
        "E2B_SANDBOX_URL": "http://127.0.0.1:1",
        "E2B_API_KEY": "e2b_736b65727279736563726574",
    }
    told = skerry(None, "e2b-env", **where)
    assert told.stdout.decode() == "".join(f"export {name}={value}\n" for name, value in expected.items())
    assert json.loads(skerry(None, "e2b-env", "--json", **where).stdout) == expected
    again = {**where, "SKERRY_API_KEY": expected["E2B_API_KEY"]}
    assert json.loads(skerry(None, "e2b-env", "--json", **again).stdout) == expected


def test_copies_need_exactly_one_sandbox(tmp_path: Path) -> None:
    for source, target in ((str(tmp_path), "/x"), (f"{BOX}:/a", f"{BOX}:/b")):
        assert (
            skerry(None, "cp", source, target, SKERRY_API_URL="http://127.0.0.1:1", SKERRY_API_KEY="k").returncode
            == 125
        )


def test_a_copy_into_a_directory_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(ALL_BYTES)
    entry = {"path": "/d", "name": "d", "kind": "directory", "size": 0, "mode": "0755", "uid": 1, "gid": 2}
    entry |= {"owner": "u", "group": "g", "mtime_ns": 5}
    with ScriptedServer(found, lambda e: e.reply(200, entry), lambda e: e.reply(200, entry)) as server:
        assert skerry(server, "cp", str(tmp_path / "a.txt"), f"{BOX}:/d").returncode == 0
    assert server.requests[-1].body == ALL_BYTES
    assert "path=/d/a.txt" in server.requests[-1].target


def test_the_version_and_the_help_of_every_command() -> None:
    assert skerry(None, "--version").stdout.startswith(b"skerry ")
    for command in ("run", "exec", "shell", "cp", "create", "ls", "info", "ps", "logs", "kill", "doctor", "key"):
        shown = skerry(None, command, "--help")
        assert shown.returncode == 0
        assert b"Usage: skerry" in shown.stdout


def test_a_shell_needs_a_terminal() -> None:
    done = skerry(None, "shell", BOX, SKERRY_API_URL="http://127.0.0.1:1", SKERRY_API_KEY="k")
    assert done.returncode == 125
    assert b"exec -i" in done.stderr
