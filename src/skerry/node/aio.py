"""Small pieces of structured concurrency that the node shares."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import structlog

T = TypeVar("T")
P = ParamSpec("P")

log = structlog.get_logger("skerry.node")


async def finish(awaitable: Awaitable[T]) -> T:
    """Await to the end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    For acts that leave something behind (a thread that makes a namespace): the caller then knows that the act is over
    and can undo it. The awaitable must have its own deadline.
    """
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done() and task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - the task's own error is raised by `result` below
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller is told
        raise cancelled
    return task.result()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread and wait for its end, cancelled or not."""
    return await finish(asyncio.to_thread(function, *args, **kwargs))


class TaskSet:
    """Owns background tasks. A task that fails is logged; `aclose` cancels what runs and waits. New ones may follow."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", task=task.get_name(), exc_info=error)

    async def aclose(self) -> None:
        current = asyncio.current_task()
        while tasks := [t for t in self._tasks if t is not current]:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await finish(asyncio.wait(tasks, timeout=30))
