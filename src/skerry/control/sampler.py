"""What guests said about themselves lately.

A guest is asked every `sample_s` seconds, but only while there is something to see: it is in use, a command runs in it
that nobody watches, or somebody looked at its numbers within `WATCHED_S`. An idle guest that nobody looks at is never
asked. Asking does not count as activity. What was said is kept in memory, for as long as the sandbox lives, and at most
`POINTS_MAX` points of it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from skerry.control.access import Access
from skerry.control.config import ControlConfig
from skerry.control.live import Live, LiveSandboxes
from skerry.control.nodes import Nodes
from skerry.control.principal import Principal, Scope
from skerry.core.errors import Gone, NotFound, SkerryError
from skerry.core.lifecycle import State
from skerry.core.models import GuestMetrics

POINTS_MAX: Final = 720
"""An hour, at a point every five seconds."""
WATCHED_S: Final = 60.0
"""So long after a look are a guest's numbers followed."""
AT_ONCE: Final = 4
"""Guests that are asked at a time: a hundred busy ones must not be asked in one moment."""
ANSWER_S: Final = 5.0


@dataclass(slots=True)
class _History:
    points: list[GuestMetrics] = field(default_factory=list)
    taken: datetime | None = None
    """When it was last asked, whatever came of it."""
    looked: datetime | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sampler:
    def __init__(self, nodes: Nodes, live: LiveSandboxes, access: Access, config: ControlConfig) -> None:
        self._nodes = nodes
        self._live = live
        self._access = access
        self._config = config
        self._histories: dict[str, _History] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._config.sample_s)
            await self.round()

    async def round(self) -> None:
        """Ask whom there is something to ask, and forget what is over."""
        present = {live.id for live in self._live}
        for sandbox_id in self._histories.keys() - present:
            del self._histories[sandbox_id]
        await self._ask(live for live in self._live if self._is_due(live))

    async def history(
        self,
        principal: Principal,
        sandbox_id: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[GuestMetrics]:
        """The points of a sandbox, oldest first, of one that rests too; both times belong to what is asked for. A
        running one is asked anew if its last point is older than `sample_s`.

        Raises NotFound, Gone, Conflict `sandbox_state`.
        """
        live = await self._access.present(principal, sandbox_id, Scope.READ)
        await self._look([live], until)
        return [p for p in self._of(live).points if _within(p, since, until)]

    async def latest(self, principal: Principal, sandbox_ids: Iterable[str]) -> dict[str, GuestMetrics]:
        """The last point of each that there is, by its id. What is over, or not the caller's to see, is left out."""
        principal.require(Scope.READ)
        found: list[Live] = []
        for sandbox_id in dict.fromkeys(sandbox_ids):
            try:
                found.append(await self._access.present(principal, sandbox_id, Scope.READ))
            except (NotFound, Gone):
                continue
        await self._look(found, None)
        return {live.id: self._of(live).points[-1] for live in found if self._of(live).points}

    # -------------------------------------------------------------------------------------------------------- asking

    def _of(self, live: Live) -> _History:
        return self._histories.setdefault(live.id, _History())

    def _is_due(self, live: Live) -> bool:
        history = self._of(live)
        if not self._can_be_asked(live):
            return False
        if history.taken is None:
            began = live.record.started_at
            return began is not None and self._config.clock() - began >= timedelta(seconds=self._config.sample_s)
        if history.looked is not None and self._config.clock() - history.looked < timedelta(seconds=WATCHED_S):
            return True
        return live.active > 0 or live.busy or live.last_used > history.taken

    def _can_be_asked(self, live: Live) -> bool:
        return live.ended is None and not live.moving and live.record.state is State.RUNNING

    async def _look(self, lives: Sequence[Live], until: datetime | None) -> None:
        now = self._config.clock()
        stale: list[Live] = []
        for live in lives:
            history = self._of(live)
            history.looked = now
            if history.taken is None or now - history.taken >= timedelta(seconds=self._config.sample_s):
                stale.append(live)
        if until is None or until >= now:
            await self._ask(live for live in stale if self._can_be_asked(live))

    async def _ask(self, lives: Iterable[Live]) -> None:
        await asyncio.gather(*(self._sample(live, self._of(live).taken) for live in lives))

    async def _sample(self, live: Live, before: datetime | None) -> None:
        """One more point; none where the guest does not answer, or where it was asked since `before`."""
        history = self._of(live)
        async with history.lock, self._turns:
            if history.taken != before or not self._can_be_asked(live):
                return
            asked = self._config.clock()
            try:
                async with asyncio.timeout(ANSWER_S):
                    said = await self._nodes.get(live.record.node_id).guest(live.id).metrics()
            except (SkerryError, TimeoutError):
                return
            finally:
                history.taken = asked
            at_ms = int(asked.timestamp() * 1000)  # by the clock that `since` and `until` are of
            history.points.append(replace(said, at_ms=at_ms))
            del history.points[:-POINTS_MAX]


def _within(point: GuestMetrics, since: datetime | None, until: datetime | None) -> bool:
    at = point.at_ms / 1000
    return (since is None or at >= since.timestamp()) and (until is None or at <= until.timestamp())
