"""The one timer: ends or pauses sandboxes whose timeout or idle time is reached.

It sleeps until the next one; the database is asked only about a sandbox whose time seems to have come.
"""

import asyncio
import contextlib
from datetime import timedelta
from typing import Final

import structlog

from skerry.control.endings import Endings
from skerry.control.live import Live
from skerry.control.passages import Passages
from skerry.control.processes import Commands
from skerry.control.sandboxes import Sandboxes
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import SkerryError
from skerry.core.lifecycle import EndReason, Event, State
from skerry.core.models import ProcessState, Sandbox

NAP_MAX_S: Final = 1.0
"""The wall clock may be set while we sleep: no deadline is missed by more than this."""
RETRY_S: Final = 1.0

log = structlog.get_logger(__name__)


class Timers(Service):
    def __init__(
        self, context: Context, sandboxes: Sandboxes, endings: Endings, commands: Commands, passages: Passages
    ) -> None:
        super().__init__(context)
        self._sandboxes = sandboxes
        self._endings = endings
        self._commands = commands
        self._passages = passages

    async def run(self) -> None:
        """For ever."""
        while True:
            self.start_due()
            self._live.wake.clear()
            due = self._live.next_due()
            nap = None
            if due is not None:
                nap = min(NAP_MAX_S, max(0.0, (due - self._config.clock()).total_seconds()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._live.wake.wait(), nap)

    def start_due(self) -> list[asyncio.Task[None]]:
        """Judge those whose time has come, each in a task of its own: a slow guest holds up no other's end."""
        return [
            self._owned.spawn(self.judge(live), f"judge {live.id}")
            for live in self._live.take_due(self._config.clock())
        ]

    async def judge(self, live: Live) -> None:
        """End it, or schedule it again."""
        try:
            await self._judge(live)
        except SkerryError as error:
            log.warning("could not judge a sandbox's time, will retry", sandbox=live.id, error=str(error))
            pause = self._config.pause_retry_s if live.record.spec.auto_pause else RETRY_S
            live.not_before = self._config.clock() + timedelta(seconds=pause)
        else:
            live.not_before = None
        if live.ended is None:
            self._live.schedule(live)

    async def _judge(self, live: Live) -> None:
        now = self._config.clock()
        if live.record.state not in {State.CREATING, State.RUNNING}:
            return
        if live.record.expires_at <= now:
            if not await self._sandboxes.expire(live.id):
                await self._refresh(live)
            return
        idle = live.idle_due(now)
        if live.record.state is State.CREATING or live.active or idle is None:
            return
        if live.busy or idle <= now:
            await self._judge_idle(live)

    async def _judge_idle(self, live: Live) -> None:
        seen = live.last_used
        was_busy = live.busy
        busy = await self._is_busy(live)
        now = self._config.clock()
        if live.active or live.last_used != seen:
            return
        live.busy = busy
        if busy or was_busy:
            # A command that nobody watched has ended some time after we last looked: idleness counts from now.
            live.last_used = now
            return
        due = live.idle_due(now)
        if due is not None and due <= now:

            def idle(row: Sandbox) -> bool:
                return row.state is State.RUNNING and not live.active and live.last_used == seen

            if live.record.spec.auto_pause:
                memory = live.record.spec.auto_pause_memory
                await self._passages.pause(live, memory=memory, why="idle", only_if=idle)
            else:
                await self._endings.end(live.id, Event.KILL, EndReason.IDLE, only_if=idle)

    async def _is_busy(self, live: Live) -> bool:
        """Whether a command runs, beside the template's own. A guest that does not answer counts as busy: its timeout
        ends it, not a guess."""
        try:
            async with asyncio.timeout(self._config.guest_deadline_s):
                found = await self._commands.look(live, self._nodes.get(live.record.node_id).guest(live.id))
        except (SkerryError, TimeoutError):
            return True
        running = (process for process in found if process.state is ProcessState.RUNNING)
        return any(process.process_id != ids.START_PROCESS for process in running)

    async def _refresh(self, live: Live) -> None:
        """Our copy said that it was over, the row does not: take the row."""
        async with live.lock:
            async with self._store.read() as tx:
                row = await tx.sandboxes.get(live.id)
            self._live.update(live, row)
