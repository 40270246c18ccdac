"""Commands and terminals, as a user of the async Python client calls them."""

import asyncio

from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    TimeoutException,
)
from shared import async_sandbox, raises, since, within


async def test_run_gives_output_and_how_it_failed():
    box = await async_sandbox()
    out = []
    done = await box.commands.run("echo out; echo err >&2", on_stdout=out.append)
    assert (done.stdout, done.stderr, done.exit_code, out) == ("out\n", "err\n", 0, ["out\n"])
    with raises(CommandExitException) as caught:
        await box.commands.run("echo partial; exit 3")
    assert (caught.error.exit_code, caught.error.stdout, caught.error.error) == (3, "partial\n", "exit status 3")


async def test_environment_directory_and_user():
    box = await async_sandbox()
    done = await box.commands.run("echo $FOO; pwd; whoami", envs={"FOO": "bar"}, cwd="/tmp", user="root")
    assert done.stdout == "bar\n/tmp\nroot\n"
    with raises(InvalidArgumentException, "cwd '/no/such/place' does not exist"):
        await box.commands.run("pwd", cwd="/no/such/place")
    with raises(AuthenticationException, "invalid username: 'nobody-here'"):
        await box.commands.run("true", user="nobody-here")


async def test_many_commands_at_once():
    box = await async_sandbox()
    done = await asyncio.gather(*(box.commands.run(f"echo {number}") for number in range(12)))
    assert [one.stdout for one in done] == [f"{number}\n" for number in range(12)]


async def test_a_command_in_the_background_is_listed_connected_to_and_killed():
    box = await async_sandbox()
    handle = await box.commands.run("read line; echo got $line; sleep 300", background=True, stdin=True, timeout=0)
    assert handle.pid in [process.pid for process in await box.commands.list()]
    other, heard = [], asyncio.Event()
    again = await box.commands.connect(handle.pid, timeout=0, on_stdout=lambda text: (other.append(text), heard.set()))
    await box.commands.send_stdin(handle.pid, "it\n")
    async with within(30):
        await heard.wait()
    assert other == ["got it\n"]
    assert await handle.kill() is True
    for one in (handle, again):
        with raises(CommandExitException) as caught:
            await one.wait()
        assert (caught.error.exit_code, caught.error.error) == (-1, "signal: killed")
    assert await box.commands.kill(handle.pid) is False
    with raises(NotFoundException, "process with pid 99999 not found"):
        await box.commands.connect(99_999)


async def test_stdin_is_streamed_and_closed():
    since(2, 63)
    box = await async_sandbox()
    handle = await box.commands.run("wc -c", background=True, stdin=True, timeout=0)
    stream = box.commands.stream_input(handle.pid)
    for _ in range(20):
        await stream.send(b"x" * 100_000)
    await stream.close()
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout.strip() == "2000000"


async def test_the_deadline_is_told():
    box = await async_sandbox()
    with raises(TimeoutException):
        await box.commands.run("sleep 300", timeout=1)


async def test_a_terminal():
    box = await async_sandbox()
    got, heard = bytearray(), asyncio.Event()

    def on_data(data):
        got.extend(data)
        if b"30 100\r\n" in got:
            heard.set()

    handle = await box.pty.create(PtySize(rows=24, cols=80), on_data=on_data)
    await box.pty.resize(handle.pid, PtySize(rows=30, cols=100))
    await box.pty.send_stdin(handle.pid, b"stty size\n")
    async with within(30):
        await heard.wait()
    assert await box.pty.kill(handle.pid) is True
    assert await box.pty.kill(handle.pid) is False
    with raises(SandboxException):
        await handle.wait()
