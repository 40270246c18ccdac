"""Background, signals, deadlines, stdin, broken lines. Cases BUG-06 to BUG-14, BUG-40."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from skerry import CommandDeadline, CommandResult, OutcomeUnknown, PortAddress, Process, Sandbox, SkerryError
from support.server import Server
from support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def too_long(client: dict[str, str]) -> Iterator[Future[CommandResult]]:
    """A command without a deadline of its own, longer than the default; it runs while the other tests do."""
    with Sandbox.create(memory_mb=256, **client) as sandbox, ThreadPoolExecutor(1) as pool:
        yield pool.submit(sandbox.run, "sleep 600")


@pytest.fixture(scope="module", autouse=True)
def in_background(sandbox: Sandbox) -> Process:
    """Started without a deadline, while a command that is waited for has one by default."""
    return sandbox.commands.start("sleep 1871")


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


LEAVER = """
import os, sys
from skerry import Sandbox
sandbox = Sandbox.connect(sys.argv[1], url=sys.argv[2], api_key=sys.argv[3])
process = sandbox.commands.start("i=0; while :; do echo $((i += 1)); sleep 0.2; done", tag="ticker")
print(process.process_id, flush=True)
next(iter(process))
os._exit(0)
"""


def test_a_background_process_outlives_its_client(sandbox: Sandbox, client: dict[str, str]) -> None:
    leaver = [sys.executable, "-c", LEAVER, sandbox.id, client["url"], client["api_key"]]
    process_id = subprocess.run(leaver, capture_output=True, timeout=120, check=True, text=True).stdout.strip()
    other = Sandbox.connect(sandbox.id, **client)
    assert [p.process_id for p in other.commands.list() if p.tag == "ticker"] == [process_id]
    attached = other.commands.attach(process_id)
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


SILENT = """
import socket, time
server = socket.create_server(("127.0.0.1", 3000))
open("/tmp/listens", "w").close()
connection = server.accept()
open("/tmp/accepted", "w").close()
time.sleep(900)
"""


class InFlight:
    """One of every kind of long request to a sandbox, each in a thread, and how they ended."""

    def __init__(self, sandbox: Sandbox) -> None:
        sandbox.run("truncate -s 8G /tmp/big")
        deaf = sandbox.commands.start("sleep 900", stdin=True)
        attached = sandbox.commands.start("cat", stdin=True)
        sandbox.commands.start(["python3", "-c", SILENT])
        terminal = sandbox.pty()
        events = sandbox.watch("/home/user")
        address = sandbox.port(3000)
        wait_until(lambda: sandbox.files.exists("/tmp/listens"))
        self.acts: dict[str, Callable[[], object]] = {
            "run": lambda: sandbox.run("sleep 901", timeout=0),
            "attach": attached.wait,
            "watch": lambda: list(events),
            "download": lambda: [time.sleep(0.01) for _ in sandbox.files.stream("/tmp/big")],
            "terminal": terminal.wait,
            "stdin": lambda: deaf.send_stdin(bytes(20_000_000)),
            "port": lambda: self.ask(address),
        }
        self.ends: dict[str, str] = {}
        self._threads = [threading.Thread(target=self._act, args=item) for item in self.acts.items()]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: sandbox.files.exists("/tmp/accepted") and running(sandbox, "^sleep 901"))

    def _act(self, name: str, what: Callable[[], object]) -> None:
        try:
            self.ends[name] = f"it gave {what()!r}"
        except SkerryError as error:
            self.ends[name] = error.code

    @staticmethod
    def ask(address: PortAddress) -> None:
        """Raises as the SDK would."""
        answer = httpx.get(address.path_url, headers=address.path_headers, timeout=300, trust_env=False)
        raise SkerryError(answer.text, code=answer.json()["code"])

    def all_end(self, code: str, within: float) -> None:
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        assert self.ends == dict.fromkeys(self.acts, code)


@pytest.fixture(scope="module", autouse=True)
def expiring(client: dict[str, str]) -> tuple[Sandbox, InFlight]:
    """A sandbox whose minute passes while the other tests run, with requests that would last longer."""
    sandbox = Sandbox.create(memory_mb=256, timeout=60, **client)
    return sandbox, InFlight(sandbox)


def test_kill_ends_every_request_in_flight(client: dict[str, str]) -> None:
    sandbox = Sandbox.create(memory_mb=256, **client)
    requests = InFlight(sandbox)
    Sandbox.connect(sandbox.id, **client).kill()
    requests.all_end("sandbox_killed", 20)
    with pytest.raises(SkerryError) as over:
        sandbox.run("true")
    assert (over.value.code, over.value.status) == ("sandbox_killed", 410)


def test_an_end_by_the_timeout_ends_every_request_in_flight(expiring: tuple[Sandbox, InFlight]) -> None:
    sandbox, requests = expiring
    wait_until(lambda: sandbox.info().state != "running", 120)
    requests.all_end("sandbox_expired", 20)


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


def test_a_background_process_has_no_deadline_unless_asked(sandbox: Sandbox, in_background: Process) -> None:
    wait_until(lambda: time.time() - in_background.info().started_at_ms / 1000 > 61, 90)
    assert running(sandbox, "^sleep 1871") == 1
    assert in_background.kill()
