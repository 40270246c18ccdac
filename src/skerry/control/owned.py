"""Background tasks with an owner: whoever starts one here knows that it ends before the services do."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from skerry.core.errors import SkerryError, Unavailable

T = TypeVar("T")
CLEAN_UP_S = 5.0
log = structlog.get_logger(__name__)


class Owned:
    """A set of tasks. A failure of one touches no other; one that nobody awaits is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Raises Unavailable once closing began."""
        if self._closed:
            work.close()
            raise Unavailable("the server is stopping", code="stopping")
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Do it to the end even if the caller is cancelled meanwhile."""
        return await self.join(self.spawn(work, name))

    async def join(self, task: asyncio.Task[T]) -> T:
        """A task's result. Cancelling the caller leaves the task alone."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("the server is stopping", code="stopping", retry="unknown") from None
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # also marks it as seen: a caller that was cancelled never looks
        if error is not None and not isinstance(error, SkerryError):
            log.error("background task failed", task=task.get_name(), exc_info=error)

    async def aclose(self, grace_s: float) -> None:
        """Wait for what runs, then cancel the rest; what is cancelled may still clean up, with tasks of its own."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLEAN_UP_S)
        self._closed = True
        while self._tasks:
            for task in set(self._tasks):
                task.cancel()
            await asyncio.wait(set(self._tasks), timeout=CLEAN_UP_S)
