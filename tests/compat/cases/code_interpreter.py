"""The code interpreter, as a user of its Python client calls it."""

import asyncio
import base64
import time

from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, LineChart
from runner import at_end
from shared import LIFE_S, raises, within

_made = {}


def sandbox() -> Sandbox:
    if "sync" not in _made:
        _made["sync"] = Sandbox.create(timeout=LIFE_S, envs={"OF_ALL": "everywhere"})
        at_end.append(_made["sync"].kill)
    return _made["sync"]


def test_the_last_value_is_the_text_and_state_stays():
    assert sandbox().run_code("x = 1; x += 1; x").text == "2"
    done = sandbox().run_code("x + 1")
    assert (done.text, done.error, done.logs.stdout) == ("3", None, [])
    assert done.execution_count and done.execution_count > 1
    assert sandbox().run_code("'hello'").text == "hello"


def test_output_streams_while_the_code_runs():
    came = []
    code = "import sys, time\nfor i in range(3):\n  print(i)\n  time.sleep(0.5)\nprint('last', file=sys.stderr)"
    done = sandbox().run_code(
        code,
        on_stdout=lambda out: came.append((out.line, out.error, time.monotonic())),
        on_stderr=lambda out: came.append((out.line, out.error, time.monotonic())),
    )
    assert "".join(line for line, error, _ in came if not error) == "0\n1\n2\n"
    assert "".join(line for line, error, _ in came if error) == "last\n"
    assert came[-1][2] - came[0][2] > 0.7, "it all came at once"
    assert "".join(done.logs.stdout) == "0\n1\n2\n"
    assert "".join(done.logs.stderr) == "last\n"


def test_a_line_chart_is_a_picture_and_data():
    results = []
    done = sandbox().run_code(
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 3], [4, 5, 6], label='steps')\nplt.title('A title'); plt.xlabel('Time (s)')\nplt.show()",
        on_result=results.append,
    )
    (result,) = done.results
    assert results == [result]
    assert base64.b64decode(result.png).startswith(b"\x89PNG")
    chart = result.chart
    assert isinstance(chart, LineChart)
    assert (chart.title, chart.x_label, chart.x_unit) == ("A title", "Time (s)", "s")
    assert [(line.label, [tuple(p) for p in line.points]) for line in chart.elements] == [
        ("steps", [(1, 4), (2, 5), (3, 6)])
    ]


def test_a_bar_chart_needs_no_show():
    done = sandbox().run_code("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2]);")
    (chart,) = [result.chart for result in done.results if result.png]
    assert isinstance(chart, BarChart)
    assert [(bar.label, float(bar.value)) for bar in chart.elements] == [("a", 1.0), ("b", 2.0)]


def test_a_table_is_text_html_and_data():
    done = sandbox().run_code(
        "import numpy as np, pandas as pd\n"
        "pd.DataFrame({'n': [1, 2], 'f': [0.5, np.nan], 's': ['a', 'b'], 't': pd.to_datetime(['2024-01-02'] * 2)})"
    )
    (result,) = done.results
    assert "<table" in result.html
    assert result.data == {
        "n": [1, 2], "f": [0.5, None], "s": ["a", "b"], "t": ["2024-01-02T00:00:00"] * 2,
    }  # fmt: skip
    assert {"text", "html", "data"} == set(result.formats())


def test_rich_results():
    done = sandbox().run_code(
        "from IPython.display import *\n"
        "display(HTML('<b>b</b>'), Markdown('# m'), Latex('$l$'), JSON({'a': [1]}), Javascript('f()'), SVG('<svg/>'))\n"
        "display({'application/x-own': 1}, raw=True)"
    )
    html, markdown, latex, json, javascript, svg, own = done.results
    assert (html.html, markdown.markdown, latex.latex) == ("<b>b</b>", "# m", "$l$")
    assert (json.json, javascript.javascript, svg.svg) == ({"a": [1]}, "f()", "<svg/>")
    assert own.extra == {"application/x-own": 1}
    assert not any(result.is_main_result for result in done.results)


def test_an_error_is_told_with_its_traceback():
    errors = []
    done = sandbox().run_code("print('before')\ndef f():\n  raise ValueError('bad')\nf()", on_error=errors.append)
    assert done.error is errors[0]
    assert (done.error.name, done.error.value) == ("ValueError", "bad")
    assert "ValueError: bad" in done.error.traceback
    assert done.logs.stdout == ["before\n"]


