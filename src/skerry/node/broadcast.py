"""Tells subscribers what happens. What happens while nobody listens is kept for the first who does."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

T = TypeVar("T")

BACKLOG: Final = 1000
"""So many are kept."""


class Broadcast(Generic[T]):
    def __init__(self) -> None:
        self._subscribers: set[asyncio.Queue[T | None]] = set()
        self._backlog: deque[T] = deque(maxlen=BACKLOG)

    def publish(self, event: T) -> None:
        if not self._subscribers:
            self._backlog.append(event)
        for queue in self._subscribers:
            queue.put_nowait(event)

    def close(self) -> None:
        """Ends every iteration."""
        for queue in self._subscribers:
            queue.put_nowait(None)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[T]]:
        queue: asyncio.Queue[T | None] = asyncio.Queue()
        while self._backlog:
            queue.put_nowait(self._backlog.popleft())
        self._subscribers.add(queue)
        try:
            yield _events(queue)
        finally:
            self._subscribers.discard(queue)


async def _events(queue: "asyncio.Queue[T | None]") -> AsyncIterator[T]:
    while (event := await queue.get()) is not None:
        yield event
