"""The same methods of `AsyncSandbox`: each at least once, with its error cases."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

from e2b import AsyncSandbox, NotFoundException, SandboxException, SandboxQuery, SandboxState

NOWHERE = "sb00000000000000000000"


async def raises(kind, act, text=""):
    try:
        await act
    except kind as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"nothing was raised; {kind.__name__} was expected")


async def test_a_life():
    mark = f"async-{time.time_ns()}"
    sandbox = await AsyncSandbox.create("base", timeout=300, metadata={"mark": mark})
    try:
        info = await sandbox.get_info()
        assert (info.sandbox_id, info.state) == (sandbox.sandbox_id, SandboxState.RUNNING)
        await sandbox.set_timeout(600)
        end = (await sandbox.get_info()).end_at
        assert end > info.end_at
        assert (await AsyncSandbox.connect(sandbox.sandbox_id, timeout=60)).sandbox_id == sandbox.sandbox_id
        assert (await sandbox.get_info()).end_at == end
        pages = AsyncSandbox.list(query=SandboxQuery(metadata={"mark": mark}))
        assert [one.sandbox_id for one in await pages.next_items()] == [sandbox.sandbox_id]
        assert not pages.has_next
        assert len(await sandbox.get_metrics()) >= 1
        assert await sandbox.get_metrics(end=datetime.now(UTC) - timedelta(hours=1)) == []
        await sandbox.update_network({})
        assert await sandbox.is_running()
        assert await sandbox.pause() is True
        assert await sandbox.pause() is False
        assert not await sandbox.is_running()
        await sandbox.connect(timeout=60)
        assert (await sandbox.get_info()).state == SandboxState.RUNNING
    finally:
        assert await sandbox.kill() is True
    assert await sandbox.kill() is False
    assert not await sandbox.is_running()


async def test_copies():
    sandbox = await AsyncSandbox.create("base", timeout=300)
    try:
        forks = await sandbox.fork(count=2, timeout=60)
        assert all(isinstance(one, AsyncSandbox) for one in forks), forks
        await asyncio.gather(*(one.kill() for one in forks))
        snapshot = await sandbox.create_snapshot()
        found = await AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()
        assert [one.snapshot_id for one in found] == [snapshot.snapshot_id]
        copy = await AsyncSandbox.create(snapshot.snapshot_id, timeout=60)
        await copy.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is False
    finally:
        await sandbox.kill()


async def test_errors():
    await raises(SandboxException, AsyncSandbox.create("no-such-template"), "404: ")
    await raises(SandboxException, AsyncSandbox.create("base", network={"allow_out": ["1.1.1.1"]}), "400: ")
    await raises(NotFoundException, AsyncSandbox.connect(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.get_info(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.set_timeout(NOWHERE, 60))
    await raises(NotFoundException, AsyncSandbox.pause(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.fork(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.create_snapshot(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.get_metrics(NOWHERE))
    await raises(NotFoundException, AsyncSandbox.update_network(NOWHERE, {}))
    assert await AsyncSandbox.kill(NOWHERE) is False
    await raises(SandboxException, AsyncSandbox.list(limit=101).next_items(), "400: limit")


async def test_several_creates_at_once():
    made = await asyncio.gather(*(AsyncSandbox.create("base", timeout=60) for _ in range(4)))
    assert len({one.sandbox_id for one in made}) == 4
    assert all(await asyncio.gather(*(one.kill() for one in made)))
