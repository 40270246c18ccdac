"""How sandboxes end: killed, expired, idle, crashed. One way for all of them, and nothing left of any."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from skerry.audit import SYSTEM, Outcome
from skerry.control.recorder import text
from skerry.control.redaction import clean
from skerry.control.service import Context, Service
from skerry.core.errors import Conflict, SkerryError
from skerry.core.lifecycle import FINAL, EndReason, Event
from skerry.core.models import Sandbox

REAP_RETRY_MIN_S: Final = 0.5
REAP_RETRY_MAX_S: Final = 30.0

log = structlog.get_logger(__name__)


class Endings(Service):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reapers: dict[str, asyncio.Task[None]] = {}

    async def end(
        self,
        sandbox_id: str,
        event: Event,
        reason: EndReason,
        *,
        actor: str = SYSTEM,
        error: str | None = None,
        only_if: Callable[[Sandbox], bool] | None = None,
    ) -> tuple[Sandbox, bool]:
        """Make it over, unless it is already or `only_if` (judged on the locked row) says no.

        Returns the record and whether this call ended it. Carried out to the end even if the caller is cancelled.
        The record comes first, the VM after it: from here on nobody gets in, and a kill beats a create under way.
        """
        return await self._owned.run(
            self._end(sandbox_id, event, reason, actor, error, only_if), f"end {sandbox_id} {reason.value}"
        )

    async def _end(
        self,
        sandbox_id: str,
        event: Event,
        reason: EndReason,
        actor: str,
        error: str | None,
        only_if: Callable[[Sandbox], bool] | None,
    ) -> tuple[Sandbox, bool]:
        live = self._live.get(sandbox_id)
        if error is not None and live is not None and live.redactor is not None:
            error = clean(error, live.redactor)
        await self._sink.flush()
        async with self._store.write() as tx:
            row = await tx.sandboxes.get(sandbox_id, lock=True)
            if row.state in FINAL or (only_if is not None and not only_if(row)):
                return row, False
            ended = await tx.sandboxes.apply(
                row, event, at=self._config.clock(), reason=reason, error=text(error) if error is not None else None
            )
            if ended is None:
                raise Conflict("the sandbox changed meanwhile", code="sandbox_state", sandbox_id=sandbox_id)
            if event is Event.START_FAILED:
                await tx.idempotency.release(sandbox_id)
            action = "sandbox.created" if event is Event.START_FAILED else f"sandbox.{_VERB[reason]}"
            outcome = Outcome.FAILED if event is not Event.KILL else Outcome.OK
            detail = {"reason": reason.value, **({"error": text(error)} if error is not None else {})}
            await self._sink.append_in(tx.audit, self._recorder.on(ended, action, outcome, actor=actor, **detail))
        await self._close(ended)
        return ended, True

    async def _close(self, ended: Sandbox) -> None:
        live = self._live.close(ended)
        for process_id, actor in (live.commands if live is not None else {}).items():
            await self._recorder.write(
                self._recorder.on(
                    ended,
                    "command.finished",
                    Outcome.UNKNOWN,
                    actor=actor,
                    process_id=process_id,
                    reason=f"sandbox_{ended.end_reason}",
                )
            )
        self.reap(ended)

    def reap(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Remove the VM, trying again until the node says that nothing is left. One task for each sandbox."""
        return self.reap_stray(sandbox.id, sandbox.node_id)

    def reap_stray(self, sandbox_id: str, node_id: str) -> asyncio.Task[None]:
        """The same for a VM that has no record."""
        task = self._reapers.get(sandbox_id)
        if task is None or task.done():
            task = self._owned.spawn(self._reap(sandbox_id, node_id), f"reap {sandbox_id}")
            self._reapers[sandbox_id] = task
            task.add_done_callback(lambda done: self._forget(sandbox_id, done))
        return task

    def _forget(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        if self._reapers.get(sandbox_id) is task:
            del self._reapers[sandbox_id]

    async def gone(self, sandbox_id: str) -> bool:
        """Wait until nothing is left of its VM, so long as a kill may take. False: the reaper is still at it."""
        task = self._reapers.get(sandbox_id)
        if task is None:
            return True
        done, _ = await asyncio.wait({task}, timeout=self._config.kill_deadline_s)
        return bool(done)

    async def _reap(self, sandbox_id: str, node_id: str) -> None:
        delay = REAP_RETRY_MIN_S
        node = self._nodes.find(node_id)
        while node is not None:
            try:
                async with asyncio.timeout(self._config.kill_deadline_s):
                    await node.kill(sandbox_id)
            except (SkerryError, TimeoutError) as error:
                log.warning("could not remove a VM, will retry", sandbox=sandbox_id, error=str(error) or "timeout")
            else:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, REAP_RETRY_MAX_S)


_VERB: Final = {
    EndReason.KILLED: "killed",
    EndReason.EXPIRED: "expired",
    EndReason.IDLE: "idled_out",
    EndReason.MAX_LIFETIME: "expired",
    EndReason.START_FAILED: "created",
    EndReason.CRASHED: "crashed",
    EndReason.POWEROFF: "powered_off",
    EndReason.LOST: "lost",
}
