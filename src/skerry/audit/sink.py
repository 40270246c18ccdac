"""How a record gets written: at once beside a state change, or off the hot path in batches.

Both ways end in the same append-only table, whose position column is the one order of all records; a signed chain can
later be laid over that order without touching a caller. What `append` was given earlier comes before whatever is
written in a transaction that was opened after `flush` returned.

Durability: a record written with `append_in` is as durable as the state change it belongs to. One given to `append` is
durable within about `LINGER_S` plus one commit; a process that is killed with SIGKILL in that window loses it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, Self

import structlog

from skerry.core.audit import AuditEvent
from skerry.core.errors import Unavailable

LINGER_S: Final = 0.02
"""How long a batch may gather, so that a burst of commands costs one commit."""
BATCH_MAX: Final = 500
QUEUE_MAX: Final = 10_000
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
CLOSE_S: Final = 10.0
FLUSH_S: Final = 15.0
"""So long an act waits for the records of those before it. Then it is refused: on a full disk nobody waits for ever."""

log = structlog.get_logger(__name__)


class AuditTransaction(Protocol):
    """The audit side of an open transaction of the store."""

    async def append(self, events: Sequence[AuditEvent]) -> None: ...


class AuditBackend(Protocol):
    """Where batches are kept. Appending an event twice (same id) must keep one: batches are retried."""

    async def append_audit(self, events: Sequence[AuditEvent]) -> None:
        """Append in this order and commit. Raises only SkerryError."""
        ...


class AuditSink(Protocol):
    """The one way to write a record. Safe for concurrent use within one event loop."""

    async def append(self, event: AuditEvent) -> None:
        """Take a record; returns without waiting for the disk. Waits while the queue is full: nothing is dropped."""
        ...

    async def append_in(self, tx: AuditTransaction, *events: AuditEvent) -> None:
        """Write records in the caller's transaction: they exist if and only if it commits."""
        ...

    async def flush(self) -> None:
        """Returns when all that was appended before is committed. Never call it inside an open transaction.

        Raises Unavailable `audit_unavailable` where that takes too long.
        """
        ...


class AuditLog:
    """The `AuditSink` of a server: a bounded queue and one writer that commits in groups.

    Use as an async context manager; leaving it writes what is queued. A backend that fails is retried for ever with
    the same batch, so order holds and callers are slowed down rather than records lost; only if it still fails
    `CLOSE_S` after closing began is the rest given up, with one error line that says how many.
    """

    def __init__(self, backend: AuditBackend, *, queue_max: int = QUEUE_MAX, linger_s: float = LINGER_S) -> None:
        self._backend = backend
        self._queue_max = queue_max
        self._linger_s = linger_s
        self._queue: deque[AuditEvent] = deque()
        self._taken = 0
        """How many events were ever queued."""
        self._written = 0
        """How many of them are committed; the rest is in `_queue`."""
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress = asyncio.Condition()
        self._writer: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_loop(), name="audit-writer")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing = True
        self._wake.set()
        self._hurry.set()
        writer = self._writer
        if writer is None:
            return
        try:
            await asyncio.wait({writer}, timeout=CLOSE_S)
        finally:
            if not writer.done():
                writer.cancel()
                await asyncio.wait({writer})
                log.error("audit records could not be written", lost=len(self._queue))
        async with self._progress:
            self._progress.notify_all()

    @property
    def backlog(self) -> int:
        """Records that are taken and not yet committed."""
        return len(self._queue)

    async def append(self, event: AuditEvent) -> None:
        if len(self._queue) >= self._queue_max:
            self._hurry.set()
            async with self._progress:
                await self._progress.wait_for(lambda: len(self._queue) < self._queue_max or self._stopped)
        if self._stopped:
            raise Unavailable("the audit log is closed", code="audit_closed")
        self._queue.append(event)
        self._taken += 1
        self._wake.set()

    async def append_in(self, tx: AuditTransaction, *events: AuditEvent) -> None:
        await tx.append(events)

    async def flush(self) -> None:
        goal = self._taken
        if self._written >= goal:
            return
        self._hurry.set()
        try:
            async with asyncio.timeout(FLUSH_S), self._progress:
                await self._progress.wait_for(lambda: self._written >= goal or self._stopped)
        except TimeoutError:
            raise Unavailable(
                "what was done before cannot be recorded now", code="audit_unavailable", retry="safe", retry_after=5
            ) from None
        if self._written < goal:
            raise Unavailable("the audit log is closed", code="audit_closed")

    @property
    def _stopped(self) -> bool:
        return self._writer is None or self._writer.done()

    async def _write_loop(self) -> None:
        while True:
            if not self._queue:
                if self._closing:
                    return
                self._wake.clear()
                self._hurry.clear()
                await self._wake.wait()
            if len(self._queue) < BATCH_MAX:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._linger_s)
            await self._write_one_batch()

    async def _write_one_batch(self) -> None:
        batch = [self._queue[i] for i in range(min(BATCH_MAX, len(self._queue)))]
        if not batch:
            return
        delay = RETRY_MIN_S
        while not await self._try_write(batch):
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_MAX_S)
        for _ in batch:
            self._queue.popleft()
        self._written += len(batch)
        async with self._progress:
            self._progress.notify_all()

    async def _try_write(self, batch: Sequence[AuditEvent]) -> bool:
        try:
            await self._backend.append_audit(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, losing records is worse than trying again
            log.warning("audit batch not written, will retry", records=len(batch), error=_one_line(error))
            return False
        return True


def _one_line(error: BaseException) -> Any:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
