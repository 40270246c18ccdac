"""Processes over time, through a real agent: deadlines, trees, background, stdin, terminals, attach."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import Conflict, InvalidRequest, NotFound, OutcomeUnknown
from skerry.core.models import Exited, Gap, Output, ProcessEnd, ProcessState, PtySize, Stream
from skerry.guest.process import KEEP_MAX, UNREAD_MAX
from support.guest_agent import RunningAgent, collect, own_cgroup, python3, running_agent
from support.waiting import stands_still, until


@pytest.fixture(params=["cgroup", "session"])
async def agent(request: pytest.FixtureRequest) -> AsyncIterator[RunningAgent]:
    """With cgroup v2 for the trees, and without."""
    if request.param == "session":
        async with running_agent() as running:
            yield running
        return
    with own_cgroup() as cgroup:
        async with running_agent("--cgroup", str(cgroup)) as running:
            yield running
        for procs in cgroup.rglob("cgroup.procs"):  # what the agent left to us is empty in a moment
            await until(lambda procs=procs: not procs.read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_with(marker: str) -> list[int]:
    """Processes that have this text in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if marker.encode() in Path(f"/proc/{entry}/cmdline").read_bytes() and alive(int(entry)):
                    found.append(int(entry))
            except OSError:
                continue
    return found


async def bytes_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


# ------------------------------------------------------------------------------------------------------------ deadline


