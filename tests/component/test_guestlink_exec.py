"""Commands through a real agent: text, bytes, streams, environment, users, directories, errors."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import InvalidRequest, SkerryError, Unavailable
from skerry.core.models import Output, ProcessEnd, ProcessSpec, PtySize, Stream
from support.guest_agent import SOMEONE, RunningAgent, python3, running_agent
from support.waiting import stands_still


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


@pytest.fixture
def open_dir(tmp_path: Path) -> Path:
    """A directory that every user may reach and write to."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o1777)
    return tmp_path


async def test_output_of_every_size_arrives_whole(agent: RunningAgent, tmp_path: Path) -> None:
    for size in (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 1_048_577):
        copy = tmp_path / "o"
        result = await agent.run(f"head -c {size} /dev/urandom | base64 -w0 | head -c {size} | tee {copy}")
        assert len(result.stdout) == size
        assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(copy.read_bytes()).digest()
    big = await agent.run("head -c 100000000 /dev/zero | tr '\\0' A", within=60)
    assert len(big.stdout) == 100_000_000
    assert big.stdout.count(b"A") == 100_000_000
    assert (await agent.run("echo alive")).stdout == b"alive\n"


async def test_a_slow_reader_slows_the_writer_and_memory_stays_bounded(agent: RunningAgent) -> None:
    stream = await agent.start("yes")
    before = agent.rss_kb()
    seen = 0
    async for event in stream:
        assert isinstance(event, Output)
        seen += len(event.data)
        if seen > 8_000_000:
            break
    [info] = await agent.link.processes()
    await stands_still(lambda: cpu_ticks(info.pid), 0.5)  # nobody reads: the writer has to
    assert agent.rss_kb() - before < 32_000
    await stream.aclose()
    assert await agent.link.kill_process(info.process_id)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_streams_are_live_separate_and_complete(agent: RunningAgent) -> None:
    stream = await agent.start("echo one; read -t 20 x < /dev/zero; echo two >&2; sleep 0.2; exit 7", stdin=True)
    first = await stream.__anext__()
    assert first == Output(Stream.STDOUT, 0, b"one\n")  # before the command is over
    await stream.aclose()
    for _ in range(100):
        result = await agent.run("printf X; printf Y >&2; exit 7")
        assert (result.stdout, result.stderr) == (b"X", b"Y")
        assert result.status is not None
        assert result.status.exit_code == 7
    expected = b"".join(b"%d\n" % n for n in range(1, 20001))
    for _ in range(30):
        result = await agent.run("seq 1 20000; exit 3")
        assert result.stdout == expected
        assert result.status is not None
        assert result.status.exit_code == 3


async def test_bytes_are_bytes(agent: RunningAgent) -> None:
    assert (await agent.run(r"printf '\xff\xfeok\n'")).stdout == b"\xff\xfeok\n"
    assert (await agent.run(r"printf 'a\0b' >&2")).stderr == b"a\0b"
    emoji = await agent.run(argv=(python3(), "-c", "print('\U0001f600' * 100001)"))
    assert emoji.stdout.decode() == "\U0001f600" * 100001 + "\n"


@pytest.mark.parametrize(
    ("text", "stdout"),
    [
        ("cat <<'EOF'\nit's \"quoted\" $HOME `id`\n\tindented\nEOF", b'it\'s "quoted" $HOME `id`\n\tindented\n'),
        ("echo a # trailing comment", b"a\n"),
        ("echo b \\\n  c", b"b c\n"),
        ("true &", b""),
        ("echo d;", b"d\n"),
    ],
)
async def test_shell_text_is_not_touched(agent: RunningAgent, text: str, stdout: bytes) -> None:
    result = await agent.run(text)
    assert result.stdout == stdout
    assert result.status is not None
    assert result.status.exit_code == 0


@pytest.mark.parametrize("text", ["if true; then", "echo 'unterminated"])
async def test_a_syntax_error_is_the_shells_own(agent: RunningAgent, text: str) -> None:
    result = await agent.run(text)
    assert result.status is not None
    assert result.status.exit_code == 2
    assert result.stderr


async def test_argv_is_verbatim_and_long_text_works_up_to_the_kernels_limit(agent: RunningAgent) -> None:
    result = await agent.run(argv=("sh", "-c", 'echo "$1"', "x", "a b  c"))
    assert result.stdout == b"a b  c\n"
    longest = "echo " + "x" * (128 * 1024 - 1 - 5)
    assert len((await agent.run(longest)).stdout) == 128 * 1024 - 1 - 5 + 1
    with pytest.raises(InvalidRequest) as e:
        await agent.run(longest + "y")
    assert e.value.code == "command_too_long"
    assert e.value.problems[0].allowed == 131071
    many = ("true", *["z" * 100_000] * 15)
    assert (await agent.run(argv=many)).status
    with pytest.raises(InvalidRequest) as e:
        await agent.run(argv=("true", *["z" * 100_000] * 40))
    assert e.value.code == "command_too_long"


