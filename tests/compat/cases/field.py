"""What users of such clients have reported of products like this one, by the Python client: BUG-… in docs/CASES.md."""

import asyncio
import hashlib
import random
import time

import e2b
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)
from runner import at_end
from shared import async_sandbox, raises, sandbox, since, within

NOT_RUNNING = getattr(e2b, "SandboxNotRunningException", TimeoutException)
OVER = "killed or reached its" if hasattr(e2b, "SandboxNotRunningException") else "due to sandbox timeout"
"""What each generation makes of a sandbox that went."""


def lives(box, pattern: str) -> bool:
    """Whether a process with that command line is there. (The brackets keep grep from finding itself.)"""
    return box.commands.run(f"ps ax -o args= | grep -c '[{pattern[0]}]{pattern[1:]}' || true").stdout.strip() != "0"


def goes(box, pattern: str) -> None:
    for _ in range(100):
        if not lives(box, pattern):
            return
        time.sleep(0.2)
    raise AssertionError(f"{pattern} runs on")


# ------------------------------------------------------------------------------------------------------------- output


def test_output_of_every_size_is_whole():  # BUG-01
    for size in (0, 1, 4095, 4096, 4097, 32_768, 65_535, 65_536, 65_537, 1_048_577):
        text = f"head -c {size} /dev/urandom | base64 -w0 | head -c {size}"
        done = sandbox().commands.run(f"{text} | tee /tmp/o; sha256sum < /tmp/o >&2")
        assert len(done.stdout) == size
        assert hashlib.sha256(done.stdout.encode()).hexdigest() == done.stderr.split()[0]


def test_both_streams_are_whole_and_apart_whenever_it_ends():  # BUG-02
    for _ in range(20):
        with raises(CommandExitException) as caught:
            sandbox().commands.run("printf X; printf Y >&2; exit 7")
        assert (caught.error.stdout, caught.error.stderr, caught.error.exit_code) == ("X", "Y", 7)
    with raises(CommandExitException) as caught:
        sandbox().commands.run("seq 1 20000; exit 3")
    assert caught.error.stdout.splitlines()[-1] == "20000"


def test_a_line_comes_when_it_is_written():  # BUG-02
    came = []
    sandbox().commands.run(
        "for n in 1 2 3; do echo $n; sleep 1; done", on_stdout=lambda _: came.append(time.monotonic())
    )
    assert len(came) == 3
    assert came[2] - came[0] > 1


def test_bytes_that_are_no_text_and_characters_cut_in_two():  # BUG-03
    for redirect, stream in (("", "stdout"), (" >&2", "stderr")):
        run = sandbox().commands.run
        assert getattr(run(f"printf '\\xff\\xfeok\\n'{redirect}"), stream) == "��ok\n"
        got = []
        heard = {f"on_{stream}": got.append}
        cut = f'for b in e2 89 a4 0a; do printf "\\x$b"{redirect}; sleep 0.2; done'
        assert getattr(run(cut, **heard), stream) == bytes.fromhex("e289a40a").decode()
        assert "".join(got) == bytes.fromhex("e289a40a").decode()
        smiles = getattr(run(f'python3 -c \'print("\\U0001F600" * 100001, end="")\'{redirect}'), stream)
        assert smiles == "\U0001f600" * 100_001
        assert getattr(run(f"printf 'a\\0b'{redirect}"), stream) == "a\0b"


# ----------------------------------------------------------------------------------------------------------- commands


def test_text_of_a_command_is_the_shells():  # BUG-04
    run = sandbox().commands.run
    assert (
        run("cat <<'EOF'\nit's \"quoted\" $HOME `id`\n\tindented\nEOF").stdout
        == 'it\'s "quoted" $HOME `id`\n\tindented\n'
    )
    assert run("echo a # a comment").stdout == "a\n"
    assert run("echo b \\\n  c").stdout == "b c\n"
    for broken in ("if true; then", "echo 'unterminated"):
        with raises(CommandExitException, "unexpected") as caught:
            run(broken)
        assert caught.error.exit_code == 2
    assert run(f"echo {'a' * 120_000} | wc -c").stdout == "120001\n"
    with raises(InvalidArgumentException, "too long"):
        run(f"echo {'a' * 300_000}")


