"""Environment, users, terminals: the same layers on every path. Cases BUG-16 to BUG-18, BUG-53."""

import json
import re
import time

import pytest

from skerry import Sandbox, SkerryError

VALUES = {
    "A": "create",
    "B": "line1\nline2",
    "C": "$(touch /tmp/pwned)`id`\"'\\",
    "D": "",
    "E": "=x=y",
    "F": "snow ☃",
}
PRINT = ["python3", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


@pytest.fixture(scope="module")
def with_env(client: dict[str, str]):
    with Sandbox.create(env=VALUES, timeout=3600, idle_timeout=None, **client) as sandbox:
        yield sandbox


def test_values_are_data_on_every_path(with_env: Sandbox) -> None:
    seen = {
        "argv": json.loads(with_env.run(PRINT).stdout),
        "shell": json.loads(
            with_env.run("exec python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'").stdout
        ),
        "background": json.loads(with_env.commands.start(PRINT).wait().stdout),
    }
    with with_env.pty(command=PRINT, cols=500) as terminal:
        text = b"".join(terminal).decode()
        seen["pty"] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    for path, env in seen.items():
        assert {k: env.get(k) for k in VALUES} == VALUES, path
        assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/home/user", "user", "user"), path
        assert env["PATH"] == seen["argv"]["PATH"], path
    assert not with_env.files.exists("/tmp/pwned")


def test_a_commands_own_values_win(with_env: Sandbox) -> None:
    env = json.loads(with_env.run(PRINT, env={"A": "call", "PATH": "/usr/bin:/bin"}).stdout)
    assert (env["A"], env["PATH"], env["B"]) == ("call", "/usr/bin:/bin", VALUES["B"])


def test_values_are_in_no_command_line_of_the_guest(with_env: Sandbox) -> None:
    listed = with_env.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", user="root").stdout
    assert "snow" not in listed
    assert "line1" not in listed


@pytest.mark.parametrize("env", [{"BAD NAME": "x"}, {"A=B": "x"}, {"": "x"}, {"X": "a\0b"}, {"1X": "x"}])
def test_bad_names_are_refused_by_name(sandbox: Sandbox, client: dict[str, str], env: dict[str, str]) -> None:
    for act in (lambda: sandbox.run("true", env=env), lambda: Sandbox.create(env=env, **client)):
        with pytest.raises(SkerryError) as refused:
            act()
        assert refused.value.status == 400
        assert refused.value.problems[0].field == f"env.{next(iter(env))}"


def test_too_much_environment_is_refused_by_size(sandbox: Sandbox) -> None:
    for env in ({"X": "x" * 2**20}, {f"K{n}": "v" for n in range(5000)}):
        with pytest.raises(SkerryError) as refused:
            sandbox.run("true", env=env)
        assert refused.value.status in {400, 413}
    assert sandbox.run("echo ${#X}", env={"X": "x" * 100_000}).stdout == "100000\n"


def test_users_are_who_they_say(sandbox: Sandbox) -> None:
    assert sandbox.run("id -un; id -Gn; pwd; echo $HOME").stdout.split() == ["user", "user", "/home/user", "/home/user"]
    assert sandbox.run("id -un; pwd; echo $HOME", user="root").stdout.split() == ["root", "/root", "/root"]
    assert sandbox.run("id -u; id -G", user="12345", cwd="/").stdout.split() == ["12345", "12345"]
    assert sandbox.run("sudo id -un").stdout == "root\n"
    status = sandbox.run("cat /proc/self/status").stdout
    assert set(re.findall(r"Cap(?:Inh|Prm|Eff|Amb):\s+(\w+)", status)) == {"0" * 16}
    assert re.findall(r"[UG]id:\s+(.*)", status) == ["1000\t1000\t1000\t1000"] * 2


def test_the_agent_is_out_of_an_ordinary_users_reach(sandbox: Sandbox) -> None:
    for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/maps"):
        assert sandbox.run(["head", "-c1", path]).exit_code != 0, path
    assert sandbox.run("ls /proc/1/fd").exit_code != 0
    script = (
        "import socket\n"
        "for to in ('127.0.0.1', '169.254.0.2'):\n"
        "    s = socket.socket(); s.settimeout(5)\n"
        "    try:\n"
        "        s.connect((to, 1024)); s.sendall(b'\\0' * 64); print('said', s.recv(10))\n"
        "    except OSError: print('no')\n"
    )
    answer = sandbox.run(["python3", "-c", script]).stdout.splitlines()
    assert all(line in {"no", "said b''"} for line in answer), answer
    assert "token" not in sandbox.run("cat /proc/cmdline").stdout


def test_the_guest_has_time_entropy_and_a_name(sandbox: Sandbox) -> None:
    before = time.time()
    there = float(sandbox.run("date +%s.%N").stdout)
    assert before - 0.5 <= there <= time.time() + 0.5
    clock = sandbox.run("cat /sys/devices/system/clocksource/clocksource0/current_clocksource").stdout
    assert clock.strip() not in {"jiffies", "refined-jiffies"}
    assert sandbox.run("hostname").stdout.strip() == sandbox.id
    assert re.fullmatch(r"[0-9a-f]{32}\n", sandbox.run("cat /etc/machine-id").stdout)
    assert sandbox.run("getent hosts localhost; getent hosts $(hostname)").exit_code == 0


# -------------------------------------------------------------------------------------------- terminals (BUG-16)


def read_until(terminal, wanted: str | bytes, seen: bytes = b"") -> bytes:
    sought = wanted.encode() if isinstance(wanted, str) else wanted
    for chunk in terminal:
        seen += chunk
        if sought in seen:
            break
    return seen


def test_a_repl_answers_each_line(sandbox: Sandbox) -> None:
    with sandbox.pty(command=["python3"], env={"PYTHON_BASIC_REPL": "1", "TERM": "dumb"}) as terminal:
        read_until(terminal, ">>> ")
        for n in range(3):
            terminal.send(f"print('hel' + 'lo{n}')\n")
            assert f"hello{n}" in read_until(terminal, f"hello{n}").decode()


def test_a_terminal_has_its_size_and_all_bytes(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/all", bytes(range(256)))
    with sandbox.pty(command="stty size; stty raw; cat /tmp/all; sleep 600", cols=101, rows=41) as terminal:
        seen = read_until(terminal, bytes(range(200, 256)))
        assert seen.startswith(b"41 101\r\n")
        assert seen.endswith(bytes(range(256)))
        terminal.process.kill()
    with sandbox.pty(cols=80, rows=24) as terminal:
        terminal.resize(cols=132, rows=50)
        terminal.send("stty size\n")
        assert b"50 132" in read_until(terminal, "50 132")


def test_a_large_paste_arrives_complete(sandbox: Sandbox) -> None:
    text = "".join(f"{n:07}\n" for n in range(25_000))
    with sandbox.pty(command="stty -echo; echo ready; cat > /tmp/paste") as terminal:
        read_until(terminal, "ready")
        terminal.send(text)
        terminal.send("\x04")
        terminal.wait()
    assert sandbox.files.read("/tmp/paste") == text


def test_an_editor_saves_what_was_typed(sandbox: Sandbox) -> None:
    with sandbox.pty(command="vi /tmp/typed", env={"TERM": "xterm"}) as terminal:
        read_until(terminal, "typed")
        terminal.send("ihello 😀 world\x1b:wq\r")
        terminal.wait()
    assert sandbox.files.read("/tmp/typed") == "hello 😀 world\n"


def test_a_server_started_in_a_terminal_with_nohup_survives_it(sandbox: Sandbox) -> None:
    with sandbox.pty() as terminal:
        terminal.send("nohup sleep 747 >/dev/null 2>&1 &\nexit\n")
        terminal.wait()
    assert sandbox.run("pgrep -fc '^sleep 747'").stdout == "1\n"
