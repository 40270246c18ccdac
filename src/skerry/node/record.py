"""What the engine knows of one sandbox, from the call that creates it until nothing is left of it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from skerry.core.errors import SkerryError, Unavailable
from skerry.core.lifecycle import EndReason, gone
from skerry.node.agents import AgentLink
from skerry.node.aio import TaskSet
from skerry.node.contract import NodePaused, NodeSandbox
from skerry.node.journal import Entry
from skerry.node.resources import Held

T = TypeVar("T")


@dataclass(slots=True)
class Record:
    """`entry` is None until its creation is planned. It runs if `sandbox` is there and `paused` is not."""

    id: str
    memory_mb: int
    created: asyncio.Future[NodeSandbox]
    held: Held
    entry: Entry | None = None
    link: AgentLink | None = None
    sandbox: NodeSandbox | None = None
    paused: NodePaused | None = None
    reason: EndReason | None = None
    """Set as soon as its end has begun."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing is left."""
    waiters: int = 0
    creation: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    acts: set[asyncio.Task[None]] = field(default_factory=set)
    """Pauses, resumes, snapshots and forks under way or waiting for their turn. An end cancels them."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: list[SkerryError] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Running or paused, and not at its end."""
        return self.sandbox is not None and self.reason is None

    @property
    def running(self) -> bool:
        return self.alive and self.paused is None

    def check_alive(self) -> None:
        """Raises Gone if its end has begun."""
        if self.reason is not None:
            raise gone(self.id, self.reason)

    async def act(self, tasks: TaskSet, what: str, body: Callable[[], Awaitable[T]]) -> T:
        """Do something that changes its state: one at a time, in the order of the calls, to its end even if the caller
        leaves. The end of the sandbox cancels it, and the caller is told how the sandbox ended."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                async with self.turn:
                    self.check_alive()
                    outcome.set_result(await body())
            except asyncio.CancelledError:
                closing = Unavailable("this node is closing", code="node_closed")
                _fail(outcome, gone(self.id, self.reason) if self.reason is not None else closing)
                raise
            except BaseException as error:
                _fail(outcome, error)
                if not isinstance(error, SkerryError):
                    raise

        task = tasks.spawn(run(), name=f"{what}-{self.id}")
        self.acts.add(task)
        task.add_done_callback(self._acted(outcome))
        return await asyncio.shield(outcome)

    def _acted(self, outcome: asyncio.Future[T]) -> Callable[[asyncio.Task[None]], None]:
        def done(task: asyncio.Task[None]) -> None:
            self.acts.discard(task)
            if not outcome.done():  # cancelled before its first step
                _fail(outcome, gone(self.id, self.reason))

        return done

    async def quiesce(self) -> None:
        """Cancel what is under way and wait for it."""
        current = asyncio.current_task()
        while tasks := [t for t in self.acts if t is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _fail(outcome: asyncio.Future[T], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)
        outcome.exception()  # seen, even if the caller has left
