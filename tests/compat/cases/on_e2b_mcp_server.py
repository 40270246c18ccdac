"""E2B's MCP server, started as an MCP client would start it. It sits on a client of the first major version, which
knows nothing but a domain."""

import json
import os
import sys

from e2b_code_interpreter import Sandbox
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER = StdioServerParameters(
    command=sys.executable, args=["-c", "from e2b_mcp_server import main; main()"], env=dict(os.environ)
)


async def test_run_code():
    before = {one.sandbox_id for one in Sandbox.list()}
    try:
        async with stdio_client(SERVER) as streams, ClientSession(*streams) as session:
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["run_code"]
            answer = await session.call_tool(
                "run_code", {"code": "import sys; print(6 * 7); print('e', file=sys.stderr)"}
            )
            assert not answer.isError, answer
            said = json.loads(answer.content[0].text)
            assert {stream: "".join(pieces) for stream, pieces in said.items()} == {"stdout": "42\n", "stderr": "e\n"}
            assert (await session.call_tool("run_code", {"code": 1})).isError
    finally:
        for one in Sandbox.list():
            if one.sandbox_id not in before:
                Sandbox.kill(one.sandbox_id)


def test_the_first_major_version_of_the_client():
    sandbox = Sandbox("base", timeout=120)
    try:
        assert sandbox.commands.run("echo $((6 * 7))").stdout == "42\n"
        sandbox.files.write("a/é.txt", "text")
        assert sandbox.files.read("a/é.txt") == "text"
        assert [entry.name for entry in sandbox.files.list("a")] == ["é.txt"]
        assert sandbox.is_running()
        sandbox.set_timeout(60)
    finally:
        sandbox.kill()
    assert sandbox.sandbox_id not in [one.sandbox_id for one in Sandbox.list()]
