"""Background, signals, deadlines, stdin, broken lines. Cases BUG-06 to BUG-14, BUG-40."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from skerry import CommandDeadline, CommandResult, OutcomeUnknown, Sandbox, SkerryError
from support.server import Server
from support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def too_long(client: dict[str, str]) -> Iterator[Future[CommandResult]]:
    """A command without a deadline of its own, longer than the default; it runs while the other tests do."""
    with Sandbox.create(memory_mb=256, **client) as sandbox, ThreadPoolExecutor(1) as pool:
        yield pool.submit(sandbox.run, "sleep 600")


def running(sandbox: Sandbox, pattern: str) -> int:
    """How many processes of the guest match, this look-up's own left out."""
    return int(sandbox.run(["pgrep", "-fc", pattern]).stdout)


# ------------------------------------------------------------------------------------------------ deadlines (BUG-06)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("echo before; (while :; do date >> /tmp/beat; sleep 0.2; done) & sleep 612", "before\n"),
        ("trap '' TERM; echo stubborn; sleep 612; sleep 612", "stubborn\n"),
        ("python3 -c 'import os,time; os.fork() and os.fork(); time.sleep(612)'", ""),
        ("setsid sleep 612 & setsid -f sleep 612; echo daemons; sleep 612", "daemons\n"),
    ],
)
def test_a_deadline_stops_the_whole_tree_and_keeps_what_was_printed(
    sandbox: Sandbox, command: str, printed: str
) -> None:
    seen: list[str] = []
    with pytest.raises(CommandDeadline) as ended:
        sandbox.run(command, timeout=3, on_stdout=seen.append)
    assert ended.value.result.stdout == printed == "".join(seen)
    assert ended.value.result.reason == "deadline"
    assert 3 <= ended.value.result.duration < 60
    assert running(sandbox, "[s]leep 612|[s]leep\\(612|/tmp/[b]eat") == 0
    sizes = sandbox.run("wc -c < /tmp/beat; sleep 0.6; wc -c < /tmp/beat").stdout.split()
    assert len(set(sizes)) <= 1


def test_no_deadline_when_asked(sandbox: Sandbox) -> None:
    assert sandbox.run("sleep 2; echo done", timeout=0).stdout == "done\n"


# ------------------------------------------------------------------------------------ children that stay (BUG-07, -12)


def test_a_child_that_keeps_the_pipe_does_not_hold_the_call_and_lives_on(sandbox: Sandbox) -> None:
    for command, line in (
        ("sleep 371 & echo started", "started"),
        ("python3 -m http.server 8123 & sleep 1; echo up", "up"),
        ("nohup sh -c 'while :; do echo noise; sleep 0.1; done' & disown; echo done", "done"),
        ("(setsid sleep 371 >/dev/null 2>&1 &) ; echo detached", "detached"),
    ):
        result = sandbox.run(command, timeout=40)
        assert line in result.stdout.splitlines(), command
        assert (result.exit_code, result.reason) == (0, "exit"), command
    time.sleep(1)
    assert running(sandbox, "^sleep 371") == 2
    curl = "curl -s -o /dev/null -w '%{http_code}' --retry 60 --retry-delay 1 --retry-connrefused localhost:8123"
    assert sandbox.run(curl).stdout == "200"
    assert running(sandbox, "echo [n]oise") == 1


def test_a_background_process_outlives_its_client(sandbox: Sandbox, client: dict[str, str]) -> None:
    process = sandbox.commands.start("i=0; while :; do echo $((i += 1)); sleep 0.2; done", tag="ticker")
    time.sleep(1)
    other = Sandbox.connect(sandbox.id, **client)
    assert [p.process_id for p in other.commands.list() if p.tag == "ticker"] == [process.process_id]
    attached = other.commands.attach(process.process_id)
    seen = ""
    for event in attached:
        seen += event.text
        if seen.count("\n") >= 10:
            break
    assert seen.splitlines() == [str(n) for n in range(1, len(seen.splitlines()) + 1)]
    assert attached.kill()


def test_a_process_is_found_by_its_pid_too(sandbox: Sandbox) -> None:
    process = sandbox.commands.start("sleep 30")
    assert sandbox.commands.get(process.pid).process_id == process.process_id
    assert process.kill()


