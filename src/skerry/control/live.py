"""What this server knows about sandboxes that are not over, in memory, so that no command waits for the database."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from skerry.core.lifecycle import EndReason, State
from skerry.core.models import Sandbox
from skerry.core.redact import Redactor
from skerry.core.step_tokens import Grant


@dataclass(slots=True, eq=False)
class Live:
    """One sandbox. Streams keep hold of it beyond its end, to learn how it ended."""

    record: Sandbox
    last_used: datetime
    active: int = 0
    """Requests and streams under way."""
    ended: EndReason | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the sandbox is over."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its create has succeeded or failed."""
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it runs, and once it is over."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the record is changed, in the database and here."""
    passage: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the begin to the end of a pause, a resume, a snapshot or a fork. A kill never waits for it."""
    egress: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while what may leave it is brought to its node."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while it goes to rest or comes back from it: nobody gets in meanwhile."""
    not_before: datetime | None = None
    """A pause at its deadline has failed: when to try again."""
    commands: dict[str, str] = field(default_factory=dict)
    """Process id → actor of commands whose end is not in the audit record yet."""
    busy: bool = False
    """Whether a command may run that nobody watches."""
    secrets: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)
    """The secrets (id, version → value) that it was ever given: its memory may hold them."""
    redactor: Redactor | None = None
    """Takes them out of what it says. None: it was given none."""
    grants: dict[str, Grant] = field(default_factory=dict)
    """By id: what it may trade step tokens for."""
    turn: int = 0
    """Which entry of the timer's heap counts."""

    def __post_init__(self) -> None:
        self.settled.set()

    def learn(self, secrets: Mapping[tuple[str, int], bytes]) -> None:
        """From now on these are taken out of what it says."""
        if secrets.keys() - self.secrets.keys():
            self.secrets.update(secrets)
            self.redactor = Redactor(self.secrets.values())

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def moving(self) -> bool:
        return not self.settled.is_set()

    def idle_due(self, now: datetime) -> datetime | None:
        """When it will have been idle for too long if nothing more happens. None: never."""
        idle = self.record.spec.idle_timeout_ms
        if idle is None or self.record.started_at is None:
            return None
        since = now if self.active else self.last_used
        return since + timedelta(milliseconds=idle)


class LiveSandboxes:
    """All of them, and the times at which each has to be looked at."""

    def __init__(self, clock: Callable[[], datetime], busy_check_s: float) -> None:
        self._clock = clock
        self._busy_check = timedelta(seconds=busy_check_s)
        self._live: dict[str, Live] = {}
        self._heap: list[tuple[datetime, int, str]] = []
        self._turns = itertools.count(1)
        self.wake = asyncio.Event()
        """Set when an earlier time than before was added."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._live.values()))

    def get(self, sandbox_id: str) -> Live | None:
        return self._live.get(sandbox_id)

    def add(self, record: Sandbox) -> Live:
        live = Live(record, last_used=self._clock())
        self._live[record.id] = live
        self._decide(live)
        self.schedule(live)
        return live

    def update(self, live: Live, record: Sandbox) -> None:
        """After the database took the change. Never brings back what is over."""
        if live.ended is None:
            live.record = record
            self._decide(live)
            self.schedule(live)

    def _decide(self, live: Live) -> None:
        if live.record.state is not State.CREATING:
            live.decided.set()
        if live.record.state is State.RUNNING:
            live.awake.set()
        else:
            live.awake.clear()

    def close(self, record: Sandbox) -> Live | None:
        """It is over: nobody gets in any more, and everybody who is inside learns why."""
        live = self._live.pop(record.id, None)
        if live is not None:
            live.record = record
            live.ended = record.end_reason or EndReason.KILLED
            live.over.set()
            live.decided.set()
            live.awake.set()
            live.settled.set()
        return live

    def enter(self, live: Live) -> None:
        """Activity begins: until `leave` the sandbox is not idle."""
        live.active += 1
        live.last_used = self._clock()

    def leave(self, live: Live) -> None:
        live.active -= 1
        live.last_used = self._clock()
        if live.commands and not live.busy and live.ended is None and live.record.state is State.RUNNING:
            live.busy = True
            self.schedule(live)

    # ------------------------------------------------------------------------------------------------------- timer

    def schedule(self, live: Live) -> None:
        """Look at it when its timeout or idle time may be reached. There is one entry for each sandbox that counts.

        An entry for idleness is not moved at each use: when its time comes it is simply found to be early. While a
        command may run that nobody watches, the guest has to be asked more often, to learn when it ended.
        """
        live.turn = next(self._turns)
        if live.record.state not in {State.CREATING, State.RUNNING}:
            return  # its time stands still
        now = self._clock()
        due = live.record.expires_at
        idle = live.idle_due(now)
        if idle is not None:
            due = min(due, min(idle, now + self._busy_check) if live.busy and not live.active else idle)
        if live.not_before is not None:
            due = max(due, live.not_before)
        heapq.heappush(self._heap, (due, live.turn, live.id))
        if self._heap[0][1] == live.turn:
            self.wake.set()

    def next_due(self) -> datetime | None:
        while self._heap:
            due, turn, sandbox_id = self._heap[0]
            live = self._live.get(sandbox_id)
            if live is not None and live.turn == turn:
                return due
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: datetime) -> list[Live]:
        """Those whose time has come. Each must be scheduled again by whoever took it, or ended."""
        found: list[Live] = []
        while (due := self.next_due()) is not None and due <= now:
            _, _, sandbox_id = heapq.heappop(self._heap)
            found.append(self._live[sandbox_id])
        return found