async def test_one_command_does_not_poison_the_next(agent: RunningAgent) -> None:
    assert exit_code(await agent.run("set -euo pipefail; false")) == 1
    assert exit_code(await agent.run("exit 3")) == 3
    assert exit_code(await agent.run("exec sleep 0")) == 0
    await agent.run("cd /tmp; export LEAK=1; umask 077; ulimit -n 16")
    result = await agent.run("pwd; echo [$LEAK]; umask; [ $(ulimit -n) -gt 16 ] && echo many", cwd="/usr")
    assert result.stdout == b"/usr\n[]\n0022\nmany\n"
    await agent.run('trap "" TERM INT; stty -echo 2>/dev/null; exec 1>&-')
    assert (await agent.run("echo d")).stdout == b"d\n"


def exit_code(result: object) -> int | None:
    return result.status.exit_code  # type: ignore[attr-defined]


async def test_a_removed_default_directory_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with running_agent(default_cwd=str(home)) as agent:
        assert (await agent.run("pwd")).stdout.decode().strip() == str(home)
        home.rmdir()
        with pytest.raises(InvalidRequest) as e:
            await agent.run("pwd")
        assert e.value.code == "cwd_not_found"
        assert str(home) in e.value.message
        assert (await agent.run("pwd", cwd="/")).stdout == b"/\n"


async def test_what_cannot_start_says_why_before_any_stream(agent: RunningAgent, open_dir: Path) -> None:
    script = open_dir / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    closed = open_dir / "closed"
    closed.mkdir(mode=0o700)
    cases: list[tuple[dict[str, object], str, str]] = [
        ({"argv": ("true",), "cwd": "/does/not/exist"}, "cwd_not_found", "/does/not/exist"),
        ({"argv": ("true",), "cwd": "/etc/passwd"}, "cwd_not_a_directory", "/etc/passwd"),
        ({"argv": ("true",), "user": "nosuchuser"}, "user_not_found", "nosuchuser"),
        ({"argv": ("/no/such/binary",)}, "command_not_found", "/no/such/binary"),
        ({"argv": ("no-such-program",)}, "command_not_found", "no-such-program"),
        ({"argv": (str(script),)}, "command_not_found", "interpreter"),
        ({"argv": ("/etc/passwd",)}, "command_not_executable", "/etc/passwd"),
        ({"argv": ("/etc",)}, "command_not_executable", "/etc"),
        ({"argv": ("true",), "cwd": str(closed), "user": SOMEONE}, "permission_denied", str(closed)),
    ]
    for spec, code, named in cases:
        with pytest.raises(SkerryError) as e:
            await agent.run(**spec)
        assert e.value.code == code, spec
        assert named in e.value.message
    assert await agent.link.processes() == []  # no handle is left of them
    assert exit_code(await agent.run("no-such-program")) == 127
    assert exit_code(await agent.run("/etc/passwd")) == 126


async def test_the_process_limit_is_typed(agent: RunningAgent) -> None:
    # A user's processes are counted by uid over the whole machine, so this one has a uid to itself.
    import resource

    soft, hard = resource.prlimit(agent.process.pid, resource.RLIMIT_NPROC)
    # Two, since the kernel counts a process only once it has become its user's.
    holder = await agent.start("sleep 60 & echo up; wait", user="49871", background=True)
    assert isinstance(await anext(holder), Output)
    try:
        resource.prlimit(agent.process.pid, resource.RLIMIT_NPROC, (1, hard))
        with pytest.raises(Unavailable) as e:
            await agent.run(argv=("true",), user="49871")
        assert e.value.code == "process_limit"
    finally:
        resource.prlimit(agent.process.pid, resource.RLIMIT_NPROC, (soft, hard))
        await agent.link.kill_process(holder.process.process_id)
        await holder.aclose()
    assert exit_code(await agent.run(argv=("true",), user="49871")) == 0


NASTY = {
    "B": "line1\nline2",
    "C": "$(touch /tmp/skerry-pwned)`id`\"'\\",
    "D": "",
    "E": "=x=y",
    "F": "snow \u2603",
}


async def test_environment_has_the_same_layers_on_every_path() -> None:
    async with running_agent(env={"A": "create", **NASTY}) as agent:
        for path in ({}, {"background": True}, {"pty": PtySize(80, 24)}, {"user": SOMEONE}):
            result = await agent.run(argv=("env", "-0"), **path)
            got = dict(pair.split("=", 1) for pair in (result.stdout + result.pty).decode().split("\0") if pair)
            expected = {"A": "create", **NASTY}
            if "pty" in path:
                expected["B"] = "line1\r\nline2"
            assert {k: got[k] for k in expected} == expected
            assert got["PATH"].startswith("/usr/local/sbin:")
            assert got["HOME"] == ("/" if "user" in path else "/root")
            assert got["USER"] == got["LOGNAME"] == (SOMEONE if "user" in path else "root")
        result = await agent.run("echo $A", env={"A": "call"})
        assert result.stdout == b"call\n"
        assert not Path("/tmp/skerry-pwned").exists()
        for bad in ({"A=B": "x"}, {"X": "a\0b"}, {"": "x"}):
            with pytest.raises(InvalidRequest):
                await agent.run("true", env=bad)
        with pytest.raises(InvalidRequest) as e:
            await agent.run("true", env={"X": "y" * 1_048_576})
        assert e.value.code == "command_too_long"


