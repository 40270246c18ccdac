"""Start commands of templates, in real VMs: part of the memory image, waited for, and told when they fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.core import ids
from skerry.core.errors import InternalError, NotFound
from skerry.core.models import Exited, Output, ProcessSpec, ProcessState, SandboxSpec
from skerry.images.model import Start
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from skerry.node.vmm.qemu.driver import QemuDriver
from support.node import Left, built_images, cache_dir

pytestmark = [pytest.mark.vm, pytest.mark.slow]
SPEC = SandboxSpec("started", memory_mb=256)
Open = Callable[[Start], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """An engine with a template `started`: `base` with a start command."""

    @asynccontextmanager
    async def opened(start: Start) -> AsyncIterator[Engine]:
        config = NodeConfig(tmp_path, cache_dir(), slots=1, pool_floor=0, pool_ceiling=0)
        found = built_images(config.cache_dir)
        base = found.templates["base"]
        started = replace(base, name="started", key=f"{base.key}-{hash(start)}", memory_mb=256, start=start)
        images = replace(found, templates={"base": base, "started": started})
        async with Engine(config, QemuDriver(found.toolchain, "tcg", found.jail), images) as engine:
            yield engine
            for sandbox in [*engine.sandboxes(), *engine.paused()]:
                await engine.kill(sandbox.id)
        left = Left.of(config)
        assert left.nothing, left

    return opened


async def run(guest: Guest, command: str) -> str:
    stream = await guest.start(ProcessSpec(ids.new_id(ids.PROCESS), shell=command, timeout_ms=60_000))
    out = b""
    try:
        async for event in stream:
            if isinstance(event, Output):
                out += event.data
            elif isinstance(event, Exited):
                assert event.status.exit_code == 0, (event, out)
    finally:
        await stream.aclose()
    return out.decode().strip()


async def test_what_was_started_runs_in_every_clone_and_goes_on_from_the_same_moment(opened: Open):
    start = Start(
        "echo begun >> /home/user/begun; echo $$ > /home/user/pid; sleep 1; touch /home/user/ready; exec sleep 100000",
        ready="[ -e /home/user/ready ]",
        user="user",
    )
    async with opened(start) as engine:
        assert engine.template("started").memory_mb == 256
        for name in ("one", "two"):
            made = await engine.create(name, SPEC)
            assert made.start_kind == "clone"
            guest = engine.guest(name)
            (process,) = [p for p in await guest.processes() if p.state is ProcessState.RUNNING]
            assert (process.process_id, process.tag, process.user) == (ids.START_PROCESS, "template-start", "user")
            assert await run(guest, "cat /home/user/begun; ps -o user=,args= -p $(cat /home/user/pid)") == (
                "begun\nuser     sleep 100000"
            )
        # Without its memory it boots, and the command is run again; it is no reason not to come up that it fails.
        await run(engine.guest("two"), "sync; rm /home/user/ready; chmod 500 /home/user")
        await engine.pause("two", memory=False)
        assert (await engine.resume("two")).start_kind == "boot"
        async with asyncio.timeout(60):
            while ids.START_PROCESS not in {p.process_id for p in await engine.guest("two").processes()}:
                await asyncio.sleep(0.1)
        assert await run(engine.guest("two"), "cat /home/user/begun") == "begun\nbegun"


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Start("echo it is broken >&2; exit 3", ready="false"), "ended with exit code 3; it said last: it is broken"),
        (Start("sleep 1000", ready="echo not yet; exit 1", ready_timeout_s=2), "did not succeed within .*not yet"),
        (Start("true", ready="true", user="nobody-of-this-name"), "there is no user 'nobody-of-this-name'"),
    ],
    ids=["fails", "never ready", "no user"],
)
async def test_a_template_that_does_not_start_says_why(opened: Open, start: Start, said: str):
    async with opened(start) as engine:
        with pytest.raises(InternalError, match=said) as caught:
            await engine.create("one", SPEC)
        assert caught.value.code == "template_start_failed"
        assert not engine.sandboxes()


async def test_a_template_with_a_recipe_that_is_not_built_says_how_to_build_it(opened: Open):
    async with opened(Start("true")) as engine:
        with pytest.raises(NotFound, match=r"python -m skerry\.images build code-interpreter-v1"):
            await engine.create("one", replace(SPEC, template="code-interpreter-v1"))
        with pytest.raises(NotFound, match="there is no template 'other'; there is: base, started"):
            engine.template("other")