def test_no_command_spoils_the_next():  # BUG-05
    run = sandbox().commands.run
    for text, code in (
        ("set -euo pipefail; false", 1),
        ("exit 3", 3),
        ("exec sleep 0", 0),
        ("exec 1>&-; trap '' TERM", 0),
    ):
        if code:
            with raises(CommandExitException) as caught:
                run(text)
            assert caught.error.exit_code == code
        else:
            run(text)
        assert run("echo next").stdout == "next\n"
    run("cd /tmp; export LEAK=1; umask 077; ulimit -n 16")
    assert run("pwd; echo [$LEAK]; umask").stdout == "/home/user\n[]\n0022\n"


def test_a_deadline_ends_the_whole_tree_and_what_was_said_is_there():  # BUG-06
    box, heard = sandbox(), []
    for text in (
        "echo before; (while :; do sleep 0.271; done) & exec sleep 271",
        "trap '' TERM; echo before; sleep 271; sleep 271",
        "echo before; exec python3 -c 'import os, time; os.fork() and os.fork(); time.sleep(271)'",
    ):
        for seconds in (3, 20):  # for a guest that is slow today
            heard.clear()
            began = time.monotonic()
            with raises(TimeoutException):
                box.commands.run(text, timeout=seconds, on_stdout=heard.append)
            assert time.monotonic() - began < seconds + 15
            if heard:
                break
        assert heard == ["before\n"]
        goes(box, "271")


def test_a_child_in_the_background_holds_nobody():  # BUG-07
    box = sandbox()
    assert box.commands.run("sleep 272 & echo started", timeout=30).stdout == "started\n"
    noise = "nohup sh -c 'while :; do echo noise; sleep 0.1; done' & disown; echo done"
    assert "done\n" in box.commands.run(noise, timeout=30).stdout
    assert lives(box, "sleep 272")
    assert lives(box, "echo noise")
    box.commands.run("pkill -f 'echo [n]oise'; pkill -f 'sleep 27[2]'")


def test_how_it_ended_is_told():  # BUG-08
    for text, code, said in (
        ("kill -9 $$", -1, "signal: killed"),
        ("kill -TERM $$", -1, "signal: terminated"),
        ("exit 137", 137, "exit status 137"),
    ):
        with raises(CommandExitException) as caught:
            sandbox().commands.run(text)
        assert (caught.error.exit_code, caught.error.error) == (code, said)


def test_a_kill_takes_the_tree_and_a_second_finds_nothing():  # BUG-08
    box = sandbox()
    handle = box.commands.run("sleep 273 & sleep 273 & setsid sleep 273 & wait", background=True)
    while not lives(box, "sleep 273"):
        time.sleep(0.1)
    assert handle.kill() is True
    goes(box, "sleep 273")
    assert handle.kill() is False
    assert box.commands.kill(handle.pid) is False
    assert box.commands.kill(99_999) is False


def test_what_cannot_start_says_why():  # BUG-09
    run = sandbox().commands.run
    with raises(InvalidArgumentException, "cwd '/does/not/exist' does not exist"):
        run("true", cwd="/does/not/exist")
    with raises(InvalidArgumentException, "/etc/passwd"):
        run("true", cwd="/etc/passwd")
    with raises(AuthenticationException, "invalid username: 'nosuchuser'"):
        run("true", user="nosuchuser")
    for text, code in (("/no/such/binary", 127), ("/etc/passwd", 126)):
        with raises(CommandExitException) as caught:
            run(text)
        assert caught.error.exit_code == code


