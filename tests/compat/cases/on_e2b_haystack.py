"""Haystack's E2B tools: each, and an agent whose generator follows a script."""

from e2b import Sandbox, SandboxQuery
from haystack.components.agents import Agent
from haystack.components.generators.chat import MockChatGenerator
from haystack.dataclasses import ChatMessage, ToolCall
from haystack_integrations.tools.e2b import E2BToolset


def test_an_agent():
    tools = E2BToolset(timeout=300, environment_vars={"GREETING": "hello"})
    script = [
        ChatMessage.from_assistant(tool_calls=[ToolCall("write_file", {"path": "in/a.txt", "content": "one\ntwo\n"})]),
        ChatMessage.from_assistant(
            tool_calls=[
                ToolCall("run_bash_command", {"command": "echo $GREETING; wc -l < in/a.txt; exit 4"}, id="a"),
                ToolCall("list_directory", {"path": "in"}, id="b"),
                ToolCall("read_file", {"path": "in/a.txt"}, id="c"),
            ]
        ),
        "done",
    ]
    try:
        agent = Agent(chat_generator=MockChatGenerator(responses=script), tools=tools)
        said = agent.run([ChatMessage.from_user("go on")])["messages"]
        results = [result.result for message in said for result in message.tool_call_results]
        assert results == [
            "File written successfully: in/a.txt",
            "exit_code: 4\nstdout:\nhello\n2\n\nstderr:\n",
            "a.txt",
            "one\ntwo\n",
        ], results
        assert said[-1].text == "done"
    finally:
        sandbox_id = tools.sandbox._sandbox.sandbox_id
        tools.close()
    assert sandbox_id not in [one.sandbox_id for one in Sandbox.list(query=SandboxQuery()).next_items()]


def test_what_fails_is_said():
    tools = E2BToolset(timeout=300)
    try:
        by_name = {tool.name: tool for tool in tools}
        for name, arguments, text in (
            ("read_file", {"path": "/none"}, "does not exist"),
            ("list_directory", {"path": "/none"}, "not"),
            ("write_file", {"path": "/tmp", "content": ""}, "directory"),
            ("run_bash_command", {"command": "sleep 60", "timeout": 1}, "timeout"),
        ):
            try:
                by_name[name].invoke(**arguments)
            except Exception as error:
                assert text in str(error), str(error)
            else:
                raise AssertionError(f"{name} said nothing")
    finally:
        tools.close()
    no_such = E2BToolset(sandbox_template="no-such-template")
    try:
        no_such.warm_up()
    except RuntimeError as error:
        assert "no-such-template" in str(error)
    else:
        raise AssertionError("the template is not there")
