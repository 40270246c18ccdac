"""E2B's plugin for Google's ADK: an agent whose model follows a script, with the code interpreter's sandbox."""

from e2b_adk import E2BPlugin
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types


class Script(BaseLlm):
    steps: list[list[types.Part]]

    async def generate_content_async(self, llm_request, stream=False):
        yield LlmResponse(content=types.Content(role="model", parts=self.steps.pop(0)))


def call(name, **args) -> types.Part:
    return types.Part(function_call=types.FunctionCall(name=name, args=args))


async def results_of(steps, **options) -> list[dict]:
    plugin = E2BPlugin(timeout=300, **options)
    model = Script(model="script", steps=[*steps, [types.Part(text="done")]])
    agent = LlmAgent(name="worker", model=model, tools=plugin.get_tools())
    runner = InMemoryRunner(agent=agent, app_name="case", plugins=[plugin])
    found = []
    try:
        session = await runner.session_service.create_session(app_name="case", user_id="me")
        message = types.Content(role="user", parts=[types.Part(text="go on")])
        async for event in runner.run_async(user_id="me", session_id=session.id, new_message=message):
            found += [part.function_response.response for part in event.content.parts if part.function_response]
    finally:
        await runner.close()
    return found


async def test_files_and_commands():
    wrote, listed, read, ran, failed, background = await results_of(
        [
            [call("write_file", path="/home/user/w/a.txt", content="hello\n")],
            [call("list_files", path="/home/user/w")],
            [call("read_file", path="/home/user/w/a.txt")],
            [call("run_command", command="cat w/a.txt; echo $WHO; exit 2")],
            [call("read_file", path="/none")],
            [call("start_background_command", command="sleep 100")],
        ],
        template="base",
        envs={"WHO": "me"},
        metadata={"by": "adk"},
        lifecycle={"on_timeout": "pause", "auto_resume": True},
    )
    assert wrote["success"], wrote
    assert listed["entries"] == [{"name": "a.txt", "type": "file"}]
    assert read["content"] == "hello\n"
    assert (ran["success"], ran["exit_code"], ran["stdout"]) == (True, 2, "hello\nme\n"), ran
    assert not failed["success"]
    assert "does not exist" in failed["error"]
    assert background["success"], background


async def test_code():
    sum_, broken = await results_of(
        [[call("run_code", code="print('hi'); sum(range(10))")], [call("run_code", code="1 / 0")]]
    )
    assert (sum_["success"], sum_["stdout"], sum_["text"] if "text" in sum_ else sum_["result"]) == (True, "hi\n", "45")
    assert broken["success"], broken
    assert "ZeroDivisionError" in broken["error"]