def test_variables_are_data():  # BUG-17
    values = {
        "B": "line1\nline2", "C": "$(touch /tmp/pwned)`id`\"'\\", "D": "", "E": "=x=y", "F": "snow \u2603",
    }  # fmt: skip
    box = Sandbox.create(timeout=300, envs={"A": "create", **values})
    at_end.append(box.kill)
    show = "python3 -c 'import json, os; print(json.dumps({k: os.environ.get(k) for k in \"ABCDEF\"}))'"
    for envs, a in (({}, "create"), ({"A": "call"}, "call")):
        assert eval(box.commands.run(show, envs=envs).stdout) == {"A": a, **values}
    assert not box.files.exists("/tmp/pwned")
    box.pause()
    box.connect()
    assert eval(box.commands.run(show).stdout) == {"A": "create", **values}
    for envs, text in (({"BAD NAME": "x"}, "BAD NAME"), ({"A=B": "x"}, "A=B"), ({"X": "a\0b"}, "X")):
        with raises(InvalidArgumentException, text):
            box.commands.run("true", envs=envs)


def test_a_terminal_is_bytes_and_takes_a_long_paste():  # BUG-16
    box, got = sandbox(), bytearray()
    handle = box.pty.create(PtySize(rows=24, cols=80), timeout=120)
    box.pty.send_stdin(handle.pid, b"stty raw -echo; head -c 200000 | sha256sum; head -c 256 /tmp/all; exit\n")
    box.commands.run('python3 -c \'open("/tmp/all", "wb").write(bytes(range(256)))\'')
    time.sleep(1)
    paste = bytes(random.Random(1).choices(b"abcdefgh", k=200_000))
    box.pty.send_stdin(handle.pid, paste)
    handle.wait(on_pty=got.extend)
    assert hashlib.sha256(paste).hexdigest().encode() in got
    assert bytes(range(256)) in got
    for size in (PtySize(rows=0, cols=0), PtySize(rows=70_000, cols=1)):
        with raises(InvalidArgumentException, "must be from 1 to 4096"):
            box.pty.create(size)


# -------------------------------------------------------------------------------------------------------------- files


def test_names_come_back_as_they_are():  # BUG-19
    box = sandbox()
    names = [
        "a b.txt", " lead", "trail ", "q'\"q", "$(id)", "`id`", ";rm -rf x", "-rf", "*", "\\", "new\nline", "tab\t",
        "日本語", "👩‍👧", "é", "e\u0301", "\u202ertl", "%2e%2e", "%20", "+", "#", "a&b=c", ".hidden", "...", "x" * 255,
    ]  # fmt: skip
    files = [{"path": f"names/{name}", "data": name} for name in names]
    written = box.files.write_files(files, use_octet_stream=True)  # a form has no form for quotes in names
    assert [info.name for info in written] == names
    assert sorted(entry.name for entry in box.files.list("names")) == sorted(names)
    for name in names:
        assert box.files.read(f"names/{name}") == name
        assert box.files.get_info(f"names/{name}").size == len(name.encode())
    box.files.rename("names/日本語", "names/moved\n")
    assert box.files.read("names/moved\n") == "日本語"
    with raises(InvalidArgumentException, "too long"):
        box.files.write("names/" + "x" * 256, "")
    box.commands.run('python3 -c \'open(b"names/\\xff", "w")\'')
    assert len(box.files.list("names")) == len(names) + 1
    assert [box.files.write(path, "").path for path in ("../../tmp/up", "/a/../b", "x//y/./z")] == [
        "/tmp/up", "/b", "/home/user/x/y/z",
    ]  # fmt: skip


def test_links_and_what_is_no_file():  # BUG-23
    box = sandbox()
    box.commands.run(
        "mkdir -p l/real && echo keep > l/real/f && cd l && ln -s real dir && ln -s . loop && mkfifo fifo"
        " && mkdir tree && ln -s ../real tree/link"
    )
    assert [entry.path for entry in box.files.list("l/dir")] == ["/home/user/l/dir/f"]
    assert len(box.files.list("l", depth=20)) < 30
    for path in ("l/dir", "l/tree"):
        box.files.remove(path)
    assert box.files.read("l/real/f") == "keep\n"
    with raises(InvalidArgumentException):
        box.files.read("l/fifo", request_timeout=30)