def test_an_unknown_process_is_a_typed_not_found(sandbox: Sandbox) -> None:
    for reference in (1, 4_194_300, "pr00000000000000000000"):
        with pytest.raises(SkerryError) as refused:
            sandbox.commands.attach(reference).wait()
        assert refused.value.code == "process_not_found"


# ------------------------------------------------------------------------------------------------ signals (BUG-08)


@pytest.mark.parametrize(
    "command",
    [
        "sleep 500 & sleep 501 & wait",
        "bash -c 'sleep 502 & (setsid sleep 503 &) ; wait'",
    ],
)
def test_kill_ends_the_whole_tree(sandbox: Sandbox, command: str) -> None:
    process = sandbox.commands.start(command)
    wait_until(lambda: running(sandbox, "^sleep 50[0-3]") == 2)
    assert process.kill() is True
    assert running(sandbox, "^sleep 50[0-3]") == 0
    assert process.kill() is False
    result = process.wait()
    assert (result.reason, result.exit_code, result.signal) == ("killed", None, "SIGKILL")


@pytest.mark.parametrize(
    ("command", "exit_code", "signal"),
    [
        ("kill -9 $$", None, "SIGKILL"),
        ("kill -TERM $$", None, "SIGTERM"),
        ("exec python3 -c 'import os; os.abort()'", None, "SIGABRT"),
        ("exit 137", 137, None),
        ("exit 0", 0, None),
        ("exit 255", 255, None),
    ],
)
def test_a_result_says_how_the_process_ended(
    sandbox: Sandbox, command: str, exit_code: int | None, signal: str | None
) -> None:
    result = sandbox.run(command)
    assert (result.exit_code, result.signal) == (exit_code, signal)
    assert result.reason == ("signal" if signal else "exit")


def test_signals_reach_the_group(sandbox: Sandbox) -> None:
    process = sandbox.commands.start("trap 'echo got; exit 9' INT; echo ready; while :; do sleep 0.1; done")
    for event in process:
        if "ready" in event.text:
            process.signal("SIGINT")
    result = process.wait()
    assert result.stdout.endswith("got\n")
    assert result.exit_code == 9
    with pytest.raises(SkerryError) as refused:
        process.signal("SIGTERM")
    assert refused.value.code == "process_exited"
    with pytest.raises(SkerryError) as unknown:
        process.signal("SIGNONSENSE")
    assert unknown.value.status == 400


# ------------------------------------------------------------------------------------------------ stdin (BUG-14)


@pytest.mark.parametrize("command", ["cat", "read x; echo got=$x", "grep foo", "python3"])
def test_stdin_is_closed_by_default(sandbox: Sandbox, command: str) -> None:
    result = sandbox.run(command, timeout=20)
    assert result.reason == "exit"


def test_stdin_flows_and_ends_when_it_is_closed(sandbox: Sandbox) -> None:
    process = sandbox.commands.start("sha256sum; echo EOF_SEEN", stdin=True)
    data = os.urandom(10_000_000)
    process.send_stdin(b"a\n")
    process.send_stdin(data)
    process.close_stdin()
    result = process.wait()
    assert result.stdout.split()[0] == hashlib.sha256(b"a\n" + data).hexdigest()
    assert result.stdout.endswith("EOF_SEEN\n")
    assert result.exit_code == 0


def test_stdin_that_cannot_be_written_is_a_typed_error(sandbox: Sandbox) -> None:
    without = sandbox.commands.start("sleep 20")
    with pytest.raises(SkerryError) as refused:
        without.send_stdin("x")
    assert refused.value.code == "stdin_not_open"
    without.kill()
    process = sandbox.commands.start("cat >/dev/null; sleep 5", stdin=True)
    process.close_stdin()
    with pytest.raises(SkerryError) as closed:
        process.send_stdin("x")
    assert closed.value.code == "stdin_closed"
    process.kill()
    process.wait()
    with pytest.raises(SkerryError) as late:
        process.send_stdin("x")
    assert late.value.code == "process_exited"


def test_all_of_stdin_can_be_given_at_once(sandbox: Sandbox) -> None:
    assert sandbox.run("tr a-z A-Z", stdin="hello\n").stdout == "HELLO\n"


# ------------------------------------------------------------------------------ lines that break (BUG-10, BUG-40)


