"""Going to rest and coming back: pause, resume, and settling what was interrupted between the two.

A passage holds its sandbox's `passage` lock from begin to end. The record says first what is meant to happen
(`pausing`, `resuming`), then the node does it, then the record says what came of it. A kill waits for none of that: it
takes the record at once, and a passage that finds it taken makes sure that nothing is left.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import structlog

from skerry.audit import SYSTEM, Outcome
from skerry.control.changes import MISSING, Changes, after_pause, after_resume
from skerry.control.endings import Endings
from skerry.control.live import Live
from skerry.control.recorder import outcome_of
from skerry.control.service import Context, Service
from skerry.core.errors import Conflict, InternalError, LimitExceeded, SkerryError
from skerry.core.lifecycle import FINAL, EndReason, Event, State, gone
from skerry.core.models import Sandbox
from skerry.store import Tenant, Tx

T = TypeVar("T")
IN_PASSAGE: Final = frozenset({State.PAUSING, State.RESUMING})
SETTLE_RETRY_S: Final = 1.0
PAUSED: Final = "sandbox.paused"
RESUMED: Final = "sandbox.resumed"

log = structlog.get_logger(__name__)


def paused_error(live: Live, *, retry: str = "never") -> Conflict:
    """What a request to a sandbox at rest gets."""
    error = Conflict(
        f"sandbox {live.id} is paused; resume it first, or create with auto_resume",
        code="sandbox_paused",
        sandbox_id=live.id,
        state=live.record.state.value,
    )
    error.retry = retry  # pyright: ignore[reportAttributeAccessIssue] - one of the three it may be
    return error


def busy_error(live: Live) -> Conflict:
    """It is between two states, for longer than we wait."""
    return Conflict(
        f"sandbox {live.id} is {live.record.state.value} and something else is being done to it",
        code="sandbox_state",
        retry="safe",
        retry_after=1,
        sandbox_id=live.id,
        state=live.record.state.value,
    )


def runs_error(live: Live) -> Conflict:
    """What a resume that is to boot gets of one that runs."""
    return Conflict(
        f"sandbox {live.id} runs; memory=false boots one that is paused",
        code="sandbox_state",
        sandbox_id=live.id,
        state=live.record.state.value,
    )


def ended_or(live: Live, error: SkerryError) -> SkerryError:
    """Why it is over, if it is; else the error itself."""
    return gone(live.id, live.ended) if live.ended is not None else error


class Passages(Service):
    def __init__(self, context: Context, endings: Endings) -> None:
        super().__init__(context)
        self._endings = endings
        self._resuming: dict[str, asyncio.Task[Sandbox]] = {}

    # --------------------------------------------------------------------------------------------------------- turns

    @asynccontextmanager
    async def turn(self, live: Live) -> AsyncIterator[None]:
        """Hold the sandbox: no other passage, snapshot or fork of it meanwhile. Raises Gone, or Conflict
        `sandbox_state` where another one takes too long."""
        try:
            async with asyncio.timeout(self._config.passage_wait_s):
                await live.passage.acquire()
        except TimeoutError:
            raise busy_error(live) from None
        try:
            if live.ended is not None:
                raise gone(live.id, live.ended)
            yield
        finally:
            live.passage.release()

    async def settled(self, live: Live) -> None:
        """Wait until it is neither pausing nor resuming. Raises Gone, or Conflict `sandbox_state` after a while."""
        try:
            async with asyncio.timeout(self._config.passage_wait_s):
                await live.settled.wait()
        except TimeoutError:
            raise busy_error(live) from None
        if live.ended is not None:
            raise gone(live.id, live.ended)

    async def awake(self, live: Live, actor: str = SYSTEM) -> None:
        """Wait until it runs; one that rests is resumed if it is to be, else it is Conflict `sandbox_paused`."""
        while True:
            await self.settled(live)
            if live.record.state is State.RUNNING:
                return
            if live.record.state is not State.PAUSED:
                raise busy_error(live)
            if not live.record.spec.auto_resume:
                raise paused_error(live)
            await self.resume(live, actor=actor, why="auto_resume")

    # --------------------------------------------------------------------------------------------------------- pause

    async def pause(
        self,
        live: Live,
        *,
        memory: bool = True,
        actor: str = SYSTEM,
        why: str = "requested",
        only_if: Callable[[Sandbox], bool] | None = None,
    ) -> tuple[Sandbox, bool]:
        """Put it to rest. Returns the record and whether this call did it: of one that rests, nothing happens.

        `only_if` is judged on the locked row, when nobody can get in any more. Carried out to the end even if the
        caller is cancelled. On failure it runs on.
        """
        return await self._owned.run(self._pause(live, actor, why, only_if, memory=memory), f"pause {live.id}")

    async def _pause(
        self, live: Live, actor: str, why: str, only_if: Callable[[Sandbox], bool] | None, *, memory: bool
    ) -> tuple[Sandbox, bool]:
        async with self.turn(live), self._moving(live):
            if live.record.state is State.PAUSED:
                return live.record, False
            detail = {"why": why, "memory": memory}
            node = self._nodes.get(live.record.node_id)

            def allowed(row: Sandbox) -> bool:
                return only_if is None or only_if(row)

            row = await self._begin_pause(live, allowed, (PAUSED, actor, detail))
            if row.state is not State.PAUSING:
                return row, False
            error = await self._tried(
                live, lambda: node.pause(live.id, memory=memory), self._config.pause_deadline_s, "pause"
            )
            if error is None:
                audit = (PAUSED, Outcome.OK, actor, detail)
                return await self._finished(live, Event.PAUSE_DONE, after_pause, audit), True
            row = await self._found(live, error, (PAUSED, actor, detail))
            if row.state is State.PAUSED:
                return row, True
            raise error

    async def _begin_pause(
        self, live: Live, allowed: Callable[[Sandbox], bool], audit: tuple[str, str, dict[str, Any]]
    ) -> Sandbox:
        try:
            return await self._apply(
                live, Event.PAUSE, lambda _r, _t, now: {"paused_at": now}, allowed, guard=_room_to_rest
            )
        except LimitExceeded as error:
            action, actor, detail = audit
            said = self._recorder.on(live.record, action, Outcome.REFUSED, actor=actor, **detail, code=error.code)
            await self._recorder.write(said)
            raise

    # -------------------------------------------------------------------------------------------------------- resume

    async def resume(
        self,
        live: Live,
        *,
        timeout_ms: int | None = None,
        memory: bool = True,
        keep_left: bool = True,
        actor: str = SYSTEM,
        why: str = "requested",
    ) -> tuple[Sandbox, bool]:
        """Bring it back. Returns the record and whether this call began it: all who ask meanwhile share the one VM,
        or its failure. On failure it stays paused. `memory` False: by a boot, and by no other call's resume.
        `keep_left`: it gets at least the time that it had left."""
        task = self._resuming.get(live.id)
        first = task is None or task.done()
        if task is None or first or not memory:
            changes = after_resume(timeout_ms, keep_left=keep_left)
            task = self._owned.spawn(self._resume(live, changes, actor, why, memory=memory), f"resume {live.id}")
            if first:  # a boot that comes second fails with the first's success: nobody else is to share that
                self._resuming[live.id] = task
                task.add_done_callback(lambda done: self._forget(live.id, done))
        return await self._owned.join(task), first

    def _forget(self, sandbox_id: str, task: "asyncio.Task[Sandbox]") -> None:
        if self._resuming.get(sandbox_id) is task:
            del self._resuming[sandbox_id]

    async def _resume(self, live: Live, changes: Changes, actor: str, why: str, *, memory: bool) -> Sandbox:
        async with self.turn(live):
            if live.record.state is State.RUNNING:
                if not memory:
                    raise runs_error(live)
                return live.record
            node = self._nodes.get(live.record.node_id)
            async with self._moving(live):
                row = await self._apply(live, Event.RESUME, lambda *_: {}, lambda row: row.state is State.PAUSED)
                if row.state is not State.RESUMING:
                    raise busy_error(live)
                error = await self._tried(
                    live, lambda: node.resume(live.id, memory=memory), self._config.resume_deadline_s, "resume"
                )
                detail = {"why": why, "memory": memory}
                if error is None:
                    audit = (RESUMED, Outcome.OK, actor, detail)
                    row = await self._finished(live, Event.RESUME_DONE, changes, audit)
                else:
                    row = await self._found(live, error, (RESUMED, actor, detail))
                    if row.state is not State.RUNNING:
                        raise error
                live.last_used = self._config.clock()
                self._live.schedule(live)
                return row

    # --------------------------------------------------------------------------------------------------------- steps

    @asynccontextmanager
    async def _moving(self, live: Live) -> AsyncIterator[None]:
        """Nobody gets in. If the record could not be brought to rest at the end, somebody goes on trying."""
        live.settled.clear()
        try:
            yield
        finally:
            if live.ended is None and live.record.state in IN_PASSAGE and not self._owned.closed:
                self._owned.spawn(self._settle_later(live), f"settle {live.id}")
            else:
                live.settled.set()

    async def _settle_later(self, live: Live) -> None:
        async with live.passage:
            while live.ended is None and live.record.state in IN_PASSAGE:
                await asyncio.sleep(SETTLE_RETRY_S)
                try:
                    await self._settle_live(live)
                except SkerryError as error:
                    log.warning("could not settle a sandbox, will retry", sandbox=live.id, error=str(error))
            live.settled.set()

    async def _tried(
        self, live: Live, act: Callable[[], Awaitable[T]], deadline_s: float, what: str
    ) -> SkerryError | None:
        """Ask the node; what went wrong, if anything did."""
        try:
            async with asyncio.timeout(deadline_s):
                await act()
        except TimeoutError:
            return InternalError(
                f"the {what} of sandbox {live.id} did not come to its end within {deadline_s:g} s",
                code="passage_failed",
                step="deadline",
            )
        except SkerryError as error:
            return error
        except Exception as error:
            log.exception("the node broke", sandbox=live.id, act=what)
            return InternalError(f"the node broke: {type(error).__name__}", code="passage_failed", step="node")
        return None

    async def _apply(
        self,
        live: Live,
        event: Event,
        changes: Changes,
        only_if: Callable[[Sandbox], bool] | None = None,
        audit: tuple[str, Outcome, str, dict[str, Any]] | None = None,
        guard: Callable[[Tx, Tenant], Awaitable[None]] | None = None,
    ) -> Sandbox:
        """One step of the record, unless `only_if` says no to the locked row. Raises Gone where a kill came first, and
        what `guard` does, which sees the tenant's row locked."""
        async with live.lock:
            await self._sink.flush()
            async with self._store.write() as tx:
                row = await tx.sandboxes.get(live.id, lock=True)
                if row.state in FINAL:
                    raise gone(live.id, row.end_reason)
                if only_if is None or only_if(row):
                    tenant = await tx.tenants.get(row.tenant_id, lock=guard is not None)
                    if guard is not None:
                        await guard(tx, tenant)
                    now = self._config.clock()
                    moved = await tx.sandboxes.apply(row, event, at=now, **changes(row, tenant, now))
                    if moved is None:
                        raise busy_error(live)
                    if audit is not None:
                        action, outcome, actor, detail = audit
                        said = self._recorder.on(moved, action, outcome, actor=actor, **detail)
                        await self._sink.append_in(tx.audit, said)
                    row = moved
            self._live.update(live, row)
            return row

    async def _finished(
        self, live: Live, event: Event, changes: Changes, audit: tuple[str, Outcome, str, dict[str, Any]]
    ) -> Sandbox:
        try:
            return await self._apply(live, event, changes, None, audit)
        except SkerryError:
            await self._sweep(live)
            raise

    async def _found(self, live: Live, error: SkerryError, audit: tuple[str, str, dict[str, Any]]) -> Sandbox:
        """After a failure: what the node says has become of it. Raises Gone if it is over."""
        action, actor, detail = audit
        await self._recorder.write(
            self._recorder.on(live.record, action, outcome_of(error), actor=actor, **detail, code=error.code)
        )
        try:
            return await self._settle_live(live)
        except SkerryError:
            await self._sweep(live)
            raise

    async def _sweep(self, live: Live) -> None:
        """If it was killed meanwhile: what the node was doing may have ended after the kill had looked. Look again."""
        if live.ended is not None:
            await self._endings.gone(live.id)
            self._endings.reap(live.record)
            await self._endings.gone(live.id)

    # ------------------------------------------------------------------------------------------------------ settling

    async def _settle_live(self, live: Live) -> Sandbox:
        row = live.record
        for event, changes in self._missing(row):
            row = await self._apply(live, event, changes, lambda found, seen=row: found.state is seen.state)
        if self._is_lost(row):
            row, _ = await self._endings.end(
                live.id,
                Event.CRASHED,
                EndReason.CRASHED,
                error="its VM ended while it was being paused",
                only_if=lambda found: found.state is row.state,
            )
        if row.state in FINAL or live.ended is not None:
            raise gone(live.id, live.ended or row.end_reason)
        return row

    async def settle_at_start(self, row: Sandbox) -> None:
        """Bring a record to what its node says, and take the sandbox in. A record that rests stays, even if its image
        is missing: a resume will say so."""
        live = self._live.add(row)
        for event, changes in self._missing(row):
            row = await self._apply(live, event, changes)
        if self._is_lost(row):
            await self._endings.end(
                row.id, Event.CRASHED, EndReason.LOST, error="its VM was not there when the server started"
            )

    def _missing(self, row: Sandbox) -> list[tuple[Event, Changes]]:
        """The events that the record has not seen."""
        there = self._seen(row)
        return MISSING.get((row.state, there), [])

    def _is_lost(self, row: Sandbox) -> bool:
        return row.state in {State.RUNNING, State.PAUSING} and self._seen(row) is None

    def _seen(self, row: Sandbox) -> State | None:
        """RUNNING or PAUSED as its node sees it; None where it sees nothing of it."""
        node = self._nodes.find(row.node_id)
        if node is None:
            return None
        if any(vm.id == row.id for vm in node.sandboxes()):
            return State.RUNNING
        return State.PAUSED if any(image.id == row.id for image in node.paused()) else None


async def _room_to_rest(tx: Tx, tenant: Tenant) -> None:
    """Raises LimitExceeded `paused_limit`."""
    paused = await tx.sandboxes.count_resting(tenant.id)
    if paused >= tenant.max_paused:
        raise LimitExceeded(
            f"the tenant has {paused} sandboxes at rest and may have {tenant.max_paused}: resume or kill one first",
            code="paused_limit",
            limit=tenant.max_paused,
            paused=paused,
            retry_after=5,
        )