def test_a_watch_whose_directory_goes_says_so():  # BUG-27
    files = sandbox().files
    files.make_dir("gone")
    handle = files.watch_dir("gone")
    files.write("gone/a", "1")
    files.remove("gone")
    names = []
    with raises(NotFoundException, "path '/home/user/gone' does not exist"):
        for _ in range(100):
            names += [event.name for event in handle.get_new_events()]
            time.sleep(0.1)
    assert "a" in names
    handle.stop()


# ---------------------------------------------------------------------------------------------------- lives and races


async def outcomes(*calls) -> list:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_many_pauses_and_connects_at_once():  # BUG-31
    box = await AsyncSandbox.create(timeout=600)
    try:
        await box.files.write("kept", "1")
        done = await outcomes(*[AsyncSandbox.pause(box.sandbox_id) for _ in range(20)])
        assert sorted(done, key=str) == [False] * 19 + [True], done
        done = await outcomes(*[AsyncSandbox.connect(box.sandbox_id, timeout=600) for _ in range(20)])
        assert {one.sandbox_id for one in done} == {box.sandbox_id}
        for _ in range(3):
            done = await outcomes(
                *[AsyncSandbox.pause(box.sandbox_id) for _ in range(4)],
                *[AsyncSandbox.connect(box.sandbox_id, timeout=600) for _ in range(4)],
            )
            assert not [one for one in done if isinstance(one, Exception)], done
        await box.connect(timeout=600)
        assert await box.files.read("kept") == "1"
    finally:
        assert await box.kill()


async def test_a_kill_beats_what_is_under_way():  # BUG-31
    box = await AsyncSandbox.create(timeout=600)
    paused, killed, connected = await outcomes(box.pause(), box.kill(), AsyncSandbox.connect(box.sandbox_id))
    assert killed is True
    for one in (paused, connected):
        assert isinstance(one, (bool, AsyncSandbox, NotFoundException)), one
    with raises(NotFoundException):
        await box.get_info()


async def in_flight(box) -> dict[str, asyncio.Task]:
    """One of each kind, which all go on for long."""
    command = await box.commands.run("echo up; exec sleep 600", background=True, timeout=0)
    reader = await box.commands.run("cat > /dev/null", background=True, stdin=True, timeout=0)
    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None, timeout=0)
    await box.commands.run("truncate -s 4G big")
    ended = asyncio.get_running_loop().create_future()
    await box.files.watch_dir(".", on_event=lambda _: None, on_exit=ended.set_result, timeout=0)

    async def download():
        async for _ in await box.files.read("big", format="stream"):
            await asyncio.sleep(0.01)

    async def write():
        while True:
            await box.commands.send_stdin(reader.pid, "x" * 1000)
            await asyncio.sleep(0.05)

    async def watch():
        raise await ended

    calls = {"command": command.wait(), "terminal": terminal.wait(), "download": download(), "stdin": write()}
    return {name: asyncio.ensure_future(call) for name, call in {**calls, "watch": watch()}.items()}


async def ends(how) -> None:
    box = await AsyncSandbox.create(timeout=600)
    try:
        calls = await in_flight(box)
        await asyncio.sleep(0.5)
        await how(box)
        async with within(30):
            done = dict(zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True))
        for name, error in done.items():
            assert isinstance(error, Exception), (name, error)
            if name != "download":  # the client's own kind, of a body that broke off
                assert isinstance(error, NOT_RUNNING), (name, repr(error))
                assert OVER in str(error) or "was not found" in str(error), (name, str(error))
        for call in (box.files.read("x"), box.files.write("x", ""), box.files.list("/"), box.commands.run("true")):
            with raises(NOT_RUNNING, "was not found"):
                await call
        assert await box.is_running() is False
    finally:
        await box.kill()


