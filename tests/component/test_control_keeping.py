"""What is kept and for how long: names of snapshots, limits, idempotency keys, pauses that keep the disk alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.control import Outcome, Principal
from skerry.core import ids
from skerry.core.errors import Conflict, InternalError, InvalidRequest, LimitExceeded, NoSpace, NotFound, SkerryError
from skerry.core.lifecycle import State
from skerry.core.models import Sandbox, SandboxSpec, SnapshotState
from support.fake_node import Fault, Faults
from support.house import House, command, opened, until
from support.postgres import new_database, postgres

NO_IDLE = SandboxSpec(idle_timeout_ms=None)
DISK_ONLY = SandboxSpec(idle_timeout_ms=None, auto_pause=True, auto_pause_memory=False)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    return new_database(request.getfixturevalue("server"), ids.new_id("db"))


@pytest.fixture
async def house(url: str) -> AsyncIterator[House]:
    async with opened(url) as made:
        yield made


async def limit(house: House, **limits: int) -> None:
    async with house.store.write() as tx:
        await tx.tenants.set_limits(house.me.tenant_id, **limits)


async def begun(house: House, act: str) -> None:
    async def seen() -> bool:
        return act in house.node.acts

    await until(seen)


async def rests(house: House, box: Sandbox) -> None:
    async def seen() -> bool:
        await asyncio.gather(*house.services.timers.start_due())
        return (await house.get(box.id)).state is State.PAUSED

    await until(seen)


# --------------------------------------------------------------------------------------------------- without its memory


@pytest.mark.parametrize(
    "spec", [DISK_ONLY, SandboxSpec(idle_timeout_ms=5000, auto_pause=True, auto_pause_memory=False)]
)
async def test_a_deadline_may_keep_the_disk_alone_each_time(house: House, spec: SandboxSpec) -> None:
    box = await house.create(spec)
    house.node.vms[box.id].files["/f"] = b"kept"
    for _ in range(2):
        house.clock.skip(301)
        await rests(house, box)
        assert not house.node.images_at_rest[box.id].memory
        back = await house.services.sandboxes.resume(house.me, box.id)
        assert (back.state, back.spec) == (State.RUNNING, box.spec)
        assert house.node.vms[box.id].files == {"/f": b"kept"}
    detail = [e.detail for e in (await house.services.sandboxes.events(house.me, box.id)).items]
    assert [d["memory"] for d in detail if "memory" in d] == [False, True, False, True]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SandboxSpec(auto_pause_memory=False), "needs auto_pause"),
        (SandboxSpec(auto_pause=True, auto_resume=True, auto_pause_memory=False), "with auto_resume"),
    ],
)
async def test_what_contradicts_itself_is_refused(house: House, spec: SandboxSpec, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        await house.create(spec)
    assert {p.field for p in refused.value.problems} == {"auto_pause_memory"}
    assert await house.all() == []


async def test_a_resume_may_drop_the_memory_that_was_kept(house: House) -> None:
    box = await house.create(NO_IDLE)
    sandboxes = house.services.sandboxes
    for memory in (True, False):
        await (await house.services.processes.start(house.me, box.id, command())).aclose()
        await sandboxes.pause(house.me, box.id)
        assert (await sandboxes.resume(house.me, box.id, memory=memory)).state is State.RUNNING
        assert len(await house.services.processes.list(house.me, box.id)) == memory
    with pytest.raises(Conflict) as refused:
        await sandboxes.resume(house.me, box.id, memory=False)
    assert (refused.value.code, refused.value.context["state"]) == ("sandbox_state", "running")


async def test_a_boot_is_not_taken_for_a_resume_that_is_under_way(house: House) -> None:
    box = await house.create(NO_IDLE)
    sandboxes = house.services.sandboxes
    await sandboxes.pause(house.me, box.id)
    gate = asyncio.Event()
    house.node.faults.resume = Fault(gate=gate)
    first = asyncio.create_task(sandboxes.resume(house.me, box.id))
    await begun(house, f"resume {box.id}")
    boot = asyncio.create_task(sandboxes.resume(house.me, box.id, memory=False))
    await asyncio.sleep(0.05)
    last = asyncio.create_task(sandboxes.resume(house.me, box.id))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await first).state is (await last).state is State.RUNNING
    with pytest.raises(Conflict):
        await boot


# --------------------------------------------------------------------------------------------------------------- names


async def test_a_name_moves_on_and_what_had_it_stays(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    first = await snapshots.take(house.me, box.id, "n")
    house.node.vms[box.id].files["/f"] = b"later"
    gate = asyncio.Event()
    house.node.faults.snapshot = Fault(gate=gate)
    taking = asyncio.create_task(snapshots.take(house.me, box.id, "n"))
    await begun(house, f"snapshot {box.id}")
    assert await snapshots.get(house.me, "n") == first  # until the new one is ready
    gate.set()
    second = await taking
    house.node.faults.snapshot = Fault(NoSpace("full", code="host_disk_full"))
    with pytest.raises(NoSpace):
        await snapshots.take(house.me, box.id, "n")
    assert await snapshots.get(house.me, "n") == second
    assert await snapshots.get(house.me, first.id) == first
    made = await house.create(SandboxSpec(template="n"))
    assert (made.snapshot_id, house.node.vms[made.id].files) == (second.id, {"/f": b"later"})
    assert (await house.create(SandboxSpec(template=first.id))).snapshot_id == first.id
    await snapshots.delete(house.me, second.id)
    assert await snapshots.get(house.me, "n") == first
    await snapshots.delete(house.me, "n")
    assert (await snapshots.list(house.me)).items == ()
    with pytest.raises(NotFound):
        await snapshots.get(house.me, first.id)


async def test_many_under_one_name_at_once_are_all_there(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    taken = await asyncio.gather(*(snapshots.take(house.me, box.id, "n") for _ in range(5)))
    assert len({each.id for each in taken}) == 5
    newest = max(taken, key=lambda s: (s.created_at, s.id))
    assert await snapshots.get(house.me, "n") == newest


# -------------------------------------------------------------------------------------------------------------- limits


async def test_snapshots_have_a_limit_that_is_told(house: House) -> None:
    await limit(house, max_snapshots=2)
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    found = await asyncio.gather(*(snapshots.take(house.me, box.id) for _ in range(4)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, LimitExceeded)]
    assert [(e.code, e.context["limit"], e.context["kept"]) for e in refused] == [("snapshot_limit", 2, 2)] * 2
    assert len((await snapshots.list(house.me)).items) == 2
    assert ("snapshot.created", Outcome.REFUSED) in await house.actions(box.id)
    await snapshots.delete(house.me, (await snapshots.list(house.me)).items[0].id)
    house.node.faults.snapshot = Fault(NoSpace("full", code="host_disk_full"))
    with pytest.raises(NoSpace):
        await snapshots.take(house.me, box.id)
    house.node.faults = Faults()
    assert (await snapshots.take(house.me, box.id)).state is SnapshotState.READY  # what failed does not count


async def test_sandboxes_at_rest_have_a_limit_that_is_told(house: House) -> None:
    await limit(house, max_paused=1)
    first, second = [await house.create(NO_IDLE) for _ in range(2)]
    sandboxes = house.services.sandboxes
    found = await asyncio.gather(
        *(sandboxes.pause(house.me, box.id) for box in (first, second)), return_exceptions=True
    )
    (refused,) = [each for each in found if isinstance(each, LimitExceeded)]
    assert (refused.code, refused.context["limit"], refused.context["paused"]) == ("paused_limit", 1, 1)
    (awake,) = [box for box in (first, second) if (await house.get(box.id)).state is State.RUNNING]
    (paused,) = [box for box in (first, second) if box is not awake]
    assert ("sandbox.paused", Outcome.REFUSED) in await house.actions(awake.id)
    await house.services.processes.list(house.me, awake.id)  # it runs on, and can be got at
    await sandboxes.resume(house.me, paused.id)
    assert (await sandboxes.pause(house.me, awake.id)).state is State.PAUSED


async def test_a_deadline_without_room_to_rest_kills_nothing(house: House) -> None:
    await limit(house, max_paused=0)
    box = await house.create(DISK_ONLY)
    house.clock.skip(301)
    await asyncio.gather(*house.services.timers.start_due())
    assert (await house.get(box.id)).state is State.RUNNING
    await limit(house, max_paused=1)
    house.clock.skip(31)
    await rests(house, box)


# ---------------------------------------------------------------------------------------------------- idempotency keys


async def test_a_key_is_one_snapshot(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    taking = (snapshots.take(house.me, box.id, "n", idempotency_key="k") for _ in range(5))
    taken = await asyncio.gather(*taking)
    assert len({each.id for each in taken}) == 1
    assert house.node.acts == [f"snapshot {box.id}"]
    other = await house.create(NO_IDLE)
    for again in (
        snapshots.take(house.me, box.id, "m", idempotency_key="k"),
        snapshots.take(house.me, other.id, "n", idempotency_key="k"),
        house.services.forks.fork(house.me, box.id, idempotency_key="k"),
        house.create(NO_IDLE, idempotency_key="k"),
    ):
        with pytest.raises(Conflict) as refused:
            await again
        assert refused.value.code == "idempotency_mismatch"
    await house.services.sandboxes.kill(house.me, box.id)
    assert await snapshots.take(house.me, box.id, "n", idempotency_key="k") == taken[0]
    await house.restart()
    snapshots = house.services.snapshots
    assert await snapshots.take(house.me, box.id, "n", idempotency_key="k") == taken[0]
    with pytest.raises(InvalidRequest):
        await snapshots.take(house.me, other.id, idempotency_key="a space")


async def test_a_snapshot_that_failed_gives_its_key_back(house: House) -> None:
    box = await house.create(NO_IDLE)
    snapshots = house.services.snapshots
    house.node.faults.snapshot = Fault(NoSpace("full", code="host_disk_full"))
    with pytest.raises(NoSpace):
        await snapshots.take(house.me, box.id, idempotency_key="k")
    house.node.faults = Faults()
    taken = await snapshots.take(house.me, box.id, idempotency_key="k")
    assert taken.state is SnapshotState.READY


async def test_a_key_is_one_fork(house: House) -> None:
    box = await house.create(NO_IDLE)
    forks = house.services.forks
    house.node.faults.fork_copies = 2
    made = await asyncio.gather(*(forks.fork(house.me, box.id, 3, idempotency_key="k") for _ in range(4)))
    assert house.node.acts == [f"fork {box.id}"]
    assert len(house.node.vms) == 3

    def told(copies: object) -> list[tuple[str, str]]:
        assert isinstance(copies, (list, tuple))
        return [("ok", c.id) if isinstance(c, Sandbox) else ("error", c.message) for c in copies]

    assert all(told(each) == told(made[0]) for each in made)
    await house.services.sandboxes.kill(house.me, box.id)
    await house.restart()
    again = await house.services.forks.fork(house.me, box.id, 3, idempotency_key="k")
    assert told(again) == told(made[0])
    neighbour = Principal(house.me.tenant_id, "pjother", "keyother", frozenset({"sandboxes:write"}))
    for act in (
        house.services.forks.fork(neighbour, box.id, 3, idempotency_key="k"),
        house.services.snapshots.take(neighbour, box.id, idempotency_key="k"),
    ):
        with pytest.raises(SkerryError) as foreign:
            await act
        assert foreign.value.code in {"sandbox_not_found", "idempotency_mismatch"}
    assert isinstance(again[2], InternalError)
    with pytest.raises(Conflict) as refused:
        await house.services.forks.fork(house.me, box.id, 2, idempotency_key="k")
    assert refused.value.code == "idempotency_mismatch"


async def test_a_fork_of_which_nothing_came_gives_its_key_back(house: House) -> None:
    box = await house.create(NO_IDLE)
    house.node.faults.fork = Fault(NoSpace("full", code="host_disk_full"))
    with pytest.raises(SkerryError):
        await house.services.forks.fork(house.me, box.id, 2, idempotency_key="k")
    house.node.faults = Faults()
    made = await house.services.forks.fork(house.me, box.id, 2, idempotency_key="k")
    assert all(isinstance(copy, Sandbox) for copy in made)


async def test_who_hangs_up_with_a_key_finds_the_copies(house: House) -> None:
    box = await house.create(NO_IDLE)
    gate = asyncio.Event()
    house.node.faults.fork = Fault(gate=gate)
    task = asyncio.create_task(house.services.forks.fork(house.me, box.id, 2, idempotency_key="k"))
    await begun(house, f"fork {box.id}")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.create_task(house.services.forks.fork(house.me, box.id, 2, idempotency_key="k"))
    await asyncio.sleep(0.05)
    gate.set()
    copies = [copy.id for copy in await again if isinstance(copy, Sandbox)]
    assert set(copies) == set(house.node.vms) - {box.id}
    assert len(copies) == 2
