"""Files and watches, as a user of the async Python client calls them."""

import asyncio

from e2b import FilesystemEventType as Kind
from e2b import InvalidArgumentException, NotFoundException, SandboxException
from shared import GENERATION, async_sandbox, raises, within


async def test_files_round_trip():
    files = (await async_sandbox()).files
    blob = bytes(range(256)) * 4096
    assert (await files.write("blob", blob)).path == "/home/user/blob"
    assert await files.read("blob", format="bytes") == blob
    assert b"".join([chunk async for chunk in await files.read("blob", format="stream")]) == blob
    await files.write("packed", "again " * 10_000, gzip=True, metadata={"k": "v"})
    assert await files.read("packed", gzip=True) == "again " * 10_000
    assert (await files.get_info("packed")).metadata == {"k": "v"}
    written = await files.write_files([{"path": f"many/{name}", "data": name} for name in "abc"])
    assert [info.name for info in written] == ["a", "b", "c"]


async def test_names():
    files = (await async_sandbox()).files
    assert await files.make_dir("d/e") is True
    assert await files.make_dir("d/e") is False
    await files.write("d/f", "x")
    assert [entry.name for entry in await files.list("d")] == ["e", "f"]
    assert (await files.rename("d/f", "d/g/h")).path == "/home/user/d/g/h"
    assert await files.exists("d/f") is False
    await files.remove("d")
    with raises(NotFoundException):
        await files.list("d")
    with raises(NotFoundException, "path '/home/user/missing' does not exist"):
        await files.read("missing")
    with raises(InvalidArgumentException):
        await files.read("/tmp")


async def test_a_watch_is_a_stream():
    files = (await async_sandbox()).files
    await files.make_dir("watched")
    seen, done, left = [], asyncio.Event(), asyncio.Event()

    def on_event(event):
        seen.append(event)
        if event.type is Kind.REMOVE:
            done.set()

    more = {"include_entry": True} if GENERATION >= (2, 63) else {}
    handle = await files.watch_dir("watched", on_event, on_exit=lambda error: left.set(), recursive=True, **more)
    await files.write("watched/new", "12345")
    await files.remove("watched/new")
    async with within(30):
        await done.wait()
    assert [event.type for event in seen] == [Kind.CREATE, Kind.CHMOD, Kind.WRITE, Kind.REMOVE]
    assert {event.name for event in seen} == {"new"}
    await handle.stop()
    with raises(NotFoundException):
        await files.watch_dir("no-such-directory", on_event)
    with raises(SandboxException):
        await files.watch_dir("blob", on_event)