async def test_a_kill_ends_all_that_is_in_flight():  # BUG-40
    await ends(lambda box: box.kill())


async def test_a_timeout_ends_all_that_is_in_flight():  # BUG-40
    await ends(lambda box: box.set_timeout(0))


async def test_a_pause_ends_all_that_is_in_flight_but_the_watch():  # BUG-40
    box = await AsyncSandbox.create(timeout=600)
    try:
        handle = await box.commands.run("echo up; sleep 5; exit 6", background=True, timeout=0)
        waiting = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0.5)
        assert await box.pause()
        async with within(30):
            with raises(NOT_RUNNING, OVER):
                await waiting
        await box.connect(timeout=300)
        again = await box.commands.connect(handle.pid, timeout=60)
        with raises(CommandExitException) as caught:
            await again.wait()
        assert caught.error.exit_code == 6
    finally:
        await box.kill()


def test_refusals_have_their_kinds():  # BUG-40
    box = sandbox()
    for nowhere in ("sb00000000000000000000", "UPPER", "a b", "x" * 200, "é"):
        with raises(NotFoundException):
            Sandbox.get_info(nowhere)
    with raises(AuthenticationException, "401"):
        Sandbox.get_info(box.sandbox_id, api_key="e2b_" + "0" * 40)
    with raises(SandboxException, "400: timeout: must be from 0 to 14400"):
        Sandbox.connect(box.sandbox_id, timeout=10**6)
    with raises(SandboxException, "400: timeout: must be from 0 to 14400 seconds, not -1"):
        box.set_timeout(-1)
    with raises(SandboxException, "count"):
        box.fork(count=21)


async def test_the_longer_of_two_timeouts_holds():  # BUG-30
    box = await AsyncSandbox.create(timeout=60)
    try:
        await asyncio.gather(*[AsyncSandbox.connect(box.sandbox_id, timeout=n) for n in (60, 900, 120)])
        info = await box.get_info()
        assert (info.end_at - info.started_at).total_seconds() > 890
    finally:
        await box.kill()


async def test_a_sandbox_that_rests_does_not_age():  # BUG-30
    box = await AsyncSandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": False})
    try:
        await box.pause()
        await box.connect(timeout=5)
        for _ in range(300):  # and is paused again at the next end
            if (await box.get_info()).state == e2b.SandboxState.PAUSED:
                break
            await asyncio.sleep(0.2)
        assert (await box.get_info()).lifecycle["on_timeout"] == "pause"
        assert (await box.get_info()).state == e2b.SandboxState.PAUSED
        await asyncio.sleep(6)
        await box.connect(timeout=60)
    finally:
        assert await box.kill()


async def test_one_key_makes_one_sandbox():  # BUG-38
    since(2, 51)
    key = f"field-{time.time_ns()}"
    made = await asyncio.gather(*[AsyncSandbox.create(timeout=60, idempotency_key=key) for _ in range(5)])
    try:
        assert len({one.sandbox_id for one in made}) == 1
    finally:
        await made[0].kill()


async def test_a_pause_of_the_disk_alone_boots():  # BUG-29
    box = await async_sandbox()
    await box.commands.run("echo data > unsynced; (sleep 999 >/dev/null 2>&1 &)")
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = (await box.commands.run(boot)).stdout
    assert await box.pause(keep_memory=False)
    await box.connect(timeout=900)
    assert (await box.commands.run(f"{boot}; cat unsynced; pgrep -x sleep || echo none")).stdout.split()[1:] == [
        "data",
        "none",
    ]
    assert (await box.commands.run(boot)).stdout != before
    assert await box.pause()
    await box.connect(timeout=900)
    assert (await box.commands.run("cat unsynced")).stdout == "data\n"


async def test_many_commands_at_once_all_answer():
    box = await async_sandbox()
    done = await asyncio.gather(*[box.commands.run(f"echo {n}", timeout=110) for n in range(60)])
    assert [one.stdout for one in done] == [f"{n}\n" for n in range(60)]