async def test_a_user_has_its_ids_no_capability_and_no_way_back(agent: RunningAgent) -> None:
    result = await agent.run("cat /proc/self/status; ls -l /proc/self/fd", user=SOMEONE)
    lines = dict(line.split(":", 1) for line in result.stdout.decode().split("\n") if ":\t" in line)
    assert lines["Uid"].split() == [SOMEONE] * 4
    assert lines["Gid"].split() == [SOMEONE] * 4
    assert lines["Groups"].split() == [SOMEONE]
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(lines[name], 16) == 0
    assert int(lines["SigBlk"], 16) == 0
    assert int(lines["SigIgn"], 16) & 0x7FFFFFFF == 0  # 32 and 33 are the C library's own
    descriptors = [line for line in result.stdout.decode().split("\n") if " -> " in line]
    assert len(descriptors) == 4  # the three, and ls's own
    again = await agent.run(argv=(python3(), "-c", "import os; os.setuid(0)"), user=SOMEONE)
    assert b"PermissionError" in again.stderr
    root = await agent.run("cat /proc/self/status")
    assert b"Uid:\t0\t0\t0\t0" in root.stdout
    assert int(root.stdout.decode().split("CapEff:")[1].split()[0], 16) != 0


async def test_the_agent_is_closed_to_other_users(agent: RunningAgent) -> None:
    pid = agent.process.pid
    result = await agent.run(
        f"for f in environ mem maps fd/0 cwd; do cat /proc/{pid}/$f >/dev/null 2>&1 && echo $f; done; kill -0 {pid}",
        user=SOMEONE,
    )
    assert result.stdout == b""
    assert exit_code(result) != 0
    with pytest.raises(SkerryError) as e:
        await agent.link.read_file(f"/proc/{pid}/environ", user=SOMEONE)
    assert e.value.code == "permission_denied"


async def test_standard_streams_can_be_opened_again_by_the_user(agent: RunningAgent) -> None:
    result = await agent.run("echo out > /dev/stdout; echo err > /dev/stderr", user=SOMEONE)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_paths_of_directories_are_the_users(agent: RunningAgent, open_dir: Path) -> None:
    assert (await agent.run("pwd", cwd="~", user="root")).stdout == b"/root\n"
    assert (await agent.run("pwd")).stdout == b"/root\n"
    assert (await agent.run("pwd", user=SOMEONE)).stdout == b"/\n"
    inner = open_dir / "a" / "b"
    inner.mkdir(parents=True)
    result = await agent.run("pwd", cwd=f"{inner}/../b/.", user=SOMEONE)
    assert result.stdout.decode().strip() == str(inner)


async def test_a_start_is_never_repeated(agent: RunningAgent) -> None:
    spec = ProcessSpec("prfixed", argv=("true",))
    stream = await agent.link.start(spec)
    await stream.aclose()
    with pytest.raises(SkerryError) as e:
        await agent.link.start(spec)
    assert e.value.code == "process_exists"


async def test_no_bash_means_sh() -> None:
    """In a private root where /bin/bash is hidden."""
    assert shutil.which("unshare")
    hide = 'mount -t tmpfs none /mnt && touch /mnt/x && mount --bind /mnt/x /bin/bash && exec "$@"'
    async with running_agent(wrapper=("unshare", "-m", "sh", "-c", hide, "sh")) as agent:
        result = await agent.run("echo $0")
        assert result.stdout == b"/bin/sh\n"


async def test_signal_deaths_are_told_from_exits(agent: RunningAgent) -> None:
    for text, name in (("kill -9 $$", "SIGKILL"), ("kill -TERM $$", "SIGTERM"), ("kill -ABRT $$", "SIGABRT")):
        status = (await agent.run(text)).status
        assert status is not None
        assert (status.reason, status.exit_code, status.signal) == (ProcessEnd.SIGNAL, None, name)
    status = (await agent.run("exit 137")).status
    assert status is not None
    assert (status.reason, status.exit_code, status.signal) == (ProcessEnd.EXIT, 137, None)


async def test_sigpipe_kills_as_it_should(agent: RunningAgent) -> None:
    result = await agent.run("yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert result.stdout == b"y\n141\n"


async def test_many_commands_at_once_and_nothing_is_left(agent: RunningAgent) -> None:
    before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    results = await asyncio.gather(*(agent.run(f"echo {n}; exit {n % 5}") for n in range(100)))
    assert [r.stdout for r in results] == [b"%d\n" % n for n in range(100)]
    for _ in range(20):
        await agent.run("true")  # the last 64 are remembered; each keeps one descriptor
    after = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    assert after - before <= 64 + 8  # and the connections that are just being closed
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()
    assert children == []
