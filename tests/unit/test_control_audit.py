"""The audit log: ordered, bounded, never silently short."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from skerry.audit import AuditEvent, AuditLog, Outcome
from skerry.core.errors import Unavailable


def event(n: int) -> AuditEvent:
    return AuditEvent(f"ev{n}", datetime.now(UTC), "tn", None, "system", "a.b", None, Outcome.OK, {"n": n})


class Backend:
    def __init__(self) -> None:
        self.kept: list[int] = []
        self.batches: list[int] = []
        self.failures = 0
        self.open = asyncio.Event()
        self.open.set()

    async def append_audit(self, events: Sequence[AuditEvent]) -> None:
        await self.open.wait()
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database cannot be used now")
        self.batches.append(len(events))
        self.kept += [e.detail["n"] for e in events]


async def test_order_holds_and_a_burst_is_few_commits() -> None:
    backend = Backend()
    async with AuditLog(backend) as log:
        for n in range(1200):
            await log.append(event(n))
        await log.flush()
        assert backend.kept == list(range(1200))
        assert log.backlog == 0
    assert len(backend.batches) <= 4


async def test_flush_waits_for_what_was_there_and_not_for_more() -> None:
    backend = Backend()
    async with AuditLog(backend) as log:
        await log.flush()
        await log.append(event(0))
        backend.open.clear()
        flushing = asyncio.create_task(log.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        backend.open.set()
        await flushing
        assert backend.kept == [0]


async def test_a_flush_that_takes_too_long_is_refused_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.audit.sink.FLUSH_S", 0.1)
    backend = Backend()
    backend.open.clear()
    async with AuditLog(backend) as log:
        await log.append(event(0))
        with pytest.raises(Unavailable) as refused:
            await log.flush()
        assert (refused.value.code, refused.value.retry) == ("audit_unavailable", "safe")
        backend.open.set()
        await log.flush()
    assert backend.kept == [0]


async def test_a_failing_backend_is_retried_with_the_same_batch() -> None:
    backend = Backend()
    backend.failures = 2
    async with AuditLog(backend) as log:
        for n in range(10):
            await log.append(event(n))
        await log.flush()
    assert backend.kept == list(range(10))


async def test_a_full_queue_holds_the_caller_and_drops_nothing() -> None:
    backend = Backend()
    backend.open.clear()
    async with AuditLog(backend, queue_max=5) as log:

        async def write() -> None:
            for n in range(50):
                await log.append(event(n))

        writer = asyncio.create_task(write())
        await asyncio.sleep(0.1)
        assert not writer.done()
        assert log.backlog == 5
        backend.open.set()
        await writer
    assert backend.kept == list(range(50))


async def test_closing_writes_what_is_queued_and_then_refuses() -> None:
    backend = Backend()
    async with AuditLog(backend, linger_s=5) as log:
        for n in range(7):
            await log.append(event(n))
    assert backend.kept == list(range(7))
    with pytest.raises(Unavailable):
        await log.append(event(8))


async def test_what_cannot_be_written_at_the_end_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skerry.audit.sink.CLOSE_S", 0.1)
    backend = Backend()
    async with AuditLog(backend) as log:
        await log.append(event(1))
        backend.failures = 10**9
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await log.flush()
    assert "lost=1" in capsys.readouterr().out
