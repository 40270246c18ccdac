"""By names under TLS, as a user of the async Python client whose environment holds a domain and no URL."""

import asyncio
import os

from e2b import AsyncSandbox, CommandExitException
from shared import async_sandbox, raises, within

DOMAIN = os.environ["E2B_DOMAIN"]


async def test_commands_and_files():
    box = await async_sandbox()
    assert box.get_host(8000) == f"8000-{box.sandbox_id}.{DOMAIN}"
    assert (await box.commands.run("echo out")).stdout == "out\n"
    with raises(CommandExitException):
        await box.commands.run("exit 3")
    blob = bytes(range(256)) * 40_000
    await box.files.write("blob", blob)
    assert await box.files.read("blob", format="bytes") == blob


async def test_many_at_once():
    box = await async_sandbox()
    done = await asyncio.gather(*(box.commands.run(f"sleep 0.2; echo {n}") for n in range(12)))
    assert [one.stdout for one in done] == [f"{n}\n" for n in range(12)]


async def test_a_watch_is_a_stream():
    box, seen = await async_sandbox(), asyncio.Queue()
    await box.files.make_dir("watched")
    watch = await box.files.watch_dir("watched", seen.put_nowait)
    await box.files.write("watched/new", "x")
    async with within():
        assert (await seen.get()).name == "new"
    await watch.stop()


async def test_pause_and_list():
    box = await AsyncSandbox.create(timeout=300)
    try:
        await box.pause()
        assert not await box.is_running()
        assert box.sandbox_id in [one.sandbox_id for one in await AsyncSandbox.list().next_items()]
        await box.connect()
        assert await box.is_running()
    finally:
        assert await box.kill()
