"""Deep Agents' E2B backend (LangChain): its own methods, and an agent whose model follows a script."""

import asyncio

import e2b
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_e2b import AsyncE2BSandbox, E2BSandbox
from runner import at_end

kept = {}


def backend() -> E2BSandbox:
    if "backend" not in kept:
        sandbox = e2b.Sandbox.create(timeout=900)
        at_end.append(sandbox.kill)
        kept["backend"] = E2BSandbox(sandbox=sandbox)
    return kept["backend"]


def test_commands():
    done = backend().execute("echo out; echo err >&2; exit 3")
    assert (done.output, done.exit_code, done.truncated) == ("out\n\nerr\n", 3, False)
    assert backend().execute("pwd").output == "/home/user\n"
    late = backend().execute("echo begun; sleep 60", timeout=2)
    assert (late.exit_code, late.output) == (124, "Command timed out after 2 seconds")


def test_files():
    box = backend()
    assert box.write("/home/user/notes/a é.txt", "one\ntwo\nthree\n").error is None
    assert "exists" in box.write("/home/user/notes/a é.txt", "again").error
    assert box.read("/home/user/notes/a é.txt", offset=1, limit=1).file_data["content"].rstrip("\n") == "two"
    edited = box.edit("/home/user/notes/a é.txt", "two", "2")
    assert (edited.error, edited.occurrences) == (None, 1)
    assert [found["line"] for found in box.grep("three", "/home/user/notes").matches] == [3]
    assert [found["path"] for found in box.glob("*.txt", "/home/user/notes").matches] == ["a é.txt"]
    assert [found["path"] for found in box.ls("/home/user/notes").entries] == ["/home/user/notes/a é.txt"]
    big = bytes(range(256)) * 20_000
    (sent,) = box.upload_files([("/home/user/big.bin", big)])
    assert sent.error is None
    fetched, none, folder = box.download_files(["/home/user/big.bin", "/home/user/nothing", "/home/user"])
    assert fetched.content == big
    assert (none.error, folder.error) == ("file_not_found", "is_directory")


async def test_async():
    sandbox = await e2b.AsyncSandbox.create(timeout=300)
    try:
        box = AsyncE2BSandbox(sandbox=sandbox)
        first, second = await asyncio.gather(box.aexecute("echo 1"), box.aexecute("echo 2"))
        assert (first.output, second.output) == ("1\n", "2\n")
        assert (await box.awrite("/tmp/x", "long" * 50_000)).error is None
        assert (await box.aedit("/tmp/x", "long" * 50_000, "short" * 20_000)).error is None
        assert (await box.aread("/tmp/x")).file_data["content"].startswith("shortshort")
    finally:
        await sandbox.kill()


class Script(GenericFakeChatModel):
    def bind_tools(self, tools, **_):
        return self


def test_an_agent():
    def call(name, **args):
        return AIMessage(content="", tool_calls=[{"name": name, "args": args, "id": f"call-{name}"}])

    script = Script(
        messages=iter(
            [
                call("write_file", file_path="/home/user/sum.py", content="print(sum(range(10)))\n"),
                call("execute", command="python3 /home/user/sum.py"),
                AIMessage(content="it is done"),
            ]
        )
    )
    agent = create_deep_agent(model=script, backend=backend())
    said = agent.invoke({"messages": [{"role": "user", "content": "add up"}]})["messages"]
    answers = {message.name: message.content for message in said if message.type == "tool"}
    assert answers["execute"].startswith("45"), answers
    assert said[-1].content == "it is done"
