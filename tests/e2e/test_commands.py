"""Commands on a real VM: output, fidelity, exit codes, start errors. Cases BUG-01 to BUG-05, BUG-09."""

import base64
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from skerry import Sandbox, SkerryError
from support.server import Server


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 262_145, 1_048_577])
def test_every_byte_of_the_output_arrives(sandbox: Sandbox, size: int) -> None:
    command = f"head -c {size} /dev/urandom | base64 -w0 | head -c {size} | tee /tmp/o; sha256sum /tmp/o >&2"
    result = sandbox.run(command)
    assert len(result.stdout_bytes) == size
    assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr.split()[0]
    assert result.exit_code == 0


def test_a_hundred_megabytes_arrive(sandbox: Sandbox) -> None:
    seen = {"bytes": 0}

    def count(text: str) -> None:
        seen["bytes"] += len(text)

    result = sandbox.run(
        "head -c 100000000 /dev/zero | tr '\\0' A", on_stdout=count, timeout=280, max_output=1024 * 1024
    )
    assert seen["bytes"] == 100_000_000
    assert result.stdout_truncated
    assert len(result.stdout_bytes) == 1024 * 1024
    assert sandbox.run("echo alive").stdout == "alive\n"


def test_a_flood_does_not_grow_the_server(sandbox: Sandbox, server: Server) -> None:
    assert server.process
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    peak = 0
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        sandbox.run("timeout 8 yes", timeout=60, max_output=1024)
        slow = sandbox.run("timeout 5 yes", timeout=60, max_output=1024, on_stdout=lambda _: time.sleep(0.02))
    finally:
        done.set()
        sampler.join()
    assert slow.stdout_truncated
    assert peak - before < 64 * 1024 * 1024
    assert sandbox.run("echo alive").stdout == "alive\n"


def test_lines_arrive_as_they_are_written(sandbox: Sandbox) -> None:
    """Each is written only when the one before has come: if anything held one back, the command would never go on."""
    arrived: list[str] = []

    def seen(text: str) -> None:
        arrived.append(text)
        sandbox.files.write(f"/tmp/seen-{text.strip()}", "")

    wait = "until [ -e /tmp/seen-$1$i ]; do sleep 0.05; done"
    sandbox.run(
        f"seen() {{ {wait}; }}; for i in 1 2 3; do echo out$i; seen out; echo err$i >&2; seen err; done",
        timeout=120,
        on_stdout=seen,
        on_stderr=seen,
    )
    assert arrived == [f"{stream}{i}\n" for i in (1, 2, 3) for stream in ("out", "err")]


def test_streams_are_apart_and_complete_every_time(sandbox: Sandbox) -> None:
    for _ in range(40):
        result = sandbox.run("printf X; printf Y >&2; exit 7")
        assert (result.stdout, result.stderr, result.exit_code) == ("X", "Y", 7)
    for _ in range(15):
        result = sandbox.run("seq 1 20000; exit 3")
        assert result.stdout.splitlines()[-1] == "20000"
        assert (len(result.stdout_bytes), result.exit_code) == (108_894, 3)


CHATTER = """
import json, time
for n in range(60):
    print(json.dumps({"n": n, "x": "y" * 1000}), flush=True)
    time.sleep(0.005)
"""


def test_twenty_long_streams_at_once_are_whole_and_end(sandbox: Sandbox, client: dict[str, str]) -> None:
    """Read by a plain HTTP client, which raises for a body that is not ended."""
    sandbox.files.write("/tmp/chatter.py", CHATTER)
    body = {"command": "python3 /tmp/chatter.py; exit 3", "stream": True, "timeout_ms": None}
    headers = {"Authorization": f"Bearer {client['api_key']}"}

    def read(_: int) -> tuple[list[int], dict[str, object]]:
        output, last = b"", {}
        url = f"{client['url']}/v1/sandboxes/{sandbox.id}/run"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=250) as response:
            for line in response.iter_lines():
                last = json.loads(line)
                if last["type"] == "stdout":
                    output += base64.b64decode(last["data"])
        return [json.loads(line)["n"] for line in output.splitlines()], last

    with ThreadPoolExecutor(20) as pool:
        for numbers, last in pool.map(read, range(20)):
            assert numbers == list(range(60))
            assert (last["type"], last["exit_code"]) == ("exit", 3)


def test_a_visible_exit_means_readable_output(sandbox: Sandbox) -> None:
    for _ in range(10):
        process = sandbox.commands.start("seq 1 5000; exit 4")
        while (info := sandbox.commands.get(process.process_id)).exit is None:
            time.sleep(0.01)
        assert info.exit.exit_code == 4
        assert sandbox.commands.attach(process.process_id).wait().stdout.endswith("5000\n")


@pytest.mark.parametrize("redirect", ["", " >&2"])
def test_bytes_that_are_not_utf8(sandbox: Sandbox, redirect: str) -> None:
    def out(command: str) -> tuple[bytes, str]:
        result = sandbox.run(command + redirect)
        assert result.exit_code == 0
        return (result.stderr_bytes, result.stderr) if redirect else (result.stdout_bytes, result.stdout)

    assert out("printf '\\xff\\xfeok\\n'") == (b"\xff\xfeok\n", "��ok\n")
    assert out("printf 'a\\0b'") == (b"a\0b", "a\0b")