async def test_a_deadline_keeps_the_output_and_stops_the_tree(agent: RunningAgent, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    result = await agent.run(
        f"echo before; (while :; do date >> {beat}; sleep 0.05; done) & sleep 600.125", timeout_ms=500
    )
    assert result.stdout == b"before\n"
    assert result.status is not None
    assert (result.status.reason, result.status.signal) == (ProcessEnd.DEADLINE, "SIGTERM")
    size = beat.stat().st_size
    await asyncio.sleep(0.3)
    assert beat.stat().st_size == size
    assert pids_with("600.125") == []


async def test_a_deadline_is_kept_against_those_who_ignore_it(agent: RunningAgent) -> None:
    result = await agent.run("trap '' TERM; echo stubborn; sleep 601.125; sleep 601.125", timeout_ms=300)
    assert result.stdout == b"stubborn\n"
    assert result.status is not None
    assert (result.status.reason, result.status.signal) == (ProcessEnd.DEADLINE, "SIGKILL")
    assert pids_with("601.125") == []
    code = "import os,time; os.fork() and os.fork(); time.sleep(602.125)"
    result = await agent.run(argv=(python3(), "-c", code), timeout_ms=500)
    assert result.status is not None
    assert result.status.reason is ProcessEnd.DEADLINE
    assert pids_with("602.125") == []


async def test_a_deadline_lets_children_end_well(agent: RunningAgent) -> None:
    child = "sh -c 'trap \"sleep 0.2; echo saved; exit 0\" TERM; while :; do sleep 0.05; done'"
    result = await agent.run(f"{child} & wait", timeout_ms=300)
    assert b"saved\n" in result.stdout
    assert result.status is not None
    assert result.status.reason is ProcessEnd.DEADLINE


async def test_no_deadline_unless_asked(agent: RunningAgent) -> None:
    result = await agent.run("sleep 0.3; echo done")
    assert result.stdout == b"done\n"
    with pytest.raises(InvalidRequest):
        await agent.run("true", timeout_ms=0)


async def test_a_deadline_holds_while_nobody_reads(agent: RunningAgent) -> None:
    stream = await agent.start("yes", timeout_ms=500)
    await stream.__anext__()
    await asyncio.sleep(1.0)  # the socket is full, the pump has nowhere to put it
    result = await collect_rest(stream)
    assert result is not None
    assert result.status.reason is ProcessEnd.DEADLINE


async def collect_rest(stream: object) -> Exited | None:
    last = None
    async for event in stream:  # type: ignore[attr-defined]
        last = event
    return last if isinstance(last, Exited) else None


# ---------------------------------------------------------------------------------------------------------- background


async def test_a_child_that_keeps_the_pipe_open_does_not_hold_the_call(agent: RunningAgent, tmp_path: Path) -> None:
    count = tmp_path / "count"
    line = "noise" * 1000
    noise = f"nohup sh -c 'n=0; while :; do echo {line}; n=$((n+1)); echo $n > {count}; done' & disown; echo done"
    for text, said in (
        ("sleep 603.125 & echo started", b"started\n"),
        ("(setsid sleep 603.125 >/dev/null 2>&1 &) ; echo detached", b"detached\n"),
    ):
        result = await agent.run(text)
        assert result.stdout == said
        assert result.status is not None
        assert result.status.exit_code == 0
    result = await agent.run(noise)
    assert b"done\n" in result.stdout
    assert len(pids_with("603.125")) == 2
    before = agent.rss_kb()
    # It goes on writing, far more than a pipe holds: neither a stop nor SIGPIPE.
    await until(lambda: count.exists() and int(count.read_text() or 0) > 200)
    assert agent.rss_kb() - before < 16_000
    await agent.run("pkill -KILL -f 603.125; pkill -KILL -f noisenoise")


async def test_processes_are_listed_found_again_and_killed_with_all_they_started(agent: RunningAgent) -> None:
    marker = "604.125"
    code = f"import os,time; os.fork() or (os.setsid(), os.fork() and os._exit(0)); time.sleep({marker})"
    inner = f"sleep {marker} & {python3()} -c '{code}' & wait"
    stream = await agent.start(inner, background=True, tag="worker")
    process_id = stream.process.process_id
    await stream.aclose()
    await until(lambda: len(pids_with(marker)) >= 4)
    [info] = await agent.link.processes()
    assert (info.process_id, info.tag, info.background, info.state) == (
        process_id,
        "worker",
        True,
        ProcessState.RUNNING,
    )
    expected = 0 if Path("/proc/self/cgroup").exists() and agent_has_cgroup(agent) else 1
    assert await agent.link.kill_process(process_id)
    await until(lambda: len(pids_with(marker)) <= expected)
    for pid in pids_with(marker):
        os.kill(pid, 9)
    again = await agent.link.attach(process_id)
    result = await collect(again)
    assert result.status is not None
    assert (result.status.reason, result.status.signal) == (ProcessEnd.KILLED, "SIGKILL")
    assert not await agent.link.kill_process(process_id)
    for call in (agent.link.kill_process("prnever"), agent.link.attach("prnever"), agent.link.signal("prnever", "INT")):
        with pytest.raises(NotFound) as e:
            await call
        assert e.value.code == "process_not_found"
    with pytest.raises(Conflict) as late:
        await agent.link.signal(process_id, "INT")
    assert late.value.code == "process_exited"


def agent_has_cgroup(agent: RunningAgent) -> bool:
    return "--cgroup" in agent.process.args  # type: ignore[operator]


async def test_what_one_command_left_behind_is_not_anothers(agent: RunningAgent) -> None:
    """Commands that are over at once, with a child that was orphaned before its place could be seen to."""
    for _ in range(20):
        await agent.run(argv=("sh", "-c", "(setsid sleep 702.5 &) ; sleep 702.5 & exit 0"))
        stream = await agent.start("sleep 60")
        assert await agent.link.kill_process(stream.process.process_id)
        await collect(stream)
    await until(lambda: len(pids_with("702.5")) == 40)
    await agent.run("pkill -KILL -f 702.5")


async def test_signals_reach_the_group(agent: RunningAgent) -> None:
    stream = await agent.start("trap 'echo int; exit 9' INT; echo ready; while :; do sleep 0.05; done")
    assert isinstance(await stream.__anext__(), Output)
    with pytest.raises(InvalidRequest):
        await agent.link.signal(stream.process.process_id, "SIGNOSUCH")
    await agent.link.signal(stream.process.process_id, "int")
    events = [event async for event in stream]
    assert isinstance(events[0], Output)
    assert events[0].data == b"int\n"
    assert isinstance(events[-1], Exited)
    assert events[-1].status.exit_code == 9


async def test_the_exit_is_seen_only_when_all_output_can_be_read(agent: RunningAgent) -> None:
    for _ in range(20):
        stream = await agent.start("seq 1 20000; exit 5", background=True)
        await stream.aclose()
        async with asyncio.timeout(60):
            while (info := await found(agent, stream.process.process_id)).exit is None:
                await asyncio.sleep(0)
        assert info.exit is not None
        assert info.exit.exit_code == 5
        result = await collect(await agent.link.attach(stream.process.process_id))
        assert len(result.stdout) == 108_894
        assert result.gaps == []


async def found(agent: RunningAgent, process_id: str) -> object:
    return next(p for p in await agent.link.processes() if p.process_id == process_id)


# -------------------------------------------------------------------------------------------------------------- attach


async def test_a_lost_reader_comes_back_to_everything(agent: RunningAgent) -> None:
    """A foreground command waits for its reader once what is kept is full, and no byte is lost."""
    total = 6 * KEEP_MAX
    stream = await agent.start(f"seq 1 100000000 | head -c {total}; exit 4")
    taken = bytearray()
    while len(taken) < 300_000:
        event = await stream.__anext__()
        assert isinstance(event, Output)
        taken += event.data
    agent.link.abort()
    with pytest.raises(OutcomeUnknown):
        await collect(stream)
    await asyncio.sleep(0.3)
    [info] = await agent.link.processes()
    assert info.state is ProcessState.RUNNING
    result = await collect(await agent.link.attach(info.process_id, stdout_offset=len(taken)))
    assert result.gaps == []
    everything = bytes(taken) + result.stdout
    assert len(everything) == total
    assert everything.startswith(b"1\n2\n3\n")
    lines = everything.split(b"\n")
    assert lines[5000] == b"5001"
    assert [int(n) for n in lines[-1000:-1]] == list(range(int(lines[-1000]), int(lines[-1000]) + 999))
    assert result.status is not None
    assert result.status.exit_code == 4


async def test_a_background_process_goes_on_and_the_gap_is_told(agent: RunningAgent) -> None:
    total = 3 * KEEP_MAX
    stream = await agent.start(f"head -c {total} /dev/zero; echo end", background=True)
    await stream.aclose()
    async with asyncio.timeout(60):
        while (await found(agent, stream.process.process_id)).exit is None:
            await asyncio.sleep(0.02)
    result = await collect(await agent.link.attach(stream.process.process_id))
    [gap] = result.gaps
    assert isinstance(gap, Gap)
    assert gap.offset == 0
    assert gap.missed + len(result.stdout) == total + 4
    assert UNREAD_MAX <= len(result.stdout) <= KEEP_MAX + 256 * 1024
    assert result.stdout.endswith(b"end\n")


async def test_two_readers_get_the_same(agent: RunningAgent) -> None:
    stream = await agent.start("for i in $(seq 1 300); do echo $i; done; sleep 0.2; echo last; exit 2")
    other = await agent.link.attach(stream.process.process_id)
    first, second = await asyncio.gather(collect(stream), collect(other))
    assert first.stdout == second.stdout
    assert first.status == second.status
    third = await collect(await agent.link.attach(stream.process.process_id, stdout_offset=len(first.stdout) - 5))
    assert third.stdout == b"last\n"


async def test_what_comes_before_an_offset_can_be_had_too(agent: RunningAgent) -> None:
    stream = await agent.start("printf 0123456789; exec sleep 600", background=True)
    process_id = stream.process.process_id
    await anext(stream)
    for offset, before, begins, seen in (
        (4, 0, 4, b"456789"), (4, 3, 4, b"123456789"), (4, 9, 4, b"0123456789"), (99, 0, 10, None), (99, 2, 10, b"89"),
    ):  # fmt: skip
        reader = await agent.link.attach(process_id, stdout_offset=offset, before=before, follow=seen is None)
        assert reader.begins == {Stream.STDOUT: begins, Stream.STDERR: 0}
        if seen is not None:
            event = await anext(reader)
            assert isinstance(event, Output)
            assert (event.offset, event.data) == (max(0, begins - before), seen)
        await reader.aclose()
    await agent.link.kill_process(process_id)


# --------------------------------------------------------------------------------------------------------------- stdin


async def test_without_stdin_there_is_an_end_of_file(agent: RunningAgent) -> None:
    for text in ("cat", "read x; echo got=$x", python3()):
        result = await agent.run(text)
        assert result.status is not None
        assert result.status.signal is None
    with pytest.raises(Conflict) as e:
        stream = await agent.start("sleep 5")
        try:
            await agent.link.write_stdin(stream.process.process_id, bytes_of(b"x"))
        finally:
            await agent.link.kill_process(stream.process.process_id)
    assert e.value.code == "stdin_not_open"


async def test_ten_megabytes_of_stdin_and_then_the_end(agent: RunningAgent) -> None:
    stream = await agent.start("cat; echo EOF_SEEN", stdin=True, background=True)
    process_id = stream.process.process_id
    reading = asyncio.create_task(collect(stream))
    assert await agent.link.write_stdin(process_id, bytes_of(b"a\n")) == 2
    big = bytes(range(256)) * 40_960
    assert await agent.link.write_stdin(process_id, bytes_of(big[:5_000_000], b"", big[5_000_000:])) == len(big)
    await agent.link.close_stdin(process_id)
    result = await reading
    assert result.stdout == b"a\n" + big + b"EOF_SEEN\n"
    assert result.status is not None
    assert result.status.exit_code == 0
    for call in (agent.link.write_stdin(process_id, bytes_of(b"late")), agent.link.close_stdin(process_id)):
        with pytest.raises(Conflict) as e:
            await call
        assert e.value.code == "process_exited"


async def test_stdin_closed_twice_and_written_after(agent: RunningAgent) -> None:
    stream = await agent.start("cat >/dev/null; sleep 20", stdin=True)
    process_id = stream.process.process_id
    await agent.link.close_stdin(process_id)
    for call in (agent.link.close_stdin(process_id), agent.link.write_stdin(process_id, bytes_of(b"x"))):
        with pytest.raises(Conflict) as e:
            await call
        assert e.value.code == "stdin_closed"
    await agent.link.kill_process(process_id)


async def test_a_writer_is_let_go_when_the_process_ends(agent: RunningAgent) -> None:
    """One blocked in the middle of the pipe, one that waits for its own caller."""
    forever = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * 4_000_000
        await forever.wait()

    async def idle() -> AsyncIterator[bytes]:
        yield b"x"
        await forever.wait()

    for data in (endless(), idle()):
        stream = await agent.start("sleep 600.25 & sleep 0.4", stdin=True)
        with pytest.raises(Conflict) as e:
            async with asyncio.timeout(60):
                await agent.link.write_stdin(stream.process.process_id, data)
        assert e.value.code == "process_exited"
        await data.aclose()  # type: ignore[attr-defined]
    await agent.run("pkill -KILL -f 600.25")


async def test_a_reader_of_stdin_that_is_gone_is_told(agent: RunningAgent) -> None:
    stream = await agent.start("exec 0<&-; sleep 20", stdin=True)
    await asyncio.sleep(0.2)
    with pytest.raises(Conflict) as e:
        await agent.link.write_stdin(stream.process.process_id, bytes_of(b"x" * 1_000_000))
    assert e.value.code == "stdin_closed"
    await agent.link.kill_process(stream.process.process_id)


# ------------------------------------------------------------------------------------------------------------ terminals


async def test_input_that_ends_its_process_was_taken_whole(agent: RunningAgent) -> None:
    stream = await agent.start("read line; exit 3", stdin=True)
    over = asyncio.create_task(collect(stream))

    async def until_it_is_over() -> AsyncIterator[bytes]:
        yield b"go\n"
        await over  # only now does the agent hear that this was all

    assert await agent.link.write_stdin(stream.process.process_id, until_it_is_over()) == 3


async def test_a_terminal_is_one(agent: RunningAgent) -> None:
    size = PtySize(101, 37)
    result = await agent.run("tty; stty size; echo $TERM; ps -o tpgid=,pgid= -p $$; echo ok > /dev/tty", pty=size)
    lines = result.pty.decode().split("\r\n")
    assert lines[0].startswith("/dev/pts/")
    assert lines[1] == "37 101"
    assert lines[2] == "xterm-256color"
    assert len(set(lines[3].split())) == 1  # in the foreground of its own terminal
    assert lines[4] == "ok"


async def test_a_terminal_takes_a_paste_of_200_kb(agent: RunningAgent) -> None:
    paste = b"".join(b"%06d %s\n" % (n, b"x" * 60) for n in range(3000))
    assert len(paste) > 200_000
    stream = await agent.start(f"stty -echo; echo ready; head -c {len(paste)} | md5sum", pty=PtySize(80, 24))
    assert b"ready" in (await stream.__anext__()).data  # type: ignore[union-attr]
    import hashlib

    assert await agent.link.write_stdin(stream.process.process_id, bytes_of(paste)) == len(paste)
    rest = b"".join([e.data async for e in stream if isinstance(e, Output)])
    assert hashlib.md5(paste).hexdigest().encode() in rest


async def test_a_terminal_carries_every_byte(agent: RunningAgent, tmp_path: Path) -> None:
    every = bytes(range(256))
    (tmp_path / "every").write_bytes(every)
    result = await agent.run(f"stty raw; cat {tmp_path / 'every'}", pty=PtySize(80, 24))
    assert result.pty == every


async def test_a_terminal_is_resized_interrupted_and_ended_by_end_of_file(agent: RunningAgent) -> None:
    text = "trap 'stty size' WINCH; trap 'echo int' INT; echo ready; while read -r l; do echo got $l; done; echo bye"
    stream = await agent.start(text, pty=PtySize(80, 24))
    process_id = stream.process.process_id
    seen = bytearray()

    async def see(what: bytes) -> None:
        async with asyncio.timeout(60):
            while what not in seen:
                event = await stream.__anext__()
                assert isinstance(event, Output), event
                seen.extend(event.data)

    await see(b"ready")
    await agent.link.resize_pty(process_id, PtySize(132, 50))
    await agent.link.write_stdin(process_id, bytes_of(b"a\n"))
    await see(b"50 132")
    await see(b"got a")
    await agent.link.write_stdin(process_id, bytes_of(b"\x03"))
    await agent.link.write_stdin(process_id, bytes_of(b"b\n"))
    await see(b"got b")
    await agent.link.close_stdin(process_id)
    await see(b"bye")
    assert (await collect_rest(stream)) is not None
    with pytest.raises(Conflict):
        await agent.link.resize_pty(process_id, PtySize(80, 24))


async def test_what_was_put_under_nohup_in_a_terminal_survives_it(agent: RunningAgent) -> None:
    result = await agent.run("nohup sleep 605.125 >/dev/null 2>&1 & sleep 0.3; echo out", pty=PtySize(80, 24))
    assert b"out" in result.pty
    assert len(pids_with("605.125")) == 1
    await agent.run("pkill -KILL -f 605.125")


async def test_idle_costs_nothing(agent: RunningAgent) -> None:
    """No thread of the agent runs while nothing happens: its CPU time and its context switches stand still."""
    streams = [await agent.start("exec sleep 606", pty=PtySize(80, 24)) for _ in range(20)]
    await stands_still(lambda: switches(agent.process.pid), 1.5)
    for stream in streams:
        await agent.link.kill_process(stream.process.process_id)


def switches(pid: int) -> dict[str, str]:
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        status = Path(f"/proc/{pid}/task/{task}/status").read_text()
        found[task] = status.split("nonvoluntary_ctxt_switches")[0].split("voluntary_ctxt_switches:")[1].split()[0]
    return found


async def test_ends_that_nobody_was_told_are_remembered_though_many(agent: RunningAgent) -> None:
    streams = [await agent.start(f"exit {n % 100}", background=True) for n in range(150)]
    for stream in streams:
        await stream.aclose()
    for _ in range(80):
        await agent.run("true")
    for n, stream in enumerate(streams):
        result = await collect(await agent.link.attach(stream.process.process_id))
        assert result.status is not None
        assert result.status.exit_code == n % 100
    await agent.run("true")
    assert len(await agent.link.processes()) <= 65