def test_a_cut_line_is_not_an_exit(client: dict[str, str], sandbox: Sandbox) -> None:
    body = {"command": "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.5; done; exit 5", "stream": True}
    headers = {"Authorization": f"Bearer {client['api_key']}"}
    url = f"{client['url']}/v1/sandboxes/{sandbox.id}"
    with httpx.stream("POST", f"{url}/run", json=body, headers=headers) as response:
        first = next(response.iter_lines())
    process_id = httpx.Response(200, text=first).json()["process_id"]
    result = sandbox.commands.attach(process_id).wait()
    assert result.stdout == "".join(f"{i}\n" for i in range(1, 9))
    assert result.exit_code == 5


def test_a_killed_server_loses_no_output_and_no_exit_code(new_server: Callable[..., Server]) -> None:
    server = new_server()
    client = server.client
    sandbox = Sandbox.create(**client)
    process = sandbox.commands.start("for i in $(seq 1 60); do echo $i; sleep 0.1; done; exit 7")
    broken: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run(
                "echo running; until [ -e /tmp/go ]; do sleep 0.1; done; echo $((6 * 7))",
                on_stdout=lambda _: running.set(),
            )
        except SkerryError as error:
            broken.append(error)

    running = threading.Event()
    runner = threading.Thread(target=run)
    runner.start()
    assert running.wait(60)
    server.kill()
    runner.join(60)
    assert isinstance(broken[0], OutcomeUnknown), broken
    server.start()
    again = Sandbox.connect(sandbox.id, **client)
    assert again.info().state == "running"
    result = again.commands.attach(process.process_id).wait()
    assert result.stdout == "".join(f"{i}\n" for i in range(1, 61))
    assert result.exit_code == 7
    again.files.write("/tmp/go", "")
    assert again.commands.attach(broken[0].context["process_id"]).wait().stdout == "running\n42\n"


def test_kill_ends_every_request_in_flight(client: dict[str, str]) -> None:
    sandbox = Sandbox.create(**client)
    sandbox.run("truncate -s 8G /tmp/big")
    process = sandbox.commands.start("cat", stdin=True)
    errors: dict[str, BaseException] = {}
    started = threading.Barrier(5)

    def act(name: str, what) -> None:
        started.wait(30)
        try:
            what()
        except SkerryError as error:
            errors[name] = error

    def watch() -> None:
        for _ in sandbox.files.watch("/tmp"):
            pass

    def download() -> None:
        for _ in sandbox.files.stream("/tmp/big"):
            time.sleep(0.01)

    acts = {
        "run": lambda: sandbox.run("sleep 100", timeout=120),
        "attach": process.wait,
        "watch": watch,
        "download": download,
    }
    threads = [threading.Thread(target=act, args=item) for item in acts.items()]
    for thread in threads:
        thread.start()
    started.wait(30)
    time.sleep(3)
    Sandbox.connect(sandbox.id, **client).kill()
    for thread in threads:
        thread.join(20)
    assert not any(t.is_alive() for t in threads)
    assert {name: getattr(error, "code", None) for name, error in errors.items()} == dict.fromkeys(
        acts, "sandbox_killed"
    )
    with pytest.raises(SkerryError) as over:
        sandbox.run("true")
    assert (over.value.code, over.value.status) == ("sandbox_killed", 410)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("sudo kill -9 1; sudo sh -c 'echo c > /proc/sysrq-trigger'", "crashed"),
        ("sudo sh -c 'echo o > /proc/sysrq-trigger'", "poweroff"),
    ],
)
def test_a_guest_that_ends_itself_is_known_with_its_reason(client: dict[str, str], how: str, reason: str) -> None:
    sandbox = Sandbox.create(**client)
    sandbox.commands.start(how)
    wait_until(lambda: sandbox.info().state != "running")
    info = sandbox.info()
    assert (info.state, info.end_reason) == ("error", reason)
    with pytest.raises(SkerryError) as over:
        sandbox.run("true")
    assert over.value.code == "sandbox_failed"


def test_the_default_deadline_is_the_documented_one(too_long: Future[CommandResult]) -> None:
    with pytest.raises(CommandDeadline) as ended:
        too_long.result(120)
    assert 55 <= ended.value.result.duration < 120
