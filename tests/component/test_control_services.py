"""The services over a real database and a node whose faults we set."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from skerry.control import Outcome, Principal, Scope
from skerry.core import ids
from skerry.core.errors import (
    Conflict,
    Forbidden,
    Gone,
    GuestUnreachable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    SkerryError,
    Unauthenticated,
    Unavailable,
)
from skerry.core.lifecycle import EndReason, State
from skerry.core.models import Exited, Output, PtySize, Sandbox, SandboxSpec, Stream
from skerry.store import Project, open_store
from support.house import SPEC, House, command, opened, until
from support.postgres import new_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    return new_database(request.getfixturevalue("postgres_server"), ids.new_id("db"))


@pytest.fixture
async def house(url: str) -> AsyncIterator[House]:
    async with opened(url) as made:
        yield made


# ------------------------------------------------------------------------------------------------------------ create


async def test_create_runs_it_and_never_gives_the_environment_back(house: House) -> None:
    made = await house.create(SandboxSpec(env={"A": "canary"}, metadata={"job": "7"}))
    assert made.state is State.RUNNING
    assert made.started_at is not None
    assert made.expires_at == made.started_at + timedelta(minutes=5)
    assert made == await house.get(made.id) == (await house.all())[0]
    assert made.spec.env == {}
    assert house.node.vms[made.id].spec.env == {"A": "canary"}
    assert await house.actions(made.id) == [("sandbox.requested", Outcome.OK), ("sandbox.created", Outcome.OK)]
    async with house.store.read() as tx:
        for table in ("sandboxes", "audit_events", "idempotency"):
            rows = (await tx.connection.execute(text(f"SELECT * FROM {table}"))).all()
            assert "canary" not in repr(rows)


async def test_a_wrong_request_changes_nothing(house: House) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await house.create(SandboxSpec(cpu=9, memory_mb=1, env={"A B": "x"}))
    assert [p.field for p in refused.value.problems] == ["cpu", "memory_mb", "env.A B"]
    with pytest.raises(NotFound) as missing:
        await house.create(SandboxSpec(template="nope"))
    assert missing.value.code == "template_not_found"
    assert missing.value.context["available"] == "base"
    with pytest.raises(InvalidRequest):
        await house.create(idempotency_key="a b")
    assert await house.all() == []
    assert house.node.creates == 0


@pytest.mark.parametrize(
    "fault",
    [
        InternalError("no tap", code="vm_start_failed", step="tap"),
        Unavailable("full", code="node_full"),
        ZeroDivisionError("a bug"),
    ],
)
async def test_a_create_that_fails_leaves_nothing_and_may_be_tried_again(house: House, fault: Exception) -> None:
    house.node.faults.create = fault
    with pytest.raises(SkerryError) as failed:
        await house.create(idempotency_key="k")
    assert failed.value.code in {"vm_start_failed", "node_full"}
    (row,) = await house.all()
    assert (row.state, row.end_reason) == (State.ERROR, EndReason.START_FAILED)
    assert row.error
    assert house.node.vms == {}
    assert (await house.actions(row.id))[-1] == ("sandbox.created", Outcome.FAILED)
    with pytest.raises(Gone) as over:
        await house.services.processes.list(house.me, row.id)
    assert over.value.code == "sandbox_failed"
    house.node.faults.create = None
    assert (await house.create(idempotency_key="k")).state is State.RUNNING


async def test_a_vm_that_never_comes_up_is_given_up(house: House) -> None:
    house.config = replace(house.config, create_deadline_s=0.2)
    await house.restart()
    house.node.faults.create_gate = asyncio.Event()
    with pytest.raises(InternalError) as failed:
        await house.create()
    assert failed.value.code == "vm_start_failed"
    assert house.node.vms == {}


async def test_the_tenants_limit(house: House) -> None:
    async with house.store.write() as tx:
        await tx.tenants.set_limits(house.me.tenant_id, max_sandboxes=2, max_lifetime_ms=86_400_000)
    results = await asyncio.gather(*(house.create() for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(r, Sandbox) for r in results) == 2
    refused = [r for r in results if isinstance(r, LimitExceeded)]
    assert len(refused) == 4
    assert refused[0].context["limit"] == 2
    first = next(r for r in results if isinstance(r, Sandbox))
    await house.services.sandboxes.kill(house.me, first.id)
    assert (await house.create()).state is State.RUNNING


async def test_twenty_creates_with_one_key_are_one_sandbox(house: House) -> None:
    house.node.faults.create_delay = 0.1
    made = await asyncio.gather(*(house.create(idempotency_key="same") for _ in range(20)))
    assert len({m.id for m in made}) == 1
    assert all(m.state is State.RUNNING for m in made)
    assert house.node.creates == 1
    again = await house.create(idempotency_key="same")
    assert again.id == made[0].id
    with pytest.raises(Conflict) as mismatch:
        await house.create(SandboxSpec(env={"A": "1"}), idempotency_key="same")
    assert mismatch.value.code == "idempotency_mismatch"
    await house.services.sandboxes.kill(house.me, again.id)
    assert (await house.create(idempotency_key="same")).state is State.KILLED
    house.clock.skip(24 * 3600)
    assert (await house.create(idempotency_key="same")).id != again.id


async def test_a_repeated_create_needs_no_room_for_another(house: House) -> None:
    async with house.store.write() as tx:
        await tx.tenants.set_limits(house.me.tenant_id, max_sandboxes=1, max_lifetime_ms=86_400_000)
    made = await house.create(idempotency_key="k")
    assert await house.create(idempotency_key="k") == made


async def test_twenty_creates_with_one_key_share_a_failure(house: House) -> None:
    house.node.faults.create_delay = 2.0
    house.node.faults.create = InternalError("no", code="vm_start_failed")
    results = await asyncio.gather(*(house.create(idempotency_key="k") for _ in range(20)), return_exceptions=True)
    assert {type(r) for r in results} == {InternalError}
    assert house.node.creates == 1


async def test_an_idempotency_key_is_its_tenants_own(house: House) -> None:
    other = await house.other_tenant()
    mine = await house.create(idempotency_key="k")
    theirs = await house.services.sandboxes.create(other, SPEC, idempotency_key="k")
    assert mine.id != theirs.id


async def test_who_goes_away_without_a_key_leaves_nothing(house: House) -> None:
    house.node.faults.create_gate = asyncio.Event()
    task = asyncio.create_task(house.create())
    await until(lambda: _true(house.node.creates == 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    house.node.faults.create_gate.set()

    async def over() -> bool:
        return [row.state for row in await house.all()] == [State.KILLED]

    await until(over)
    await until(lambda: _true(house.node.vms == {} and house.services.server.starting() == 0))


async def test_who_goes_away_with_a_key_finds_it_later(house: House) -> None:
    house.node.faults.create_gate = asyncio.Event()
    task = asyncio.create_task(house.create(idempotency_key="k"))
    await until(lambda: _true(house.node.creates == 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    house.node.faults.create_gate.set()
    assert (await house.create(idempotency_key="k")).state is State.RUNNING
    assert house.node.creates == 1


async def _true(value: bool) -> bool:
    return value


# -------------------------------------------------------------------------------------------------------------- kill


async def test_kill_is_idempotent_and_leaves_nothing(house: House) -> None:
    made = await house.create()
    killed = await asyncio.gather(*(house.services.sandboxes.kill(house.me, made.id) for _ in range(5)))
    assert {(k.state, k.end_reason, k.ended_at) for k in killed} == {
        (State.KILLED, EndReason.KILLED, killed[0].ended_at)
    }
    assert house.node.vms == {}
    assert await house.services.sandboxes.kill(house.me, made.id) == killed[0]
    assert [a for a, _ in await house.actions(made.id)].count("sandbox.killed") == 1


@pytest.mark.parametrize("misses", [False, True])
async def test_kill_beats_a_create_under_way(house: House, misses: bool) -> None:
    house.node.faults.create_gate = asyncio.Event()
    house.node.faults.kill_misses_creates = misses
    creating = asyncio.create_task(house.create())
    await until(lambda: _true(house.node.creates == 1))
    (row,) = await house.all()
    assert row.state is State.CREATING
    with pytest.raises(Conflict) as early:
        await house.services.processes.start(house.me, row.id, command())
    assert early.value.code == "sandbox_state"
    assert (await house.services.sandboxes.kill(house.me, row.id)).state is State.KILLED
    house.node.faults.create_gate.set()
    with pytest.raises(Gone) as gone:
        await creating
    assert gone.value.code == "sandbox_killed"
    assert house.node.vms == {}


async def test_a_node_that_cannot_kill_is_asked_again(house: House) -> None:
    house.config = replace(house.config, kill_deadline_s=0.2)
    await house.restart()
    made = await house.create()
    house.node.faults.kill = Unavailable("busy")
    assert (await house.services.sandboxes.kill(house.me, made.id)).state is State.KILLED
    assert made.id in house.node.vms
    house.node.faults.kill = None
    await until(lambda: _true(house.node.vms == {}))


# ---------------------------------------------------------------------------------------------------------- deadlines


async def test_at_its_timeout_it_is_killed_and_says_so(house: House) -> None:
    made = await house.create(SandboxSpec(timeout_ms=60_000, idle_timeout_ms=None))
    house.clock.skip(45)
    await asyncio.sleep(0.3)  # it is looked at a few times
    assert (await house.get(made.id)).state is State.RUNNING
    house.clock.skip(15)
    await until(lambda: _over(house, made.id))
    row = await house.get(made.id)
    assert (row.state, row.end_reason) == (State.KILLED, EndReason.EXPIRED)
    assert row.ended_at is not None
    assert row.ended_at >= row.expires_at
    with pytest.raises(Gone) as gone:
        await house.services.files.stat(house.me, made.id, "/x")
    assert gone.value.code == "sandbox_expired"
    await until(lambda: _true(house.node.vms == {}))


async def _over(house: House, sandbox_id: str) -> bool:
    return (await house.get(sandbox_id)).state in {State.KILLED, State.ERROR}


async def test_extending_never_shortens_and_setting_may(house: House) -> None:
    made = await house.create(SandboxSpec(timeout_ms=1_800_000))
    assert (await house.services.sandboxes.extend_timeout(house.me, made.id, 60_000)).expires_at == made.expires_at
    longer = await house.services.sandboxes.extend_timeout(house.me, made.id, 3_600_000)
    assert longer.expires_at > made.expires_at
    shorter = await house.services.sandboxes.set_timeout(house.me, made.id, 60_000)
    assert shorter.expires_at < made.expires_at
    assert await house.get(made.id) == shorter
    for bad in (-1, 14_400_001):
        with pytest.raises(InvalidRequest) as refused:
            await house.services.sandboxes.set_timeout(house.me, made.id, bad)
        assert refused.value.problems[0].allowed == "0..14400000"


async def test_an_extension_that_returned_is_never_followed_by_the_old_end(house: House) -> None:
    for n in range(20):
        made = await house.create(SandboxSpec(timeout_ms=60_000, idle_timeout_ms=None))
        house.clock.skip(60 - 0.002 * n)
        try:
            moved = await house.services.sandboxes.extend_timeout(house.me, made.id, 600_000)
        except Gone as gone:
            assert gone.code == "sandbox_expired"
            continue
        await asyncio.gather(*house.services.timers.start_due())
        assert await house.get(made.id) == moved
        await house.services.sandboxes.kill(house.me, made.id)


async def test_an_end_is_judged_on_the_stored_row(house: House) -> None:
    """The timer had made up its mind, and an extension came first."""
    made = await house.create(SandboxSpec(timeout_ms=60_000))
    moved = await house.services.sandboxes.extend_timeout(house.me, made.id, 600_000)
    assert await house.services.sandboxes.expire(made.id) is False
    assert await house.get(made.id) == moved
    async with house.store.write() as tx:  # as another server of the same database would
        await tx.sandboxes.set_expiry(moved, timeout_ms=60_000, expires_at=moved.expires_at + timedelta(hours=1))
    house.clock.skip(601)
    await house.services.processes.list(house.me, made.id)
    await _settle(house)
    row = await house.get(made.id)
    assert (row.state, row.expires_at) == (State.RUNNING, moved.expires_at + timedelta(hours=1))


async def test_the_tenants_longest_life_is_the_end_whatever_is_asked(house: House) -> None:
    async with house.store.write() as tx:
        await tx.tenants.set_limits(house.me.tenant_id, max_sandboxes=9, max_lifetime_ms=120_000)
    with pytest.raises(InvalidRequest):
        await house.create(SandboxSpec(timeout_ms=300_000))
    made = await house.create(SandboxSpec(timeout_ms=60_000, idle_timeout_ms=None))
    assert made.started_at is not None
    house.clock.skip(50)
    moved = await house.services.sandboxes.extend_timeout(house.me, made.id, 120_000)
    assert moved.expires_at == made.started_at + timedelta(seconds=120)
    house.clock.skip(71)
    await until(lambda: _over(house, made.id))
    assert (await house.get(made.id)).end_reason is EndReason.MAX_LIFETIME


async def test_idle_for_too_long(house: House) -> None:
    made = await house.create(SandboxSpec(idle_timeout_ms=10_000, timeout_ms=600_000))
    forever = await house.create(SandboxSpec(idle_timeout_ms=None, timeout_ms=600_000))
    house.clock.skip(9)
    await house.services.processes.list(house.me, made.id)  # a request
    house.clock.skip(9)
    await _settle(house)
    assert (await house.get(made.id)).state is State.RUNNING  # and looking at the record is none
    house.clock.skip(2)
    await until(lambda: _over(house, made.id))
    assert (await house.get(made.id)).end_reason is EndReason.IDLE
    assert (await house.get(forever.id)).state is State.RUNNING
    with pytest.raises(Gone) as gone:
        await house.services.processes.list(house.me, made.id)
    assert gone.value.code == "sandbox_idle"


async def _settle(house: House) -> None:
    await asyncio.gather(*house.services.timers.start_due())
    await asyncio.sleep(0.05)


async def test_an_open_stream_or_a_running_command_is_not_idle(house: House) -> None:
    made = await house.create(SandboxSpec(idle_timeout_ms=10_000, timeout_ms=600_000))
    stream = await house.services.processes.start(house.me, made.id, command())
    guest = house.node.vms[made.id]
    for _ in range(4):
        house.clock.skip(30)
        await _settle(house)
    assert (await house.get(made.id)).state is State.RUNNING
    await stream.aclose()  # the command runs on
    for _ in range(4):
        house.clock.skip(30)
        await _settle(house)
    assert (await house.get(made.id)).state is State.RUNNING
    guest.finish(stream.process.process_id, 4)
    house.clock.skip(9)
    await _settle(house)
    assert (await house.get(made.id)).state is State.RUNNING  # idleness counts from when its end was seen
    for _ in range(3):
        house.clock.skip(16)
        await _settle(house)
    assert (await house.get(made.id)).end_reason is EndReason.IDLE
    finished = [
        e for e in (await house.services.sandboxes.events(house.me, made.id)).items if e.action == "command.finished"
    ]
    assert [e.detail["exit_code"] for e in finished] == [4]


# ------------------------------------------------------------------------------------------------------ ends and lines


@pytest.mark.parametrize("reason", [EndReason.CRASHED, EndReason.POWEROFF])
async def test_a_vm_that_ends_by_itself(house: House, reason: EndReason) -> None:
    made = await house.create()
    stream = await house.services.processes.start(house.me, made.id, command())
    house.node.crash(made.id, reason, "last line")
    with pytest.raises(Gone) as gone:
        await stream.__anext__()
    assert gone.value.context["reason"] == reason.value
    row = await house.get(made.id)
    assert (row.state, row.end_reason, row.error) == (State.ERROR, reason, "last line")
    actions = await house.actions(made.id)
    assert ("command.finished", Outcome.UNKNOWN) in actions
    assert await house.services.sandboxes.kill(house.me, made.id) == row


async def test_a_vm_that_dies_while_it_comes_up_is_one_failure(house: House) -> None:
    house.node.faults.create_gate = asyncio.Event()
    creating = asyncio.create_task(house.create(idempotency_key="k"))
    await until(lambda: _true(house.node.creates == 1))
    (row,) = await house.all()
    house.node.tell(row.id, EndReason.CRASHED)
    await asyncio.sleep(0.2)
    assert await house.get(row.id) == row
    house.node.faults.create = InternalError("it died", code="vm_start_failed", step="boot")
    house.node.faults.create_gate.set()
    with pytest.raises(InternalError):
        await creating
    assert (await house.get(row.id)).end_reason is EndReason.START_FAILED
    house.node.faults.create = None
    assert (await house.create(idempotency_key="k")).state is State.RUNNING


async def test_a_node_whose_news_breaks_off_is_asked_what_was_missed(house: House) -> None:
    made, stays = await house.create(), await house.create()
    house.node.cut_news()
    del house.node.vms[made.id]
    await until(lambda: _over(house, made.id))
    assert (await house.get(made.id)).end_reason is EndReason.CRASHED
    assert (await house.get(stays.id)).state is State.RUNNING
    house.node.crash(stays.id)
    await until(lambda: _over(house, stays.id))


async def test_a_command_that_the_guest_forgot_is_unknown(house: House) -> None:
    made = await house.create()
    stream = await house.services.processes.start(house.me, made.id, command())
    await stream.aclose()
    house.node.vms[made.id].running.clear()
    assert await house.services.processes.list(house.me, made.id) == []
    assert (await house.actions(made.id))[-1] == ("command.finished", Outcome.UNKNOWN)


async def test_a_kill_ends_every_stream_with_its_reason(house: House) -> None:
    made = await house.create()
    process = await house.services.processes.start(house.me, made.id, command())
    watch = await house.services.files.watch(house.me, made.id, "/w")
    reading = [asyncio.create_task(process.__anext__()), asyncio.create_task(watch.__anext__())]
    await asyncio.sleep(0.05)
    await house.services.sandboxes.kill(house.me, made.id)
    for result in await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 30):
        assert isinstance(result, Gone)
        assert result.code == "sandbox_killed"


async def test_a_broken_line_of_a_living_sandbox_is_what_it_is(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.control.access.ENDING_S", 0.05)
    made = await house.create()
    house.node.faults.guest = GuestUnreachable("no answer")
    with pytest.raises(GuestUnreachable):
        await house.services.processes.start(house.me, made.id, command())
    house.node.faults.guest = OutcomeUnknown("cut")
    with pytest.raises(OutcomeUnknown):
        await house.services.processes.start(house.me, made.id, command())
    assert [o for a, o in await house.actions(made.id) if a == "command.started"] == [Outcome.FAILED, Outcome.UNKNOWN]


# -------------------------------------------------------------------------------------------------- commands and files


async def test_commands(house: House) -> None:
    made = await house.create()
    p = house.services.processes
    spec = command(argv=("echo", "x" * 5000), env={"TOKEN": "canary"}, stdin=True, timeout_ms=0)
    stream = await p.start(house.me, made.id, spec)
    guest = house.node.vms[made.id]
    pid = str(stream.process.pid)
    guest.emit(spec.process_id, b"out")
    assert await stream.__anext__() == Output(Stream.STDOUT, 0, b"out")
    for ref in (pid, spec.process_id):
        assert (await p.get(house.me, made.id, ref)).process_id == spec.process_id
    attached = await p.attach(house.me, made.id, pid)

    async def data() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    assert await p.write_stdin(house.me, made.id, pid, data()) == 3
    await p.close_stdin(house.me, made.id, pid)
    await p.resize(house.me, made.id, pid, PtySize(80, 24))
    with pytest.raises(InvalidRequest):
        await p.resize(house.me, made.id, pid, PtySize(0, 24))
    with pytest.raises(InvalidRequest):
        await p.signal(house.me, made.id, pid, "NOPE")
    assert await p.kill(house.me, made.id, pid) is True
    assert await p.kill(house.me, made.id, pid) is False
    with pytest.raises(Conflict):
        await p.signal(house.me, made.id, pid, "INT")
    for each in (stream, attached):
        events = [event async for event in each]
        assert isinstance(events[-1], Exited)
        await each.aclose()
        await each.aclose()
    with pytest.raises(NotFound) as missing:
        await p.get(house.me, made.id, "99999")
    assert missing.value.code == "process_not_found"
    events = (await house.services.sandboxes.events(house.me, made.id)).items
    assert [e.action for e in events].count("command.finished") == 1
    (started,) = [e for e in events if e.action == "command.started"]
    assert started.detail["env_names"] == ["TOKEN"]
    assert "canary" not in repr(events)
    assert len(repr(started.detail)) < 1000


async def test_files(house: House) -> None:
    made = await house.create()
    f = house.services.files

    async def data() -> AsyncIterator[bytes]:
        yield b"content-canary"

    assert (await f.write(house.me, made.id, "/d/a", data())).size == 14
    download = await f.read(house.me, made.id, "/d/a", offset=2, length=3)
    assert download.length == 3
    assert [chunk async for chunk in download] == [b"nte"]
    assert [i.path async for i in await f.list_dir(house.me, made.id, "/d")] == ["/d/a"]
    assert [i async for i in await f.list_dir(house.me, made.id, "/empty")] == []
    with pytest.raises(NotFound):
        await f.list_dir(house.me, made.id, "/none")
    assert (await f.make_dir(house.me, made.id, "/d/n"))[1] is True
    assert (await f.chmod(house.me, made.id, "/d/a", 0o600)).mode == 0o600
    assert (await f.symlink(house.me, made.id, "a", "/d/l")).target == "a"
    assert (await f.move(house.me, made.id, "/d/a", "/d/b")).path == "/d/b"
    await f.remove(house.me, made.id, "/d/b")
    with pytest.raises(NotFound):
        await f.stat(house.me, made.id, "/d/b")
    with pytest.raises(InvalidRequest):
        await f.write(house.me, made.id, "", data())
    events = (await house.services.sandboxes.events(house.me, made.id)).items
    assert [e.action for e in events if e.action.startswith("file.")] == [
        "file.written",
        "file.read",
        "file.dir_made",
        "file.mode_set",
        "file.linked",
        "file.moved",
        "file.removed",
        "file.written",
    ]
    assert "content-canary" not in repr(events)
    assert events[-1].outcome is Outcome.REFUSED
    house.clock.skip(299)
    await _settle(house)
    assert (await house.get(made.id)).state is State.RUNNING
    house.clock.skip(2)
    await until(lambda: _over(house, made.id))  # nothing of all that still holds it


async def test_looking(house: House) -> None:
    made = await house.create()
    assert (await house.services.sandboxes.metrics(house.me, made.id)).cpu_count == 1
    assert await house.services.sandboxes.console(house.me, made.id) == b"login:"
    first = await house.services.sandboxes.events(house.me, made.id, limit=1)
    second = await house.services.sandboxes.events(house.me, made.id, limit=1, cursor=first.next_cursor)
    assert [e.action for e in (*first.items, *second.items)] == ["sandbox.requested", "sandbox.created"]
    assert house.services.server.info(house.me).templates == ("base",)
    assert house.services.server.live() == 1


# ------------------------------------------------------------------------------------------------------------ who may


async def test_another_tenants_sandbox_is_as_if_it_were_not_there(house: House) -> None:
    made = await house.create()
    other = await house.other_tenant()
    s, unknown = house.services, ids.new_id(ids.SANDBOX)
    for act in (
        lambda sandbox_id: s.sandboxes.get(other, sandbox_id),
        lambda sandbox_id: s.sandboxes.kill(other, sandbox_id),
        lambda sandbox_id: s.sandboxes.set_timeout(other, sandbox_id, 60_000),
        lambda sandbox_id: s.sandboxes.events(other, sandbox_id),
        lambda sandbox_id: s.sandboxes.metrics(other, sandbox_id),
        lambda sandbox_id: s.processes.start(other, sandbox_id, command()),
        lambda sandbox_id: s.files.stat(other, sandbox_id, "/x"),
    ):
        said = []
        for sandbox_id in (made.id, unknown, "nonsense"):
            with pytest.raises(NotFound) as missing:
                await act(sandbox_id)
            assert missing.value.code == "sandbox_not_found"
            said.append(missing.value.message.replace(sandbox_id, "ID"))
        assert len(set(said)) == 1
    assert (await s.sandboxes.list(other)).items == ()
    assert (await house.get(made.id)).state is State.RUNNING


async def test_a_project_sees_its_own_and_an_admin_all(house: House) -> None:
    async with house.store.write() as tx:
        await tx.tenants.add_project(Project("pj2", house.me.tenant_id, "second", house.clock()))
    second = Principal(house.me.tenant_id, "pj2", "key2", frozenset({"sandboxes:read", "sandboxes:write"}))
    mine, theirs = await house.create(), await house.services.sandboxes.create(second, SPEC)
    assert {s.id for s in await house.all()} == {mine.id, theirs.id}
    assert [s.id for s in (await house.services.sandboxes.list(second)).items] == [theirs.id]
    with pytest.raises(NotFound):
        await house.services.sandboxes.get(second, mine.id)


async def test_scopes(house: House) -> None:
    made = await house.create()
    s = house.services

    def only(*scopes: Scope) -> Principal:
        return replace(house.me, scopes=frozenset(scope.value for scope in scopes))

    refused: list[tuple[Scope, Callable[[Principal], Awaitable[object]]]] = [
        (Scope.WRITE, lambda p: s.sandboxes.create(p, SPEC)),
        (Scope.WRITE, lambda p: s.sandboxes.kill(p, made.id)),
        (Scope.WRITE, lambda p: s.sandboxes.extend_timeout(p, made.id, 60_000)),
        (Scope.READ, lambda p: s.sandboxes.get(p, made.id)),
        (Scope.READ, lambda p: s.sandboxes.list(p)),
        (Scope.READ, lambda p: s.sandboxes.events(p, made.id)),
        (Scope.READ, lambda p: s.sandboxes.metrics(p, made.id)),
        (Scope.USE, lambda p: s.processes.start(p, made.id, command())),
        (Scope.USE, lambda p: s.files.stat(p, made.id, "/x")),
        (Scope.KEYS, lambda p: s.keys.list(p)),
        (Scope.KEYS, lambda p: s.keys.create(p, "n", ["admin"])),
    ]
    for needed, act in refused:
        with pytest.raises(Forbidden) as lacking:
            await act(only(*(set(Scope) - {needed, Scope.ADMIN})))
        assert lacking.value.context["scope"] == needed.value
    assert ("command.started", Outcome.REFUSED) in await house.actions(made.id)


async def test_keys(house: House) -> None:
    keys = house.services.keys
    assert await keys.bootstrap() is None
    made, secret = await keys.create(house.me, "ci", ["sandboxes:read", "keys:write"])
    assert secret.startswith("skerry")
    assert secret.startswith(made.prefix)
    holder = await keys.authenticate(secret)
    assert (holder.key_id, holder.scopes) == (made.id, frozenset({"sandboxes:read", "keys:write"}))
    with pytest.raises(Forbidden):
        await keys.create(holder, "more", ["sandboxes:write"])
    with pytest.raises(Forbidden):
        await keys.revoke(holder, house.me.key_id)
    with pytest.raises(InvalidRequest) as bad:
        await keys.create(house.me, "", ["nope"])
    assert {p.field for p in bad.value.problems} == {"name", "scopes"}
    async with house.store.read() as tx:
        assert secret not in repr((await tx.connection.execute(text("SELECT * FROM api_keys"))).all())
    await house.restart()
    keys = house.services.keys
    (listed,) = [k for k in await keys.list(house.me) if k.id == made.id]
    assert listed.last_used_at is not None
    assert (await keys.authenticate(secret)).key_id == made.id
    assert (await keys.revoke(house.me, made.id)).revoked_at is not None
    await keys.revoke(house.me, made.id)
    for given, code in ((secret, "key_revoked"), ("skerrynone", "key_unknown"), ("x\ud800", "key_unknown")):
        with pytest.raises(Unauthenticated) as refused:
            await keys.authenticate(given)
        assert refused.value.code == code
        assert given not in str(refused.value)
    for given in ("", None):
        with pytest.raises(Unauthenticated) as refused:
            await keys.authenticate(given)
        assert refused.value.code == "key_missing"
    with pytest.raises(NotFound):
        await keys.revoke(house.me, "keynone")
    with pytest.raises(NotFound):
        await keys.revoke(await house.other_tenant(), house.me.key_id)


# ------------------------------------------------------------------------------------------------------------ restart


async def test_a_restart_keeps_what_lives_and_settles_the_rest(house: House) -> None:
    living = await house.create(SandboxSpec(timeout_ms=600_000, idle_timeout_ms=None))
    lost = await house.create()
    overdue = await house.create(SandboxSpec(timeout_ms=60_000))
    killed = await house.create()
    house.node.faults.create_gate = asyncio.Event()
    half = asyncio.create_task(house.create(idempotency_key="half"))
    await until(lambda: _true(house.node.creates == 5))
    await house.stack.aclose()
    with pytest.raises(SkerryError):
        await half
    house.node.faults.create_gate = None
    del house.node.vms[lost.id]
    async with open_store(house.url) as store, store.write() as tx:
        await tx.connection.execute(text("UPDATE sandboxes SET state = 'killed' WHERE id = :id"), {"id": killed.id})
    house.node.vms["sbstray"] = house.node.vms[killed.id]
    house.clock.skip(61)
    await house.start()
    assert await house.get(living.id) == living
    row = await house.get(lost.id)
    assert (row.state, row.end_reason) == (State.ERROR, EndReason.LOST)
    await until(lambda: _over(house, overdue.id))
    assert (await house.get(overdue.id)).end_reason is EndReason.EXPIRED
    await until(lambda: _true(set(house.node.vms) == {living.id}))
    failed = [s for s in await house.all() if s.end_reason is EndReason.START_FAILED]
    assert len(failed) == 1
    assert (await house.create(idempotency_key="half")).state is State.RUNNING
    await (await house.services.processes.start(house.me, living.id, command())).aclose()
    house.clock.skip(540)
    await until(lambda: _over(house, living.id))
