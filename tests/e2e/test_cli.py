"""The command line against a real VM: BUG-14 and what only a real guest shows."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skerry import Sandbox
from support.server import Server

SKERRY = str(Path(sys.executable).parent / "skerry")


@pytest.fixture
def environment(server: Server) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SKERRY_")}
    return {**own, "SKERRY_CLIENT_FILE": str(server.client_file)}


def skerry(environment: dict[str, str], *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    given = {"stdin": subprocess.DEVNULL} if "input" not in options and "stdin" not in options else {}
    return subprocess.run(  # pyright: ignore[reportCallIssue]
        [SKERRY, *arguments], env=environment, capture_output=True, timeout=120, check=False, **given, **options
    )


def test_run_makes_runs_and_kills(environment: dict[str, str], client: dict[str, str]) -> None:
    done = skerry(environment, "run", "-m", "mark=cli-run", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)
    assert [box.state for box in Sandbox.list(metadata={"mark": "cli-run"}, **client)] == ["killed"]


def test_an_interrupted_run_leaves_no_sandbox(environment: dict[str, str], client: dict[str, str]) -> None:
    process = subprocess.Popen(
        [SKERRY, "run", "-m", "mark=cli-int", "--", "sh", "-c", "echo up; exec sleep 600"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stdout.close()
    assert [box.state for box in Sandbox.list(metadata={"mark": "cli-int"}, **client)] == ["killed"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["false"], 1),
        (["sh", "-c", "exit 137"], 137),
        (["sh", "-c", "kill -SEGV $$"], 139),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_exit_codes(environment: dict[str, str], sandbox: Sandbox, command: list[str], code: int) -> None:
    assert skerry(environment, "exec", sandbox.id, "--", *command).returncode == code


def test_a_deadline_ends_the_whole_tree(environment: dict[str, str], sandbox: Sandbox) -> None:
    command = ["sh", "-c", "echo begun; sleep 613 & sleep 613"]
    done = skerry(environment, "exec", sandbox.id, "--timeout", "2", "--", *command)
    assert (done.stdout, done.returncode) == (b"begun\n", 124)
    assert sandbox.run("pgrep -fc '^sleep 613'").stdout == "0\n"


def test_bytes_go_in_and_out_unchanged(environment: dict[str, str], sandbox: Sandbox) -> None:
    data = os.urandom(3_000_000)
    done = skerry(environment, "exec", "-i", sandbox.id, "--", "cat", input=data)
    assert (done.stdout == data, done.returncode) == (True, 0)


def test_an_open_input_does_not_hold_the_program(environment: dict[str, str], sandbox: Sandbox) -> None:
    ours, theirs = os.pipe()
    try:
        done = skerry(environment, "exec", "-i", sandbox.id, "--", "echo", "hi", stdin=ours)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.stdout, done.returncode) == (b"hi\n", 0)


def test_a_loop_keeps_its_input(environment: dict[str, str], sandbox: Sandbox) -> None:
    script = f'while read -r l; do "{SKERRY}" exec {sandbox.id} -- echo "$l"; done'
    done = subprocess.run(
        ["sh", "-c", script], input=b"1\n2\n3\n", env=environment, capture_output=True, timeout=120, check=True
    )
    assert done.stdout == b"1\n2\n3\n"


def test_a_reader_that_leaves_ends_the_command(environment: dict[str, str], sandbox: Sandbox) -> None:
    script = f'"{SKERRY}" exec {sandbox.id} -- yes yes617 | head -1'
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"yes617\n", b"")
    assert sandbox.run("pgrep -fc '^yes yes617'").stdout == "0\n"


def test_trees_are_copied_in_and_out(environment: dict[str, str], sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/a b").write_bytes(os.urandom(100_000))
    (tree / "link").symlink_to("deep")
    assert skerry(environment, "cp", str(tree), f"{sandbox.id}:/home/user/").returncode == 0
    done = skerry(environment, "cp", "--json", f"{sandbox.id}:tree", str(tmp_path / "back"))
    assert json.loads(done.stdout)["entries"] == 4
    assert subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "back"], check=False).returncode == 0


def test_a_shell_is_a_terminal(environment: dict[str, str], sandbox: Sandbox) -> None:
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [SKERRY, "shell", sandbox.id],
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        seen = b""
        while b"$ " not in seen:
            seen += os.read(master, 65536)
        os.write(master, b"test -t 0 && echo is$((1))tty; exit 6\r")
        while b"is1tty" not in seen:
            seen += os.read(master, 65536)
        assert process.wait(60) == 6
    finally:
        os.close(master)
        os.close(slave)


def test_what_it_shows(environment: dict[str, str], sandbox: Sandbox) -> None:
    assert json.loads(skerry(environment, "info", "--json", sandbox.id).stdout)["metrics"]["cpu_count"] == 1
    process = sandbox.commands.start("sleep 619", tag="shown")
    assert process.process_id in skerry(environment, "ps", sandbox.id).stdout.decode()
    process.kill()
    assert sandbox.id in skerry(environment, "ls").stdout.decode()
    assert b"sandbox.created" in skerry(environment, "logs", sandbox.id).stdout


def test_a_command_outlives_the_server(environment: dict[str, str], sandbox: Sandbox, server: Server) -> None:
    process = subprocess.Popen(
        [SKERRY, "exec", sandbox.id, "--", "sh", "-c", "for i in $(seq 40); do echo $i; sleep 0.2; done; exit 7"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    first = process.stdout.readline()
    time.sleep(1)
    server.kill()
    server.start()
    rest, _ = process.communicate(timeout=120)
    assert first + rest == b"".join(b"%d\n" % i for i in range(1, 41))
    assert process.returncode == 7