def test_a_character_split_over_writes_stays_one(sandbox: Sandbox) -> None:
    seen: list[str] = []
    program = "import os, time\nfor b in (b'\\xe2', b'\\x89', b'\\xa4\\n'):\n    os.write(1, b)\n    time.sleep(0.2)\n"
    result = sandbox.run(["python3", "-c", program], on_stdout=seen.append)
    assert result.stdout == "≤\n"
    assert "".join(seen) == "≤\n"
    emoji = sandbox.run(["python3", "-c", "print('\U0001f600' * 100001)"])
    assert emoji.stdout == "\U0001f600" * 100001 + "\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "cat <<'EOF'\nit's \"quoted\" $HOME `id`\n\tindented\nEOF",
            'it\'s "quoted" $HOME `id`\n\tindented\n',
        ),
        ("echo a # trailing comment", "a\n"),
        ("echo b \\\n  c", "b c\n"),
        ("true &", ""),
        ("echo d;", "d\n"),
        ("printf '%s' \"$0\"", "/bin/bash"),
    ],
)
def test_a_shell_text_is_passed_on_unchanged(sandbox: Sandbox, command: str, expected: str) -> None:
    result = sandbox.run(command)
    assert (result.stdout, result.exit_code) == (expected, 0)


@pytest.mark.parametrize("command", ["if true; then", "echo 'unterminated"])
def test_a_syntax_error_is_the_shells_own(sandbox: Sandbox, command: str) -> None:
    result = sandbox.run(command)
    assert result.exit_code == 2
    assert "syntax error" in result.stderr or "unexpected EOF" in result.stderr
    assert sandbox.run("echo ok", timeout=60).stdout == "ok\n"


def test_argv_is_passed_verbatim(sandbox: Sandbox) -> None:
    assert sandbox.run(["sh", "-c", 'echo "$1"', "x", "a b  c"]).stdout == "a b  c\n"
    assert sandbox.run(["printf", "%s|", "", "'", '"', "$(id)", "\n"]).stdout == "|'|\"|$(id)|\n|"


def test_a_very_long_command_works_or_is_refused_by_name(sandbox: Sandbox) -> None:
    assert sandbox.run("echo " + "x" * 120_000).stdout == "x" * 120_000 + "\n"
    with pytest.raises(SkerryError) as refused:
        sandbox.run("echo " + "x" * 300_000)
    assert refused.value.code == "command_too_long"
    assert sandbox.run("echo ok").stdout == "ok\n"


@pytest.mark.parametrize(
    ("poison", "code"),
    [
        ("set -euo pipefail; false", 1),
        ("exit 3", 3),
        ("exec sleep 0", 0),
        ("cd /tmp; export LEAK=1; umask 077; ulimit -n 16", 0),
        ('trap "" TERM INT; stty -echo 2>/dev/null; exec 1>&-', 0),
    ],
)
def test_one_command_does_not_poison_the_next(sandbox: Sandbox, poison: str, code: int) -> None:
    clean = sandbox.run("pwd; echo [$LEAK]; umask; ulimit -n").stdout
    assert clean.splitlines()[:3] == ["/home/user", "[]", "0022"]
    assert sandbox.run(poison).exit_code == code
    assert sandbox.run("pwd; echo [$LEAK]; umask; ulimit -n").stdout == clean


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"cwd": "/does/not/exist"}, "cwd_not_found", "/does/not/exist"),
        ({"cwd": "/etc/passwd"}, "cwd_not_a_directory", "/etc/passwd"),
        ({"user": "nosuchuser"}, "user_not_found", "nosuchuser"),
    ],
)
def test_a_command_that_cannot_start_is_a_typed_error(
    sandbox: Sandbox, options: dict[str, str], code: str, named: str
) -> None:
    before = len(sandbox.commands.list())
    with pytest.raises(SkerryError) as refused:
        sandbox.run(["true"], **options)
    assert refused.value.code == code
    assert named in str(refused.value)
    assert len(sandbox.commands.list()) == before


def test_a_program_that_is_missing_or_not_executable(sandbox: Sandbox) -> None:
    for argv, code in ((["/no/such/binary"], "command_not_found"), (["/etc/passwd"], "command_not_executable")):
        with pytest.raises(SkerryError) as refused:
            sandbox.run(argv)
        assert refused.value.code == code
        assert argv[0] in str(refused.value)
    assert sandbox.run("/no/such/binary").exit_code == 127
    assert sandbox.run("/etc/passwd").exit_code == 126


def test_a_removed_home_is_named(client: dict[str, str]) -> None:
    with Sandbox.create(**client) as sandbox:
        assert sandbox.run("rm -rf /home/user; sudo rm -rf /home/user").exit_code == 0
        for options in ({}, {"cwd": "/home/user"}):
            with pytest.raises(SkerryError) as refused:
                sandbox.run("pwd", **options)
            assert refused.value.code == "cwd_not_found"
            assert "/home/user" in str(refused.value)
        assert sandbox.run("pwd", cwd="/tmp").stdout == "/tmp\n"
