"""Random lives of sandboxes: whatever is done in whatever order, records, machines and answers agree.

The model holds what must be true; the machine does one random thing after another to the real services over a real
database, with a node that fails, stalls and crashes as told. Time is the test's.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from skerry.control import ControlConfig, Services, open_services
from skerry.core import ids
from skerry.core.errors import Gone, InternalError, SkerryError
from skerry.core.lifecycle import FINAL, EndReason, State
from skerry.core.models import ProcessSpec, Sandbox, SandboxSpec
from skerry.store import open_store
from support.fake_node import FakeNode, Faults

SETTLE_S = 20.0


@dataclass
class Expected:
    """What the model knows of one sandbox."""

    expires_at: datetime
    idle_ms: int | None
    last_used: datetime
    over: set[EndReason] = field(default_factory=set)
    """Empty while it lives; else the reasons it may have ended for."""
    record: Sandbox | None = None
    """Once it is over: the record, which never changes again."""
    running: set[str] = field(default_factory=set)
    used: bool = False
    """Whether it ever ran a command since the server started."""


class Lives(RuleBasedStateMachine):
    sandboxes: Bundle[str] = Bundle("sandboxes")
    commands: Bundle[tuple[str, str]] = Bundle("commands")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.mkdtemp(prefix="skerry-model-")
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.node = FakeNode()
        self.model: dict[str, Expected] = {}
        self.stack = AsyncExitStack()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, SETTLE_S))

    async def open(self) -> None:
        config = ControlConfig(clock=lambda: self.time, stop_grace_s=1, max_sandboxes=1000)
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

    @rule(
        target=sandboxes,
        idle=st.sampled_from([None, 5_000, 300_000]),
        timeout=st.sampled_from([60_000, 90_000, 600_000]),
        key=st.sampled_from([None, "k1", "k2"]),
    )
    def create(self, idle: int | None, timeout: int, key: str | None) -> Any:
        spec = SandboxSpec(timeout_ms=timeout, idle_timeout_ms=idle)
        try:
            made: Sandbox = self.do(self.services.sandboxes.create(self.me, spec, idempotency_key=key))
        except SkerryError as error:
            assert error.code == "idempotency_mismatch"
            assert key is not None
            return multiple()
        if made.id in self.model:
            assert key is not None
            return multiple()
        assert made.state is State.RUNNING
        self.model[made.id] = Expected(made.expires_at, idle, self.time)
        assert made.expires_at == self.time + timedelta(milliseconds=timeout)
        return made.id

    @rule(fault=st.sampled_from([InternalError("no", code="vm_start_failed"), RuntimeError("bug")]))
    def create_fails(self, fault: Exception) -> None:
        self.node.faults = Faults(create=fault)
        with pytest.raises(InternalError):
            self.do(self.services.sandboxes.create(self.me, SandboxSpec()))
        self.node.faults = Faults()

    @rule(target=sandboxes, kill=st.booleans(), cancel=st.booleans())
    def create_is_disturbed(self, *, kill: bool, cancel: bool) -> Any:
        """A kill and a vanishing caller in the middle of a create."""

        async def work() -> Sandbox | BaseException:
            gate = asyncio.Event()
            self.node.faults = Faults(create_gate=gate)
            before = self.node.creates
            task = asyncio.create_task(self.services.sandboxes.create(self.me, SandboxSpec(idle_timeout_ms=None)))
            while self.node.creates == before:
                await asyncio.sleep(0)
            page = await self.services.sandboxes.list(self.me, states=[State.CREATING])
            if cancel:
                task.cancel()
            if kill:
                await self.services.sandboxes.kill(self.me, page.items[0].id)
            gate.set()
            self.node.faults = Faults()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            while self.services.server.starting() or (cancel and await self._state(page.items[0].id) not in FINAL):
                await asyncio.sleep(0.005)
            return result

        result = self.do(work())
        if cancel:
            assert isinstance(result, (asyncio.CancelledError, Gone))
        elif kill:
            assert isinstance(result, Gone)
        else:
            assert isinstance(result, Sandbox)
            self.model[result.id] = Expected(result.expires_at, None, self.time)
            return result.id
        return multiple()

    async def _state(self, sandbox_id: str) -> State:
        return (await self.services.sandboxes.get(self.me, sandbox_id)).state

    # ---------------------------------------------------------------------------------------------------------- use

    @rule(target=commands, sandbox_id=sandboxes)
    def start(self, sandbox_id: str) -> Any:
        expected = self.model[sandbox_id]
        spec = ProcessSpec(ids.new_id(ids.PROCESS), shell="sleep 1")

        async def work() -> None:
            await (await self.services.processes.start(self.me, sandbox_id, spec)).aclose()

        if not self._act(expected, work()):
            return multiple()
        expected.running.add(spec.process_id)
        expected.used = True
        expected.last_used = self.time
        return sandbox_id, spec.process_id

    @rule(command=consumes(commands))
    def finish(self, command: tuple[str, str]) -> None:
        sandbox_id, process_id = command
        if sandbox_id in self.node.vms:
            self.node.vms[sandbox_id].finish(process_id)
            self.model[sandbox_id].last_used = self.time
        self.model[sandbox_id].running.discard(process_id)

    @rule(sandbox_id=sandboxes, timeout=st.sampled_from([60_000, 120_000, 900_000]), extend=st.booleans())
    def move_the_end(self, sandbox_id: str, timeout: int, *, extend: bool) -> None:
        expected = self.model[sandbox_id]
        s = self.services.sandboxes
        act = s.extend_timeout if extend else s.set_timeout
        wanted = self.time + timedelta(milliseconds=timeout)
        if self._act(expected, act(self.me, sandbox_id, timeout)):
            expected.expires_at = max(wanted, expected.expires_at) if extend else wanted
            expected.last_used = self.time

    def _act(self, expected: Expected, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether it was done. It must be refused as Gone if and only if the sandbox is over."""
        try:
            self.do(work)
        except Gone as gone:
            assert expected.over
            assert EndReason(gone.context["reason"]) in expected.over
            return False
        assert not expected.over
        return True

    # ---------------------------------------------------------------------------------------------------------- end

    @rule(sandbox_id=sandboxes, times=st.integers(1, 3))
    def kill(self, sandbox_id: str, times: int) -> None:
        expected = self.model[sandbox_id]

        async def work() -> list[Sandbox]:
            return await asyncio.gather(*(self.services.sandboxes.kill(self.me, sandbox_id) for _ in range(times)))

        killed = self.do(work())
        assert all(record == killed[0] for record in killed)
        expected.over = expected.over or {EndReason.KILLED}

    @rule(sandbox_id=sandboxes, reason=st.sampled_from([EndReason.CRASHED, EndReason.POWEROFF]))
    def crash(self, sandbox_id: str, reason: EndReason) -> None:
        if sandbox_id in self.node.vms:
            self.node.crash(sandbox_id, reason)
            self._end(self.model[sandbox_id], reason)
            self._settle()

    @rule(seconds=st.sampled_from([1, 4, 6, 20, 61, 400]))
    def time_passes(self, seconds: int) -> None:
        self.time += timedelta(seconds=seconds)
        self._pass()
        self._settle()

    def _pass(self) -> None:
        for expected in self.model.values():
            if expected.expires_at <= self.time:
                self._end(expected, EndReason.EXPIRED)
            elif expected.idle_ms is not None and not expected.running and not expected.over:
                # Never early. How late, where there were commands, depends on when the guest was last asked.
                due = expected.last_used + timedelta(milliseconds=expected.idle_ms)
                if due <= self.time:
                    expected.over = {EndReason.IDLE, *(MAYBE if expected.used else ())}

    def _end(self, expected: Expected, reason: EndReason) -> None:
        if not expected.over:
            expected.over = {reason}
        elif expected.over >= MAYBE and expected.record is None:
            expected.over = {EndReason.IDLE, reason}

    @rule(lose=st.booleans())
    def restart(self, *, lose: bool) -> None:
        """The server stops and starts; a VM may die meanwhile."""
        self.do(self.stack.aclose())
        living = sorted(self.node.vms)
        if lose and living:
            del self.node.vms[living[0]]
            self._end(self.model[living[0]], EndReason.LOST)
        for expected in self.model.values():
            if not expected.over:
                expected.last_used = self.time
        self.do(self.open())
        self._settle()

    def _settle(self) -> None:
        """Until everything that must have ended has, and nothing but the living is left."""

        async def work() -> None:
            while not await self._agree():
                await asyncio.gather(*self.services.timers.start_due())
                await asyncio.sleep(0.005)

        self.do(work())

    async def _agree(self) -> bool:
        for sandbox_id, expected in self.model.items():
            if expected.over and expected.record is None:
                record = await self.services.sandboxes.get(self.me, sandbox_id)
                if record.state not in FINAL:
                    if expected.over >= MAYBE:
                        continue
                    return False
                assert record.end_reason in expected.over
                expected.over = {record.end_reason}
                expected.record = record
        return True

    # ---------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def records_and_machines_agree(self) -> None:
        if not hasattr(self, "me"):
            return

        async def work() -> None:
            records = {s.id: s async for s in self._all()}
            for sandbox_id, expected in self.model.items():
                self._check(records[sandbox_id], expected)
            live = {sandbox_id for sandbox_id, record in records.items() if record.state not in FINAL}
            assert all(record.state is not State.CREATING for record in records.values())
            while set(self.node.vms) != live:  # reapers may be at it
                await asyncio.sleep(0.005)

        self.do(work())

    def _check(self, record: Sandbox, expected: Expected) -> None:
        if record.state in FINAL:
            assert record.end_reason in expected.over
            assert record.ended_at is not None
            if expected.record is not None:
                assert record == expected.record
            expected.record, expected.over = record, {record.end_reason}
        else:
            assert not expected.over or expected.over >= MAYBE
            assert record.expires_at == expected.expires_at
            if expected.over:  # not found idle yet: it lives, and is judged again as time passes
                expected.over = set()

    async def _all(self) -> Any:
        cursor = None
        while True:
            page = await self.services.sandboxes.list(self.me, limit=3, cursor=cursor)
            for item in page.items:
                yield item
            if (cursor := page.next_cursor) is None:
                return


MAYBE = {EndReason.IDLE, EndReason.MAX_LIFETIME}
"""Marks "idle by now, if the guest was asked": no sandbox of this test ever ends by its tenant's longest life."""


def test_whatever_happens_records_machines_and_answers_agree() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
