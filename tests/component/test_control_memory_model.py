"""Random lives of sandboxes that rest, are kept and are copied: records, machines, data and answers agree.

The model holds what must be true; the machine does one random thing after another to the real services over a real
database, with a node that fails, loses answers and crashes as told. Time is the test's.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from skerry.control import ControlConfig, Services, open_services
from skerry.core.errors import Conflict, Gone, InternalError, NotFound, OutcomeUnknown, SkerryError
from skerry.core.lifecycle import FINAL, EndReason, State
from skerry.core.models import Sandbox, SandboxSpec, Snapshot, SnapshotState
from skerry.store import open_store
from support.fake_node import FakeImage, FakeNode, Fault, Faults

SETTLE_S = 20.0
FAULTS = st.sampled_from(["none", "none", "error", "defect", "lost", "crash"])
"""What befalls an act: nothing, a refusal, a bug, an answer that is lost after the act, a VMM that dies of it."""


def fault(kind: str) -> Fault | None:
    return {
        "none": None,
        "error": Fault(InternalError("page 7 differs", code="image_damaged")),
        "defect": Fault(RuntimeError("a defect")),
        "lost": Fault(OutcomeUnknown("no answer"), late=True),
        "crash": Fault(crash=True),
    }[kind]


@dataclass
class Expected:
    """What the model knows of one sandbox."""

    spec: SandboxSpec
    expires_at: datetime
    last_used: datetime
    data: bytes
    state: State = State.RUNNING
    remaining: timedelta = timedelta()
    image: bool = True
    """While it rests: whether its image is there."""
    over: EndReason | None = None
    record: Sandbox | None = None
    """Once it is over: the record, which never changes again."""


@dataclass
class Kept:
    """A snapshot: what is in it."""

    id: str
    data: bytes
    there: bool = True


class Rests(RuleBasedStateMachine):
    sandboxes: Bundle[str] = Bundle("sandboxes")
    snapshots: Bundle[Kept] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.mkdtemp(prefix="skerry-model-")
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.node = FakeNode()
        self.model: dict[str, Expected] = {}
        self.kept: dict[str, Kept] = {}
        self.failed = 0
        self.numbers = itertools.count(1)
        self.stack = AsyncExitStack()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, SETTLE_S))

    async def open(self) -> None:
        config = ControlConfig(clock=lambda: self.time, stop_grace_s=0.05, max_sandboxes=1000, pause_retry_s=1)
        self.stack = AsyncExitStack()
        store = await self.stack.enter_async_context(open_store(f"sqlite:///{self.directory}/db"))
        self.services: Services = await self.stack.enter_async_context(open_services(store, self.node, config))

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            await self.open()
            secret = await self.services.keys.bootstrap()
            self.me = await self.services.keys.authenticate(secret)

        self.do(start())

    def teardown(self) -> None:
        self.do(self.stack.aclose())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.directory)

    # ------------------------------------------------------------------------------------------------------- create

    def _made(self, made: Sandbox, data: bytes) -> str:
        assert made.state is State.RUNNING
        assert made.expires_at == self.time + timedelta(milliseconds=made.spec.timeout_ms)
        self.model[made.id] = Expected(made.spec, made.expires_at, self.time, data)
        return made.id

    def few(self) -> bool:
        """Few live at a time, so that much befalls each."""
        return sum(expected.over is None for expected in self.model.values()) < 3

    @precondition(few)
    @rule(
        target=sandboxes,
        idle=st.sampled_from([None, 5_000, 300_000]),
        timeout=st.sampled_from([60_000, 600_000]),
        auto_pause=st.booleans(),
        auto_resume=st.booleans(),
    )
    def create(self, idle: int | None, timeout: int, *, auto_pause: bool, auto_resume: bool) -> str:
        spec = SandboxSpec(timeout_ms=timeout, idle_timeout_ms=idle, auto_pause=auto_pause, auto_resume=auto_resume)
        return self._made(self.do(self.services.sandboxes.create(self.me, spec)), b"")

    @precondition(few)
    @rule(target=sandboxes, kept=snapshots)
    def create_of_a_snapshot(self, kept: Kept) -> Any:
        spec = SandboxSpec(template=kept.id, idle_timeout_ms=None)
        try:
            made = self.do(self.services.sandboxes.create(self.me, spec))
        except NotFound as error:
            assert error.code == "snapshot_not_found"
            assert not kept.there
            return multiple()
        assert kept.there
        return self._made(made, kept.data)

    # ------------------------------------------------------------------------------------------------ acts, with faults

    def _tried(self, work: Coroutine[Any, Any, Any]) -> SkerryError | None:
        try:
            self.do(work)
        except SkerryError as error:
            return error
        return None

    def _wake(self, expected: Expected, timeout_ms: int | None = None) -> None:
        grant = timedelta(milliseconds=expected.spec.timeout_ms if timeout_ms is None else timeout_ms)
        expected.state = State.RUNNING
        expected.expires_at = self.time + max(grant, expected.remaining)
        expected.last_used = self.time

    def _sleep(self, expected: Expected) -> None:
        expected.state = State.PAUSED
        expected.remaining = max(timedelta(), expected.expires_at - self.time)

    def _end(self, expected: Expected, reason: EndReason) -> None:
        if expected.over is None:
            expected.over = reason

    def _gone(self, expected: Expected, error: SkerryError | None) -> bool:
        """An act on one that is over: refused as Gone, with its reason."""
        if expected.over is None:
            return False
        assert isinstance(error, Gone)
        assert error.context["reason"] == expected.over.value
        return True

    @rule(sandbox_id=sandboxes, kind=FAULTS)
    def use(self, sandbox_id: str, kind: str) -> None:
        expected = self.model[sandbox_id]
        self.node.faults = Faults(resume=fault(kind))
        error = self._tried(self.services.processes.list(self.me, sandbox_id))
        self.node.faults = Faults()
        if self._gone(expected, error):
            return
        if expected.state is State.PAUSED:
            if not expected.spec.auto_resume:
                assert isinstance(error, Conflict)
                assert error.code == "sandbox_paused"
                return
            if not self._woken(expected, kind, error):
                return
            self._wake(expected)
        assert error is None
        expected.last_used = self.time
        expected.data = b"%d" % next(self.numbers)
        self.node.vms[sandbox_id].files["/data"] = expected.data

    def _woken(self, expected: Expected, kind: str, error: SkerryError | None) -> bool:
        """Whether a resume has happened; it must have failed exactly where it was made to."""
        done = kind == "none" or (kind == "lost" and expected.image)
        if done and expected.image:
            assert error is None
            return True
        assert error is not None
        return False

    @rule(sandbox_id=sandboxes, kind=FAULTS, memory=st.booleans())
    def pause(self, sandbox_id: str, kind: str, *, memory: bool) -> None:
        expected = self.model[sandbox_id]
        self.node.faults = Faults(pause=fault(kind))
        error = self._tried(self.services.sandboxes.pause(self.me, sandbox_id, memory=memory))
        self.node.faults = Faults()
        if self._gone(expected, error):
            return
        if expected.state is State.PAUSED or kind in {"none", "lost"}:
            assert error is None
            if expected.state is State.RUNNING:
                self._sleep(expected)
        else:
            assert error is not None
            if kind == "crash":
                self._end(expected, EndReason.CRASHED)

    @rule(sandbox_id=sandboxes, kind=FAULTS, timeout=st.sampled_from([None, 60_000, 900_000]), times=st.integers(1, 4))
    def resume(self, sandbox_id: str, kind: str, timeout: int | None, times: int) -> None:
        expected = self.model[sandbox_id]
        self.node.faults = Faults(resume=fault(kind))

        async def work() -> SkerryError | None:
            acts = (self.services.sandboxes.resume(self.me, sandbox_id, timeout_ms=timeout) for _ in range(times))
            found = await asyncio.gather(*acts, return_exceptions=True)
            assert len({type(each) for each in found}) == 1
            assert isinstance(found[0], (Sandbox, SkerryError)), found[0]
            return found[0] if isinstance(found[0], SkerryError) else None

        before = len(self.node.acts)
        error = self.do(work())
        self.node.faults = Faults()
        if self._gone(expected, error):
            return
        if expected.state is State.RUNNING:
            assert error is None
            if timeout is not None:
                wanted = self.time + timedelta(milliseconds=timeout)
                if wanted > expected.expires_at:
                    expected.spec = _with_timeout(expected.spec, timeout)
                expected.expires_at = max(expected.expires_at, wanted)
                expected.last_used = self.time
            return
        assert self.node.acts[before:].count(f"resume {sandbox_id}") == 1
        if self._woken(expected, kind, error):
            self._wake(expected, timeout)

    @rule(target=snapshots, sandbox_id=sandboxes, kind=FAULTS, memory=st.booleans())
    def snapshot(self, sandbox_id: str, kind: str, *, memory: bool) -> Any:
        expected = self.model[sandbox_id]
        if expected.state is State.PAUSED and (kind == "crash" or not expected.image):
            return multiple()
        self.node.faults = Faults(snapshot=fault(kind))
        taken: Snapshot | None = None
        try:
            taken = self.do(self.services.snapshots.take(self.me, sandbox_id, memory=memory))
            error = None
        except SkerryError as raised:
            error = raised
        self.node.faults = Faults()
        if self._gone(expected, error):
            return multiple()
        if taken is None:
            assert kind != "none"
            self.failed += 1
            if kind == "crash":
                self._end(expected, EndReason.CRASHED)
                self._settle()
            return multiple()
        assert kind == "none"
        kept = Kept(taken.id, expected.data)
        self.kept[taken.id] = kept
        return kept

    @rule(kept=consumes(snapshots))
    def delete_snapshot(self, kept: Kept) -> None:
        self.do(self.services.snapshots.delete(self.me, kept.id))
        kept.there = False
        del self.kept[kept.id]

    @rule(target=sandboxes, sandbox_id=sandboxes, count=st.integers(1, 3), up=st.integers(0, 3), kind=FAULTS)
    def fork(self, sandbox_id: str, count: int, up: int, kind: str) -> Any:
        expected = self.model[sandbox_id]
        if expected.state is State.PAUSED and expected.over is None:
            return multiple()  # `use` says what becomes of it
        self.node.faults = Faults(fork=fault(kind), fork_copies=up)
        found: list[Sandbox | SkerryError] = []
        try:
            found = list(self.do(self.services.forks.fork(self.me, sandbox_id, count)))
            error = None
        except SkerryError as raised:
            error = raised
        self.node.faults = Faults()
        if self._gone(expected, error):
            return multiple()
        if kind != "none":
            assert error is not None
            if kind == "crash":
                self._end(expected, EndReason.CRASHED)
                self._settle()
            return multiple()
        made = [copy for copy in found if isinstance(copy, Sandbox)]
        assert (len(found), len(made)) == (count, min(count, up))
        return multiple(*(self._made(copy, expected.data) for copy in made))

    # ---------------------------------------------------------------------------------------------------------- races

    @rule(
        sandbox_id=sandboxes,
        acts=st.lists(st.sampled_from(["pause", "resume", "use", "snapshot", "kill"]), min_size=2, max_size=6),
    )
    def race(self, sandbox_id: str, acts: list[str]) -> None:
        """Several at once: each succeeds or is refused in so many words, and the end is one state of all."""
        expected = self.model[sandbox_id]
        s = self.services
        known: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "pause": lambda: s.sandboxes.pause(self.me, sandbox_id),
            "resume": lambda: s.sandboxes.resume(self.me, sandbox_id),
            "use": lambda: s.processes.list(self.me, sandbox_id),
            "snapshot": lambda: s.snapshots.take(self.me, sandbox_id),
            "kill": lambda: s.sandboxes.kill(self.me, sandbox_id),
        }

        async def work() -> list[Any]:
            return await asyncio.gather(*(known[act]() for act in acts), return_exceptions=True)

        found = self.do(work())
        for act, result in zip(acts, found, strict=True):
            self._check_race(expected, act, result, killed="kill" in acts)
            if isinstance(result, Snapshot):
                self.kept[result.id] = Kept(result.id, expected.data)
        if "kill" in acts:
            self._end(expected, EndReason.KILLED)
        if expected.over is None:
            row = self.do(s.sandboxes.get(self.me, sandbox_id))
            assert row.state in {State.RUNNING, State.PAUSED}
            expected.state, expected.expires_at, expected.last_used = row.state, row.expires_at, self.time
            expected.remaining = timedelta(milliseconds=row.remaining_ms or 0)
        rows = self.do(s.snapshots.list(self.me, limit=100)).items
        self.failed = sum(row.state is SnapshotState.FAILED for row in rows)

    def _check_race(self, expected: Expected, act: str, result: Any, *, killed: bool) -> None:
        if not isinstance(result, BaseException):
            return
        assert isinstance(result, SkerryError), result
        if isinstance(result, Gone):
            assert killed or expected.over is not None
        elif result.code == "image_not_found":
            assert not expected.image
        elif act == "snapshot":
            assert not expected.image, result
        else:
            assert result.code == "sandbox_paused", result
            assert act == "use", result

    # ---------------------------------------------------------------------------------------------------------- ends

    @rule(sandbox_id=sandboxes)
    def kill(self, sandbox_id: str) -> None:
        before = len(self.node.acts)
        self.do(self.services.sandboxes.kill(self.me, sandbox_id))
        self._end(self.model[sandbox_id], EndReason.KILLED)
        assert self.node.acts[before:] == []  # nothing was woken for it

    @rule(sandbox_id=sandboxes)
    def crash(self, sandbox_id: str) -> None:
        if sandbox_id in self.node.vms:
            self.node.crash(sandbox_id)
            self._end(self.model[sandbox_id], EndReason.CRASHED)
            self._settle()

    @rule(seconds=st.sampled_from([1, 4, 6, 61, 400, 5000]))
    def time_passes(self, seconds: int) -> None:
        self.time += timedelta(seconds=seconds)
        for expected in self.model.values():
            if expected.over is None and expected.state is State.RUNNING:
                self._judge(expected)
        self._settle()

    def _judge(self, expected: Expected) -> None:
        idle_ms = expected.spec.idle_timeout_ms
        idle = idle_ms is not None and expected.last_used + timedelta(milliseconds=idle_ms) <= self.time
        reason = EndReason.EXPIRED if expected.expires_at <= self.time else EndReason.IDLE if idle else None
        if reason is not None and expected.spec.auto_pause:
            self._sleep(expected)
        elif reason is not None:
            self._end(expected, reason)

    @rule(
        behind=st.sampled_from(["nothing", "lose a vm", "lose an image", "pause", "resume"]),
        middle=st.sampled_from([None, "pause", "resume", "snapshot"]),
    )
    def restart(self, behind: str, middle: str | None) -> None:
        """The server stops, in the middle of something, and starts; the node has gone on meanwhile."""
        self.do(self._stop(middle))
        self.node.faults = Faults()
        running = sorted(i for i in self.node.vms if i in self.model)
        resting = sorted(self.node.images_at_rest)
        if behind == "lose a vm" and running:
            del self.node.vms[running[0]]
            self._end(self.model[running[0]], EndReason.LOST)
        elif behind == "lose an image" and resting:
            del self.node.images_at_rest[resting[0]]
            self.model[resting[0]].image = False
        elif behind == "pause" and running:
            self.node.images_at_rest[running[0]] = FakeImage(self.node.vms.pop(running[0]), memory=True)
            self._sleep(self.model[running[0]])
        elif behind == "resume" and resting:
            image = self.node.images_at_rest.pop(resting[0])
            self.node.vms[resting[0]] = self.node.new_guest(resting[0], image.guest.spec)
            self.node.vms[resting[0]].take_from(image)
            self._wake(self.model[resting[0]])
        for expected in self.model.values():
            expected.last_used = self.time
        self.do(self.open())
        self._settle()

    async def _stop(self, middle: str | None) -> None:
        wanted = State.PAUSED if middle == "resume" else State.RUNNING
        fit = [i for i, e in self.model.items() if e.over is None and e.state is wanted and e.image]
        task = None
        if middle is not None and fit:
            s = self.services
            self.node.faults = Faults(**{middle: Fault(gate=asyncio.Event())})
            acts = {"pause": s.sandboxes.pause, "resume": s.sandboxes.resume, "snapshot": s.snapshots.take}
            task = asyncio.ensure_future(acts[middle](self.me, fit[0]))
            before = len(self.node.acts)
            while len(self.node.acts) == before:
                await asyncio.sleep(0)
            self.failed += middle == "snapshot"
        await self.stack.aclose()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _settle(self) -> None:
        """Until everything that must have happened has."""

        async def work() -> None:
            while not await self._agree():
                await asyncio.gather(*self.services.timers.start_due())
                await asyncio.sleep(0.005)

        self.do(work())

    async def _agree(self) -> bool:
        for sandbox_id, expected in self.model.items():
            row = await self.services.sandboxes.get(self.me, sandbox_id)
            if (expected.over is not None) != (row.state in FINAL):
                return False
            if expected.over is None and row.state is not expected.state:
                return False
        return True

    # ---------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "me"):
            return

        async def work() -> None:
            running, resting = set[str](), set[str]()
            for sandbox_id, expected in self.model.items():
                row = await self.services.sandboxes.get(self.me, sandbox_id)
                self._check(row, expected)
                if row.state is State.RUNNING:
                    running.add(sandbox_id)
                    assert self.node.vms[sandbox_id].files.get("/data", b"") == expected.data
                elif row.state is State.PAUSED and expected.image:
                    resting.add(sandbox_id)
            # Reapers may be at it.
            while set(self.node.vms) != running or set(self.node.images_at_rest) != resting:
                await asyncio.sleep(0.005)
            while set(self.node.snapshots_kept) != set(self.kept):
                await asyncio.sleep(0.005)

        self.do(work())

    def _check(self, row: Sandbox, expected: Expected) -> None:
        if expected.over is not None:
            assert (row.state in FINAL, row.end_reason) == (True, expected.over)
            assert expected.record is None or row == expected.record
            expected.record = row
            return
        assert row.state is expected.state
        assert (row.spec.auto_pause, row.spec.auto_resume) == (expected.spec.auto_pause, expected.spec.auto_resume)
        assert (row.paused_at is None) == (row.state is State.RUNNING)
        if row.state is State.RUNNING:
            assert row.expires_at == expected.expires_at
            assert row.remaining_ms is None
        else:
            assert row.remaining_ms == round(expected.remaining.total_seconds() * 1000)

    @invariant()
    def snapshots_agree(self) -> None:
        if not hasattr(self, "me"):
            return
        rows = self.do(self.services.snapshots.list(self.me, limit=100)).items
        assert all(row.state is not SnapshotState.CREATING for row in rows)
        assert {row.id for row in rows if row.state is SnapshotState.READY} == set(self.kept)
        assert sum(row.state is SnapshotState.FAILED for row in rows) == self.failed


def _with_timeout(spec: SandboxSpec, timeout_ms: int) -> SandboxSpec:
    return replace(spec, timeout_ms=timeout_ms)


def test_whatever_happens_nothing_diverges_and_nothing_is_stuck() -> None:
    run_state_machine_as_test(
        Rests,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