def test_variables_of_the_sandbox_and_of_one_execution():
    code = "import os; (os.environ.get('OF_ALL'), os.environ.get('OF_ONE'))"
    assert sandbox().run_code(code, envs={"OF_ONE": "here"}).text == "('everywhere', 'here')"
    assert sandbox().run_code(code).text == "('everywhere', None)"


def test_contexts():
    sandbox().run_code("mine = 1")
    context = sandbox().create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert (
        sandbox().run_code("import os; (os.getcwd(), 'mine' in globals())", context=context).text == "('/tmp', False)"
    )
    assert context.id in {c.id for c in sandbox().list_code_contexts()}
    sandbox().run_code("kept = 1", context=context)
    sandbox().restart_code_context(context)
    assert sandbox().run_code("'kept' in globals()", context=context).text == "False"
    sandbox().remove_code_context(context)
    assert context.id not in {c.id for c in sandbox().list_code_contexts()}
    with raises(NotFoundException):
        sandbox().run_code("1", context=context)
    with raises(NotFoundException):
        sandbox().restart_code_context(context)


def test_what_is_not_there_is_refused():
    with raises(SandboxException, "language 'r' is not part of this template"):
        sandbox().run_code("1", language="r")
    with raises(SandboxException, "language 'java' is not part of this template"):
        sandbox().create_code_context(language="java")
    with raises(SandboxException, "not a directory that can be entered"):
        sandbox().create_code_context(cwd="/nonexistent")


def test_javascript_and_typescript():
    done = sandbox().run_code(
        "const fs = require('fs'); console.log(fs.existsSync('/etc')); [1, 2].map(n => n * 2)", language="javascript"
    )
    assert done.logs.stdout == ["true\n"]
    assert done.text == "[ 2, 4 ]"
    typed = sandbox().run_code("const n: number = 41; await Promise.resolve(n + 1)", language="typescript")
    assert (typed.text, typed.error) == ("42", None)
    failed = sandbox().run_code("throw new TypeError('no')", language="javascript")
    assert (failed.error.name, failed.error.value) == ("TypeError", "no")


def test_bash():
    assert sandbox().run_code("cd /tmp; export A=1; echo out", language="bash").logs.stdout == ["out\n"]
    done = sandbox().run_code("echo $PWD $A $OF_ALL; exit_with() { return 3; }; exit_with", language="bash")
    assert done.logs.stdout == ["/tmp 1 everywhere\n"]
    assert done.error.value == "3"


def test_a_timeout_ends_the_wait_and_interrupts_the_code():
    sandbox().run_code("still = 1")
    with raises(TimeoutException):
        sandbox().run_code("while True: pass", timeout=2)
    assert sandbox().run_code("still").text == "1"


def test_code_that_ends_its_process_is_an_error_and_the_next_runs():
    done = sandbox().run_code("import os; os._exit(9)")
    assert done.error.name == "ContextDied"
    assert "exit code 9" in done.error.value
    assert sandbox().run_code("1 + 1").text == "2"


def test_much_output_comes_whole():
    done = sandbox().run_code("for i in range(20000): print('x' * 99)")
    assert len("".join(done.logs.stdout)) == 2_000_000


def test_code_and_commands_share_the_machine_and_its_user():
    sandbox().run_code("import getpass, os; open('by-code', 'w').write(getpass.getuser()); os.getcwd()")
    assert sandbox().commands.run("cat by-code; stat -c %U by-code").stdout == "useruser\n"


async def test_async_contexts_run_at_the_same_time():
    async with within(100), await AsyncSandbox.create(timeout=LIFE_S) as box:
        one, two = [await box.create_code_context() for _ in range(2)]
        slow = asyncio.ensure_future(box.run_code("import time; time.sleep(5); 'slow'", context=one))
        quick = await box.run_code("'quick'", context=two)
        assert not slow.done()
        assert (quick.text, (await slow).text) == ("quick", "slow")
        seen = []

        async def heard(out):
            seen.append(out.line)

        done = await box.run_code("print('hi'); 1/0", on_stdout=heard)
        assert (seen, done.error.name) == (["hi\n"], "ZeroDivisionError")
        await box.restart_code_context(one)
        await box.remove_code_context(two.id)
        assert two.id not in {c.id for c in await box.list_code_contexts()}
