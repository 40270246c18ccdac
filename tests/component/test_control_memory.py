"""Pause, resume, snapshots and forks: the services over a real database and a node whose faults we set."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from skerry.control import Outcome, Principal
from skerry.core import ids
from skerry.core.errors import (
    Conflict,
    Forbidden,
    Gone,
    GuestUnreachable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    SkerryError,
)
from skerry.core.lifecycle import EndReason, State
from skerry.core.models import PtySize, Sandbox, SandboxSpec, SnapshotState
from support.fake_node import Fault, Faults
from support.house import House, command, opened, until
from support.postgres import new_database

NO_IDLE = SandboxSpec(idle_timeout_ms=None)
PERSISTENT = SandboxSpec(idle_timeout_ms=None, auto_pause=True)
WAKING = SandboxSpec(idle_timeout_ms=None, auto_resume=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    return new_database(request.getfixturevalue("postgres_server"), ids.new_id("db"))


@pytest.fixture
async def house(url: str) -> AsyncIterator[House]:
    async with opened(url) as made:
        yield made


async def pause(house: House, box: Sandbox, **how: bool) -> Sandbox:
    return await house.services.sandboxes.pause(house.me, box.id, **how)


async def resume(house: House, box: Sandbox, timeout_ms: int | None = None) -> Sandbox:
    return await house.services.sandboxes.resume(house.me, box.id, timeout_ms=timeout_ms)


async def rest(house: House, spec: SandboxSpec = NO_IDLE) -> Sandbox:
    return await pause(house, await house.create(spec))


async def state(house: House, box: Sandbox) -> State:
    return (await house.get(box.id)).state


async def begun(house: House, act: str) -> None:
    """Until the node has begun it."""

    async def seen() -> bool:
        return act in house.node.acts

    await until(seen)


async def nothing_left(house: House, *but: str) -> None:
    async def bare() -> bool:
        return set(house.node.vms) == set(but) and not house.node.images_at_rest

    await until(bare)


# ------------------------------------------------------------------------------------------------- pause and resume


async def test_what_rests_is_the_same_when_it_comes_back(house: House) -> None:
    box = await house.create(NO_IDLE)
    stream = await house.services.processes.start(house.me, box.id, command())
    await stream.aclose()
    paused = await pause(house, box)
    assert (paused.state, paused.expires_at) == (State.PAUSED, box.expires_at)
    assert paused.paused_at is not None
    assert house.node.vms == {}
    house.clock.skip(3600)
    back = await resume(house, box)
    assert back == await house.get(box.id)
    assert (back.state, back.paused_at, back.remaining_ms) == (State.RUNNING, None, None)
    assert back.rested_ms >= 3_600_000
    (process,) = await house.services.processes.list(house.me, box.id)
    assert process.process_id == stream.process.process_id
    assert [a for a in await house.actions(box.id) if a[0].startswith("sandbox.")][-2:] == [
        ("sandbox.paused", Outcome.OK),
        ("sandbox.resumed", Outcome.OK),
    ]


async def test_a_pause_without_memory_is_told_to_the_node(house: House) -> None:
    box = await house.create(NO_IDLE)
    await (await house.services.processes.start(house.me, box.id, command())).aclose()
    await pause(house, box, memory=False)
    assert not house.node.images_at_rest[box.id].memory
    await resume(house, box)
    assert await house.services.processes.list(house.me, box.id) == []


async def test_a_second_pause_changes_nothing(house: House) -> None:
    paused = await rest(house)
    assert await pause(house, paused, memory=False) == paused
    assert house.node.acts == [f"pause {paused.id}"]


async def test_twenty_pauses_at_once_are_one(house: House) -> None:
    box = await house.create(NO_IDLE)
    found = await asyncio.gather(*(pause(house, box) for _ in range(20)))
    assert {row.state for row in found} == {State.PAUSED}
    assert house.node.acts == [f"pause {box.id}"]


async def test_twenty_resumes_at_once_give_one_vm(house: House) -> None:
    box = await rest(house)
    found = await asyncio.gather(*(resume(house, box, 60_000 * n) for n in range(1, 21)))
    assert {row.state for row in found} == {State.RUNNING}
    assert house.node.acts.count(f"resume {box.id}") == 1
    now = house.clock()
    assert (await house.get(box.id)).expires_at > now + timedelta(minutes=19)


async def test_resumes_at_once_share_a_failure_and_it_stays_paused(house: House) -> None:
    box = await rest(house)
    house.node.faults.resume = Fault(InternalError("page 7 differs", code="image_damaged"))
    found = await asyncio.gather(*(resume(house, box) for _ in range(5)), return_exceptions=True)
    assert {error.code for error in found if isinstance(error, SkerryError)} == {"image_damaged"}
    assert house.node.acts.count(f"resume {box.id}") == 1
    assert await house.get(box.id) == box
    house.node.faults = Faults()
    assert (await resume(house, box)).state is State.RUNNING


@pytest.mark.parametrize(
    "fault",
    [
        Fault(NoSpace("the host's disk is full", code="host_disk_full")),
        Fault(RuntimeError("a defect")),
        Fault(OutcomeUnknown("no answer")),
    ],
)
async def test_a_pause_that_fails_leaves_it_running(house: House, fault: Fault) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.pause = fault
    with pytest.raises(SkerryError) as failed:
        await pause(house, box)
    assert failed.value.code in {"host_disk_full", "passage_failed", "outcome_unknown"}
    assert await house.get(box.id) == box
    await house.services.processes.list(house.me, box.id)
    house.node.faults = Faults()
    assert (await pause(house, box)).state is State.PAUSED


async def test_a_pause_whose_answer_is_lost_has_happened(house: House) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.pause = Fault(OutcomeUnknown("no answer"), late=True)
    assert (await pause(house, box)).state is State.PAUSED
    house.node.faults.resume = Fault(OutcomeUnknown("no answer"), late=True)
    assert (await resume(house, box)).state is State.RUNNING
    assert set(house.node.vms) == {box.id}


async def test_a_pause_that_hangs_is_given_up_and_it_runs_on(house: House) -> None:
    house.config = type(house.config)(clock=house.clock, pause_deadline_s=0.1, resume_deadline_s=0.1)
    await house.restart()
    box = await house.create(NO_IDLE)
    house.node.faults.pause = Fault(gate=asyncio.Event())
    with pytest.raises(InternalError, match="did not come to its end"):
        await pause(house, box)
    assert await state(house, box) is State.RUNNING
    house.node.faults = Faults(resume=Fault(gate=asyncio.Event()))
    await pause(house, box)
    with pytest.raises(InternalError, match="did not come to its end"):
        await resume(house, box)
    assert await state(house, box) is State.PAUSED


async def test_a_vm_that_dies_of_its_pause_has_crashed(house: House) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.pause = Fault(crash=True)
    with pytest.raises(Gone):
        await pause(house, box)
    row = await house.get(box.id)
    assert (row.state, row.end_reason) == (State.ERROR, EndReason.CRASHED)


@pytest.mark.parametrize("act", ["pause", "snapshot", "fork"])
async def test_a_vm_that_died_before_it_is_known_is_told_as_what_it_is(house: House, act: str) -> None:
    """Its node has forgotten it already, and the news is still under way."""
    box = await house.create(NO_IDLE)
    house.node.vms.pop(box.id).end()
    acts = {
        "pause": lambda: pause(house, box),
        "snapshot": lambda: house.services.snapshots.take(house.me, box.id),
        "fork": lambda: house.services.forks.fork(house.me, box.id),
    }
    doing = asyncio.create_task(acts[act]())
    await asyncio.sleep(0.2)
    house.node.tell(box.id, EndReason.CRASHED, "qemu died")
    with pytest.raises(Gone) as over:
        await doing
    assert over.value.code == "sandbox_failed"


async def test_a_vm_that_dies_of_its_resume_is_still_paused(house: House) -> None:
    box = await rest(house)
    house.node.faults.resume = Fault(crash=True)
    with pytest.raises(GuestUnreachable):
        await resume(house, box)
    assert await house.get(box.id) == box


async def test_the_news_of_an_end_does_not_end_what_rests(house: House) -> None:
    box = await rest(house)
    house.node.tell(box.id, EndReason.CRASHED)
    house.node.cut_news()
    await asyncio.sleep(0.1)
    assert await house.get(box.id) == box
    back = await resume(house, box)
    house.node.tell(box.id, EndReason.CRASHED)  # late news, of a VM that it had before
    await asyncio.sleep(0.1)
    assert await house.get(box.id) == back
    house.node.crash(box.id)

    async def over() -> bool:
        return (await house.get(box.id)).end_reason is EndReason.CRASHED

    await until(over)


async def test_a_database_that_is_away_at_the_end_of_a_pause_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.pause = Fault(gate=gate)
    task = asyncio.create_task(pause(house, box))
    await begun(house, f"pause {box.id}")
    with monkeypatch.context() as patch:

        def away() -> None:
            raise OutcomeUnknown("away", code="database_unavailable")

        patch.setattr(house.store, "write", away)
        gate.set()
        with pytest.raises(SkerryError, match="away"):
            await task
    assert (await resume(house, box)).state is State.RUNNING


# ------------------------------------------------------------------------------------------------------------ timeouts


async def test_time_at_rest_does_not_count(house: House) -> None:
    box = await house.create(SandboxSpec(timeout_ms=600_000, idle_timeout_ms=None))
    house.clock.skip(60)
    await pause(house, box)
    house.clock.skip(3600)
    await asyncio.gather(*house.services.timers.start_due())
    assert not await house.services.sandboxes.expire(box.id)
    assert await state(house, box) is State.PAUSED
    back = await resume(house, box)
    left = back.expires_at - house.clock()
    assert timedelta(seconds=595) < left <= timedelta(seconds=600)  # never less than its own timeout
    await pause(house, box)
    more = await resume(house, box, 900_000)
    assert timedelta(seconds=895) < more.expires_at - house.clock() <= timedelta(seconds=900)
    await pause(house, box)
    kept = await resume(house, box, 60_000)
    assert timedelta(seconds=890) < kept.expires_at - house.clock() <= timedelta(seconds=900)  # never shortens


async def test_a_resume_of_a_running_one_only_extends(house: House) -> None:
    box = await house.create(SandboxSpec(timeout_ms=600_000, idle_timeout_ms=None))
    assert await resume(house, box) == box
    assert (await resume(house, box, 60_000)).expires_at == box.expires_at
    assert (await resume(house, box, 900_000)).expires_at > box.expires_at
    for wrong in (-1, 10**9):
        with pytest.raises(InvalidRequest) as refused:
            await resume(house, box, wrong)
        assert refused.value.problems[0].field == "timeout_ms"


async def test_at_its_timeout_it_is_paused_again_and_again(house: House) -> None:
    box = await house.create(PERSISTENT)
    for _ in range(2):
        house.clock.skip(301)

        async def rests() -> bool:
            await asyncio.gather(*house.services.timers.start_due())
            return await state(house, box) is State.PAUSED

        await until(rests)
        row = await house.get(box.id)
        assert row.remaining_ms == 0
        back = await resume(house, box)
        assert back.spec == box.spec
        assert timedelta(seconds=295) < back.expires_at - house.clock() <= timedelta(seconds=300)


async def test_idle_it_is_paused_and_comes_back_for_the_next_request(house: House) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=5000, auto_pause=True, auto_resume=True))
    for _ in range(2):
        house.clock.skip(6)

        async def rests() -> bool:
            await asyncio.gather(*house.services.timers.start_due())
            return await state(house, box) is State.PAUSED

        await until(rests)
        assert await house.services.processes.list(house.me, box.id) == []
        assert await state(house, box) is State.RUNNING


async def test_a_pause_at_the_deadline_that_fails_is_tried_again_later(house: House) -> None:
    box = await house.create(PERSISTENT)
    house.node.faults.pause = Fault(NoSpace("full", code="host_disk_full"))
    house.clock.skip(301)

    async def tried_once() -> bool:
        return bool(house.node.acts) and await state(house, box) is State.RUNNING

    await until(tried_once)
    tried = len(house.node.acts)
    await asyncio.gather(*house.services.timers.start_due())
    assert len(house.node.acts) == tried  # not at once
    house.node.faults = Faults()
    house.clock.skip(31)

    async def rests() -> bool:
        await asyncio.gather(*house.services.timers.start_due())
        return await state(house, box) is State.PAUSED

    await until(rests)


async def test_the_tenants_longest_life_counts_running_time_and_ends_all(house: House) -> None:
    async with house.store.write() as tx:
        tenants = await tx.connection.exec_driver_sql("UPDATE tenants SET max_lifetime_ms = 120000")
        assert tenants.rowcount == 1
    box = await house.create(SandboxSpec(timeout_ms=60_000, idle_timeout_ms=None, auto_pause=True))
    await pause(house, box)
    house.clock.skip(1000)
    await resume(house, box)
    house.clock.skip(50)
    row = await house.services.sandboxes.set_timeout(house.me, box.id, 120_000)
    assert timedelta(seconds=60) < row.expires_at - house.clock() < timedelta(seconds=71)
    house.clock.skip(71)

    async def over() -> bool:
        await asyncio.gather(*house.services.timers.start_due())
        return (await house.get(box.id)).end_reason is EndReason.MAX_LIFETIME

    await until(over)
    await nothing_left(house)


async def test_a_timeout_that_is_set_while_it_rests_holds_after_it(house: House) -> None:
    box = await rest(house)
    row = await house.services.sandboxes.set_timeout(house.me, box.id, 60_000)
    assert (row.state, row.remaining_ms, row.spec.timeout_ms) == (State.PAUSED, 60_000, 60_000)
    row = await house.services.sandboxes.extend_timeout(house.me, box.id, 900_000)
    assert row.remaining_ms == 900_000
    back = await resume(house, box)
    assert timedelta(seconds=890) < back.expires_at - house.clock() <= timedelta(seconds=900)


async def test_of_a_resume_and_an_expiry_whoever_returned_success_is_right(house: House) -> None:
    for _ in range(10):
        box = await house.create(SandboxSpec(timeout_ms=60_000, idle_timeout_ms=None))
        house.clock.skip(60)
        acts = (resume(house, box, 600_000), house.services.sandboxes.expire(box.id))
        got, expired = await asyncio.gather(*acts, return_exceptions=True)
        row = await house.get(box.id)
        if isinstance(got, Sandbox):
            assert (row.state, expired) == (State.RUNNING, False)
            assert row.expires_at > house.clock() + timedelta(seconds=590)
        else:
            assert isinstance(got, Gone)
            await house.services.sandboxes.expire(box.id)
            assert (await house.get(box.id)).end_reason is EndReason.EXPIRED


# ------------------------------------------------------------------------------------------- requests while it rests


async def test_who_wants_in_while_it_rests_is_told_so(house: House) -> None:
    box = await rest(house)
    s = house.services
    acts = (
        s.processes.start(house.me, box.id, command()),
        s.processes.list(house.me, box.id),
        s.files.stat(house.me, box.id, "/a"),
        s.sandboxes.metrics(house.me, box.id),
        s.sandboxes.console(house.me, box.id),
        s.forks.fork(house.me, box.id, 1),
    )
    for act in acts:
        with pytest.raises(Conflict) as refused:
            await act
        assert (refused.value.code, refused.value.retry) == ("sandbox_paused", "never")
    assert house.node.acts == [f"pause {box.id}"]


async def test_who_wants_in_wakes_one_that_is_to_be_woken(house: House) -> None:
    box = await rest(house, WAKING)
    s = house.services
    await asyncio.gather(*(s.processes.list(house.me, box.id) for _ in range(20)))
    assert house.node.acts.count(f"resume {box.id}") == 1
    await pause(house, box)
    assert (await s.sandboxes.metrics(house.me, box.id)).cpu_count == 1
    await pause(house, box)
    house.node.faults.resume = Fault(NotFound("gone", code="image_not_found"))
    with pytest.raises(NotFound, match="gone"):
        await s.processes.list(house.me, box.id)
    assert await state(house, box) is State.PAUSED


async def test_whatever_is_asked_first_wakes_it(house: House) -> None:
    box = await rest(house, WAKING)
    s = house.services
    spec = command(pty=PtySize(80, 24))
    process_id = spec.process_id

    async def terminal() -> None:
        await (await s.processes.start(house.me, box.id, spec)).aclose()

    async def watch() -> None:
        await (await s.files.watch(house.me, box.id, "/")).aclose()

    async def attach() -> None:
        await (await s.processes.attach(house.me, box.id, process_id)).aclose()

    acts = (
        terminal,
        attach,
        watch,
        lambda: s.processes.signal(house.me, box.id, process_id, "INT"),
        lambda: s.files.make_dir(house.me, box.id, "/d"),
        lambda: s.sandboxes.metrics(house.me, box.id),
        lambda: s.sandboxes.console(house.me, box.id),
        lambda: s.forks.fork(house.me, box.id),
    )
    for n, act in enumerate(acts, 1):
        await act()
        assert await state(house, box) is State.RUNNING
        assert house.node.acts.count(f"resume {box.id}") == n
        await pause(house, box)
    # What only reads or changes the record leaves it at rest.
    await s.sandboxes.events(house.me, box.id)
    await s.sandboxes.set_timeout(house.me, box.id, 60_000)
    await s.snapshots.take(house.me, box.id)
    assert await state(house, box) is State.PAUSED


async def test_who_wants_in_meanwhile_waits(house: House) -> None:
    box = await house.create(WAKING)
    gate = asyncio.Event()
    house.node.faults.pause = Fault(gate=gate)
    going = asyncio.create_task(pause(house, box))
    await begun(house, f"pause {box.id}")
    asking = asyncio.create_task(house.services.processes.list(house.me, box.id))
    moving = asyncio.create_task(house.services.sandboxes.set_timeout(house.me, box.id, 900_000))
    await asyncio.sleep(0.05)
    assert not asking.done()
    assert not moving.done()
    gate.set()
    assert (await going).state is State.PAUSED
    assert await asking == []
    await moving
    assert await state(house, box) is State.RUNNING


async def test_who_waits_for_too_long_gets_a_conflict_that_may_be_tried_again(house: House) -> None:
    house.config = type(house.config)(clock=house.clock, passage_wait_s=0.05, stop_grace_s=1)
    await house.restart()
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.pause = Fault(gate=gate)
    going = asyncio.create_task(pause(house, box))
    await begun(house, f"pause {box.id}")
    s = house.services
    for act in (
        s.processes.list(house.me, box.id),
        s.sandboxes.set_timeout(house.me, box.id, 60_000),
        s.sandboxes.resume(house.me, box.id),
        s.snapshots.take(house.me, box.id),
    ):
        with pytest.raises(Conflict) as refused:
            await act
        assert (refused.value.code, refused.value.retry) == ("sandbox_state", "safe")
        assert refused.value.retry_after is not None
    gate.set()
    await going


async def test_a_stream_that_a_pause_breaks_says_so(house: House) -> None:
    box = await house.create(NO_IDLE)
    stream = await house.services.processes.start(house.me, box.id, command())
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await pause(house, box)
    with pytest.raises(Conflict) as broke:
        await reading
    assert (broke.value.code, broke.value.retry) == ("sandbox_paused", "unknown")
    await resume(house, box)
    again = await house.services.processes.attach(house.me, box.id, stream.process.process_id, follow=False)
    assert [event async for event in again] == []


# ---------------------------------------------------------------------------------------------------------- kill wins


@pytest.mark.parametrize("misses", [False, True])
@pytest.mark.parametrize("act", ["pause", "resume", "snapshot", "fork"])
async def test_a_kill_beats_whatever_is_under_way_and_leaves_nothing(house: House, act: str, misses: bool) -> None:
    box = await house.create(NO_IDLE)
    if act == "resume":
        await pause(house, box)
    gate = asyncio.Event()
    house.node.faults = Faults(kill_misses_creates=misses, **{act: Fault(gate=gate)})
    s = house.services
    acts = {
        "pause": lambda: pause(house, box),
        "resume": lambda: resume(house, box),
        "snapshot": lambda: s.snapshots.take(house.me, box.id, "n"),
        "fork": lambda: s.forks.fork(house.me, box.id, 3),
    }
    going = asyncio.create_task(acts[act]())
    await begun(house, f"{act} {box.id}")
    killed = await s.sandboxes.kill(house.me, box.id)
    assert killed.state is State.KILLED
    gate.set()
    with pytest.raises(Gone) as gone:
        await going
    assert gone.value.code == "sandbox_killed"
    await nothing_left(house)
    assert (await house.get(box.id)) == killed
    assert {row.state for row in await house.all()} <= {State.KILLED, State.ERROR}
    if act == "snapshot":
        (snapshot,) = (await s.snapshots.list(house.me)).items
        assert snapshot.state is SnapshotState.FAILED

        async def dropped() -> bool:
            return not house.node.snapshots_kept

        await until(dropped)


async def test_a_kill_of_what_rests_never_wakes_it(house: House) -> None:
    box = await rest(house)
    assert (await house.services.sandboxes.kill(house.me, box.id)).state is State.KILLED
    assert house.node.acts == [f"pause {box.id}"]
    await nothing_left(house)
    for act in (pause(house, box), resume(house, box)):
        with pytest.raises(Gone):
            await act


async def test_pauses_resumes_and_a_kill_in_any_order(house: House) -> None:
    for n in range(8):
        box = await house.create(NO_IDLE)
        acts = [pause(house, box), resume(house, box), pause(house, box), resume(house, box)]
        acts.insert(n % 5, house.services.sandboxes.kill(house.me, box.id))
        found = await asyncio.gather(*acts, return_exceptions=True)
        assert all(isinstance(each, (Sandbox, Gone)) for each in found), found
        assert await state(house, box) is State.KILLED
        await nothing_left(house)


async def test_pauses_and_resumes_interleaved_end_in_what_the_node_has(house: House) -> None:
    box = await house.create(NO_IDLE)
    for _ in range(5):
        acts = [act(house, box) for _ in range(10) for act in (pause, resume)]
        found = await asyncio.gather(*acts, return_exceptions=True)
        assert all(isinstance(each, Sandbox) for each in found), found
        row = await house.get(box.id)
        assert (row.state is State.RUNNING, row.state is State.PAUSED) == (
            box.id in house.node.vms,
            box.id in house.node.images_at_rest,
        )


async def test_a_pause_waits_for_a_snapshot_that_is_being_taken(house: House) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.snapshot = Fault(gate=gate)
    taking = asyncio.create_task(house.services.snapshots.take(house.me, box.id))
    await begun(house, f"snapshot {box.id}")
    going = asyncio.create_task(pause(house, box))
    assert await house.services.processes.list(house.me, box.id) == []  # it goes on
    await asyncio.sleep(0.05)
    assert f"pause {box.id}" not in house.node.acts
    gate.set()
    assert (await taking).state is SnapshotState.READY
    assert (await going).state is State.PAUSED


# ---------------------------------------------------------------------------------------------------------- restarts


async def test_who_goes_away_during_a_pause_finds_it_paused(house: House) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.pause = Fault(gate=gate)
    task = asyncio.create_task(pause(house, box))
    await begun(house, f"pause {box.id}")
    task.cancel()
    gate.set()

    async def rests() -> bool:
        return await state(house, box) is State.PAUSED

    await until(rests)


async def test_a_restart_settles_what_was_between(house: House) -> None:
    boxes = {name: await house.create(NO_IDLE) for name in ("done", "not", "lost", "back", "stays", "gone", "rests")}
    for name in ("back", "stays", "gone", "rests"):
        await pause(house, boxes[name])
    await house.stack.aclose()
    vms, resting = house.node.vms, house.node.images_at_rest
    done = await house.node.pause(boxes["done"].id)
    assert done.id in resting
    vms.pop(boxes["lost"].id)
    await house.node.resume(boxes["back"].id)
    resting.pop(boxes["gone"].id)
    await force(house, "pausing", boxes["done"], boxes["not"], boxes["lost"])
    await force(house, "resuming", boxes["back"], boxes["stays"], boxes["gone"])
    await house.start()
    found = {name: await house.get(box.id) for name, box in boxes.items()}
    assert {name: row.state.value for name, row in found.items()} == {
        "done": "paused",
        "not": "running",
        "lost": "error",
        "back": "running",
        "stays": "paused",
        "gone": "paused",
        "rests": "paused",
    }
    assert found["lost"].end_reason is EndReason.LOST
    assert found["not"].paused_at is None
    for name in ("done", "stays", "rests"):
        assert (await resume(house, boxes[name])).state is State.RUNNING
    with pytest.raises(NotFound) as missing:
        await resume(house, boxes["gone"])
    assert missing.value.code == "image_not_found"
    assert await state(house, boxes["gone"]) is State.PAUSED


async def force(house: House, state: str, *boxes: Sandbox) -> None:
    """What a server that was killed in the middle leaves in its database."""
    from skerry.store import open_store

    async with open_store(house.url) as store, store.write() as tx:
        for box in boxes:
            at = "paused_at = COALESCE(paused_at, started_at)"
            await tx.connection.exec_driver_sql(f"UPDATE sandboxes SET state = '{state}', {at} WHERE id = '{box.id}'")


async def test_a_server_that_stops_in_the_middle_settles_it_when_it_starts(house: House) -> None:
    box, other = await house.create(NO_IDLE), await rest(house)
    house.node.faults = Faults(pause=Fault(gate=asyncio.Event()), resume=Fault(gate=asyncio.Event()))
    tasks = [asyncio.create_task(pause(house, box)), asyncio.create_task(resume(house, other))]
    await begun(house, f"pause {box.id}")
    await begun(house, f"resume {other.id}")
    await house.stack.aclose()
    await asyncio.gather(*tasks, return_exceptions=True)
    house.node.faults = Faults()
    await house.start()
    assert await state(house, box) is State.RUNNING
    assert await state(house, other) is State.PAUSED
    assert (await pause(house, box)).state is State.PAUSED
    assert (await resume(house, other)).state is State.RUNNING


async def test_an_image_at_rest_without_a_record_is_removed_at_the_start(house: House) -> None:
    box = await rest(house)
    kept = await rest(house)
    await house.stack.aclose()
    image = house.node.images_at_rest[box.id]
    await force(house, "killed", box)
    house.node.images_at_rest["sb00000000000000000000"] = image
    await house.start()

    async def bare() -> bool:
        return set(house.node.images_at_rest) == {kept.id}

    await until(bare)


# ---------------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_outlives_its_sandbox_and_others_are_made_of_it(house: House) -> None:
    box = await house.create(SandboxSpec(cpu=2, memory_mb=1024, disk_mb=4096, idle_timeout_ms=None))
    house.node.vms[box.id].files["/a"] = b"1"
    snapshots = house.services.snapshots
    taken = await snapshots.take(house.me, box.id, "first")
    assert (taken.state, taken.size_bytes, taken.stood_still_ms) == (SnapshotState.READY, 8192, 12.5)
    assert await state(house, box) is State.RUNNING
    await house.services.sandboxes.kill(house.me, box.id)
    assert await snapshots.get(house.me, "first") == taken == await snapshots.get(house.me, taken.id)
    for ref in ("first", taken.id):
        made = await house.create(SandboxSpec(template=ref, idle_timeout_ms=None))
        assert (made.spec.template, made.spec.cpu, made.spec.memory_mb, made.spec.disk_mb) == ("base", 2, 1024, 4096)
        assert made.snapshot_id == taken.id
        assert house.node.vms[made.id].files == {"/a": b"1"}
    actions = await house.actions(box.id)
    assert [a for a in actions if a[0].startswith("snapshot")] == [
        ("snapshot.requested", Outcome.OK),
        ("snapshot.created", Outcome.OK),
    ]
    await snapshots.delete(house.me, "first")
    assert house.node.snapshots_kept == {}
    for ref in ("first", taken.id):
        with pytest.raises(NotFound) as missing:
            await snapshots.get(house.me, ref)
        assert missing.value.code == "snapshot_not_found"
    with pytest.raises(NotFound):
        await house.create(SandboxSpec(template="first"))
    assert await state(house, made) is State.RUNNING


async def test_what_does_not_fit_a_snapshot_is_refused_by_name(house: House) -> None:
    box = await house.create(SandboxSpec(cpu=2, memory_mb=1024, disk_mb=4096))
    taken = await house.services.snapshots.take(house.me, box.id)
    create = house.services.sandboxes.create
    with pytest.raises(InvalidRequest) as refused:
        await create(
            house.me,
            SandboxSpec(template=taken.id, cpu=1, memory_mb=512, disk_mb=2048),
            given={"cpu", "memory_mb", "disk_mb"},
        )
    assert [(p.field, p.given, p.allowed) for p in refused.value.problems] == [
        ("cpu", 1, 2),
        ("memory_mb", 512, 1024),
        ("disk_mb", 2048, "4096.."),
    ]
    made = await create(
        house.me,
        SandboxSpec(template=taken.id, cpu=2, memory_mb=1024, disk_mb=9000),
        given={"cpu", "memory_mb", "disk_mb"},
    )
    assert (made.spec.cpu, made.spec.disk_mb) == (2, 9000)
    assert len(await house.all()) == 2


async def test_a_snapshot_that_failed_says_so_and_gives_its_name_back(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    house.node.faults.snapshot = Fault(NoSpace("the host's disk is full", code="host_disk_full"))
    with pytest.raises(NoSpace):
        await snapshots.take(house.me, box.id, "n")
    assert await state(house, box) is State.RUNNING
    (failed,) = (await snapshots.list(house.me)).items
    assert (failed.state, failed.error) == (SnapshotState.FAILED, "the host's disk is full")
    assert ("snapshot.failed", Outcome.FAILED) in await house.actions(box.id)
    with pytest.raises(NotFound):
        await snapshots.get(house.me, "n")
    with pytest.raises(Conflict) as refused:
        await house.create(SandboxSpec(template=failed.id))
    assert (refused.value.code, refused.value.retry) == ("snapshot_not_ready", "never")
    house.node.faults = Faults()
    again = await snapshots.take(house.me, box.id, "n")
    assert await snapshots.get(house.me, "n") == again
    await snapshots.delete(house.me, failed.id)


async def test_a_name_must_be_one(house: House) -> None:
    box = await house.create(NO_IDLE)
    for wrong in ("", "No!", "base", ids.new_id(ids.SNAPSHOT)):
        with pytest.raises(InvalidRequest) as bad:
            await house.services.snapshots.take(house.me, box.id, wrong)
        assert bad.value.problems[0].field == "name"


async def test_a_snapshot_of_what_rests_leaves_it_at_rest(house: House) -> None:
    box = await rest(house)
    taken = await house.services.snapshots.take(house.me, box.id, memory=False)
    assert (taken.state, taken.memory) == (SnapshotState.READY, False)
    assert await house.get(box.id) == box
    with pytest.raises(NotFound):
        await house.services.snapshots.get(await house.other_tenant(), taken.id)


async def test_a_snapshot_that_is_being_taken_cannot_be_used_or_deleted(house: House) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.snapshot = Fault(gate=gate)
    snapshots = house.services.snapshots
    taking = asyncio.create_task(snapshots.take(house.me, box.id, "n"))
    await begun(house, f"snapshot {box.id}")
    for act in (snapshots.delete(house.me, "n"), house.create(SandboxSpec(template="n"))):
        with pytest.raises(Conflict) as refused:
            await act
        assert (refused.value.code, refused.value.retry) == ("snapshot_not_ready", "safe")
    gate.set()
    await taking


async def test_a_restart_settles_snapshots_and_drops_those_without_a_record(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    kept, lost = await snapshots.take(house.me, box.id, "kept"), await snapshots.take(house.me, box.id, "lost")
    await house.stack.aclose()
    from skerry.store import open_store

    async with open_store(house.url) as store, store.write() as tx:
        await tx.connection.exec_driver_sql("UPDATE snapshots SET state = 'creating', size_bytes = NULL")
    house.node.snapshots_kept["snp00000000000000000000"] = house.node.snapshots_kept.pop(lost.id)
    await house.start()
    snapshots = house.services.snapshots
    found = await snapshots.get(house.me, kept.id)
    assert (found.state, found.size_bytes) == (SnapshotState.READY, 8192)
    assert (await snapshots.get(house.me, lost.id)).state is SnapshotState.FAILED

    async def dropped() -> bool:
        return set(house.node.snapshots_kept) == {kept.id}

    await until(dropped)


# -------------------------------------------------------------------------------------------------------------- forks


async def test_copies_run_and_are_their_own(house: House) -> None:
    box = await house.create(SandboxSpec(metadata={"a": "1"}, auto_resume=True, idle_timeout_ms=None))
    await (await house.services.processes.start(house.me, box.id, command())).aclose()
    copies = await house.services.forks.fork(house.me, box.id, 3, timeout_ms=60_000, env={"N": "1"})
    assert all(isinstance(copy, Sandbox) for copy in copies)
    found = [copy for copy in copies if isinstance(copy, Sandbox)]
    assert len({box.id, *(copy.id for copy in found)}) == 4
    for copy in found:
        assert copy == await house.get(copy.id)
        assert (copy.state, copy.start_kind, copy.spec.timeout_ms) == (State.RUNNING, "clone", 60_000)
        assert (copy.spec.metadata, copy.spec.auto_resume, copy.spec.env) == ({"a": "1"}, True, {})
        assert house.node.vms[copy.id].spec.env == {"N": "1"}
        assert len(await house.services.processes.list(house.me, copy.id)) == 1
    assert ("sandbox.forked", Outcome.OK) in await house.actions(box.id)
    assert await house.actions(found[0].id) == [("sandbox.requested", Outcome.OK), ("sandbox.created", Outcome.OK)]


async def test_a_copy_that_fails_is_that_copys_result(house: House) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.fork_copies = 2
    copies = await house.services.forks.fork(house.me, box.id, 4, metadata={"b": "2"})
    assert [isinstance(copy, Sandbox) for copy in copies] == [True, True, False, False]
    assert {copy.code for copy in copies if isinstance(copy, SkerryError)} == {"node_full"}
    rows = await house.all()
    assert sorted(row.state.value for row in rows) == ["error", "error", "running", "running", "running"]
    assert {row.end_reason for row in rows if row.state is State.ERROR} == {EndReason.START_FAILED}


@pytest.mark.parametrize("fault", [Fault(NoSpace("full", code="host_disk_full")), Fault(RuntimeError("defect"))])
async def test_a_fork_that_fails_whole_leaves_nothing(house: House, fault: Fault) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.fork = fault
    with pytest.raises(SkerryError):
        await house.services.forks.fork(house.me, box.id, 3)
    await nothing_left(house, box.id)
    assert sorted(row.state.value for row in await house.all()) == ["error", "error", "error", "running"]


async def test_copies_that_would_not_all_have_room_are_refused_before_any_is_begun(house: House) -> None:
    async with house.store.write() as tx:
        await tx.connection.exec_driver_sql("UPDATE tenants SET max_sandboxes = 3")
    box = await house.create(NO_IDLE)
    with pytest.raises(LimitExceeded) as refused:
        await house.services.forks.fork(house.me, box.id, 3)
    assert refused.value.code == "sandbox_limit"
    assert [row.id for row in await house.all()] == [box.id]
    assert house.node.acts == []
    assert len(await house.services.forks.fork(house.me, box.id, 2)) == 2
    for wrong in (0, 21):
        with pytest.raises(InvalidRequest):
            await house.services.forks.fork(house.me, box.id, wrong)


async def test_who_goes_away_during_a_fork_leaves_no_copy(house: House) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.fork = Fault(gate=gate)
    task = asyncio.create_task(house.services.forks.fork(house.me, box.id, 3))
    await begun(house, f"fork {box.id}")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await nothing_left(house, box.id)

    async def over() -> bool:
        return sorted(row.state.value for row in await house.all()) == ["killed", "killed", "killed", "running"]

    await until(over)


# ------------------------------------------------------------------------------------------------------------- others


async def test_rights(house: House) -> None:
    box = await house.create(NO_IDLE)
    taken = await house.services.snapshots.take(house.me, box.id)
    other = await house.other_tenant()
    reader = Principal(house.me.tenant_id, house.me.project_id, "keyr", frozenset({"sandboxes:read", "sandboxes:use"}))
    s = house.services
    for who, error in ((other, NotFound), (reader, Forbidden)):
        for act in (
            s.sandboxes.pause(who, box.id),
            s.sandboxes.resume(who, box.id),
            s.snapshots.take(who, box.id),
            s.forks.fork(who, box.id),
            s.snapshots.delete(who, taken.id),
        ):
            with pytest.raises(error):
                await act
    for act in (s.server.images(reader), s.server.collect_images(reader)):
        with pytest.raises(Forbidden):
            await act
    with pytest.raises(Forbidden):
        s.server.pool(reader)
    assert await s.server.collect_images(house.me) == ["imold"]
    assert [image.damage for image in await s.server.images(house.me, verify=True)] == ["page 7 differs"]
    assert await state(house, box) is State.RUNNING
