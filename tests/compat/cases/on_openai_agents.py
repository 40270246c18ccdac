"""The E2B client of OpenAI's Agents SDK: an agent in a sandbox whose model follows a script, and its sessions."""

import asyncio
import io
import urllib.request
from pathlib import Path

import e2b
from agents import RunConfig, Runner, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError
from agents.testing import ScriptedModel, assistant_message, function_call

set_tracing_disabled(True)


def options(**more) -> E2BSandboxClientOptions:
    return E2BSandboxClientOptions(E2BSandboxType.E2B, template="base", timeout=300, **more)


async def end(session):
    await session.aclose()
    e2b.Sandbox.kill(session.state.sandbox_id)


async def test_an_agent():
    model = ScriptedModel(
        [
            [function_call("exec_command", {"cmd": "cat data.txt && echo from $WHO", "login": False}, call_id="one")],
            [assistant_message("read it")],
        ]
    )
    agent = SandboxAgent(name="reader", model=model, capabilities=[Shell()])
    manifest = Manifest(entries={"data.txt": File(content=b"forty-two\n")}, environment={"value": {"WHO": "sandbox"}})
    session = await E2BSandboxClient().create(manifest=manifest, options=options(metadata={"by": "agents"}))
    try:
        async with session:
            how = RunConfig(sandbox=SandboxRunConfig(session=session))
            done = await Runner.run(agent, "what does it say?", run_config=how)
            assert done.final_output == "read it"
            (output,) = [item.output for item in done.new_items if item.type == "tool_call_output_item"]
            assert "forty-two" in output, output
            assert "from sandbox" in output, output
        model.assert_complete()
    finally:
        e2b.Sandbox.kill(session.state.sandbox_id)


async def test_a_session():
    session = await E2BSandboxClient().create(options=options(exposed_ports=(8000,), envs={"A": "1"}))
    try:
        await session.start()
        assert await session.running()
        done = await session.exec("echo out; echo $A >&2; exit 3")
        assert (done.stdout, done.stderr, done.exit_code) == (b"out\n", b"1\n", 3)
        try:
            await session.exec("sleep 30", timeout=1)
        except ExecTimeoutError:
            pass
        else:
            raise AssertionError("it was not late")
        await session.write(Path("deep/é.bin"), io.BytesIO(bytes(range(256))))
        assert (await session.read(Path("deep/é.bin"))).read() == bytes(range(256))
        assert [Path(entry.path).name for entry in await session.ls("deep")] == ["é.bin"]
        await session.rm("deep", recursive=True)
        await port(session)
    finally:
        await end(session)


async def port(session):
    """The endpoint that it is told of a port leads there."""
    await session.exec(
        "mkdir -p site && echo hello > site/i && (cd site && python3 -m http.server 8000 >/dev/null 2>&1 &)"
    )
    at = await session.resolve_exposed_port(8000)
    assert not at.tls
    loopback = urllib.request.Request(f"http://127.0.0.1:{at.port}/i", headers={"Host": f"{at.host}:{at.port}"})
    for _ in range(100):
        try:
            assert urllib.request.urlopen(loopback, timeout=10).read() == b"hello\n"
            return
        except urllib.error.HTTPError as error:
            assert error.code == 502, error
            await asyncio.sleep(0.2)
    raise AssertionError("nothing answers")


async def test_a_terminal():
    session = await E2BSandboxClient().create(options=options())
    try:
        await session.start()
        begun = await session.pty_exec_start("python3 -q", tty=True, yield_time_s=5)
        assert begun.exit_code is None
        said = b""
        for _ in range(20):
            more = await session.pty_write_stdin(
                session_id=begun.process_id, chars="" if said else "print(6 * 7)\n", yield_time_s=2
            )
            said += more.output
            if b"42\r\n" in said:
                break
        assert b"42\r\n" in said, said
        await session.pty_terminate_all()
    finally:
        await end(session)


async def test_its_workspace_goes_on_in_another_sandbox():
    first = await E2BSandboxClient().create(options=options())
    second = None
    try:
        await first.start()
        await first.write(Path("kept.txt"), io.BytesIO(b"kept\n"))
        archive = await first.persist_workspace()
        second = await E2BSandboxClient().create(options=options())
        await second.start()
        await second.hydrate_workspace(archive)
        assert (await second.read(Path("kept.txt"))).read() == b"kept\n"
    finally:
        for session in (first, second):
            if session is not None:
                await end(session)


async def test_a_memory_snapshot_of_its_workspace():
    session = await E2BSandboxClient().create(options=options(workspace_persistence="snapshot"))
    snapshots = []
    try:
        await session.start()
        before = session.state.sandbox_id
        await session.exec("echo here > state.txt")
        reference = await session.persist_workspace()
        snapshots = [one.snapshot_id for one in await e2b.AsyncSandbox.list_snapshots(sandbox_id=before).next_items()]
        assert len(snapshots) == 1
        await session.exec("rm state.txt")
        await session.hydrate_workspace(reference)
        assert session.state.sandbox_id != before
        assert (await session.read(Path("state.txt"))).read() == b"here\n"
    finally:
        await end(session)
        for one in snapshots:
            e2b.Sandbox.delete_snapshot(one)


async def test_paused_at_its_end_and_resumed():
    client = E2BSandboxClient()
    session = await client.create(options=options(pause_on_exit=True))
    sandbox_id = session.state.sandbox_id
    try:
        async with session:
            await session.exec("echo still > here.txt; sleep 300 &")
        assert e2b.Sandbox.get_info(sandbox_id).state == e2b.SandboxState.PAUSED
        again = await client.resume(session.state)
        async with again:
            assert again.state.sandbox_id == sandbox_id
            assert (await again.exec("cat here.txt; pgrep -x sleep >/dev/null && echo runs")).stdout == b"still\nruns\n"
    finally:
        e2b.Sandbox.kill(sandbox_id)
