"""The code interpreter's service with real kernels, on the tests' own Python. In its template: tests/e2e and
tests/compat."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.interpreter import Interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    service = Interpreter(tmp_path_factory.mktemp("interpreter"))
    try:
        yield service.start()
    finally:
        service.stop()


def context(service: Interpreter, **wanted: str) -> str:
    made = service.http.post("/contexts", json=wanted)
    assert made.status_code == 200, made.text
    return made.json()["id"]


# --------------------------------------------------------------------------------------------------------- executions


def test_the_last_value_is_the_main_result_and_state_stays(service: Interpreter):
    told = service.run("a = 20\na + 1")
    assert (told.text, told.stdout, told.of("error")) == ("21", "", [])
    again = service.run("a * 2")
    assert again.text == "40"
    counts = [t.of("number_of_executions")[0]["execution_count"] for t in (told, again)]
    assert counts[1] == counts[0] + 1


def test_output_of_the_code_of_its_children_and_below_python_is_told_apart_by_stream(service: Interpreter):
    told = service.run(
        "import os, subprocess, sys\n"
        "print('one')\nsys.stderr.write('two')\nos.system('echo three')\nos.write(1, b'four\\n')\n"
        "subprocess.run('echo five >&2', shell=True)\nprint('six', end='')"
    )
    assert told.stdout == "one\nthree\nfour\nsix"
    assert told.stderr == "twofive\n"


def test_bytes_that_are_no_text_and_characters_cut_in_two_come_through(service: Interpreter):
    told = service.run(
        "import os, time\nos.write(1, b'\\xe2\\x82')\ntime.sleep(0.1)\nos.write(1, b'\\xac \\xff')\n'\\ud800'"
    )
    assert told.stdout == "€ �"


def test_outputs_keep_their_order(service: Interpreter):
    told = service.run("from IPython.display import HTML\nfor i in range(20):\n  print(i)\n  display(HTML(f'{i}'))")
    seen = [e.get("html") or e["text"].strip() for e in told.events if e["type"] in ("stdout", "result")]
    assert seen == [str(i) for i in range(20) for _ in range(2)]


def test_rich_results_have_fields_and_the_rest_is_extra(service: Interpreter):
    told = service.run(
        "display({'text/html': 'h', 'text/markdown': 'm', 'image/svg+xml': 's', 'image/png': 'p', 'image/jpeg': 'j',"
        " 'application/pdf': 'd', 'text/latex': 'l', 'application/json': {'a': 1}, 'application/javascript': 'f',"
        " 'application/x-own': 'o'}, raw=True)"
    )
    (result,) = told.of("result")
    assert result == {
        "type": "result", "is_main_result": False, "html": "h", "markdown": "m", "svg": "s", "png": "p", "jpeg": "j",
        "pdf": "d", "latex": "l", "json": {"a": 1}, "javascript": "f", "extra": {"application/x-own": "o"},
    }  # fmt: skip


def test_an_error_has_name_value_and_traceback(service: Interpreter):
    told = service.run("def f():\n  return 1/0\nprint('before')\nf()")
    assert told.stdout == "before\n"
    assert (told.error["name"], told.error["value"]) == ("ZeroDivisionError", "division by zero")
    assert "in f" in told.error["traceback"]
    assert service.run("def g(:").error["name"] == "SyntaxError"


def test_nobody_can_be_asked(service: Interpreter):
    assert service.run("input()").error["name"] == "StdinNotImplementedError"


def test_code_may_await(service: Interpreter):
    assert service.run("import asyncio\nawait asyncio.sleep(0.01, 'done')").text == "done"


def test_variables_of_an_execution_end_with_it(service: Interpreter):
    service.run("import os; os.environ['KEPT'] = 'mine'")
    told = service.run("os.environ['KEPT'], os.environ['NEW']", env_vars={"KEPT": "yours", "NEW": "it's"})
    assert told.text == "('yours', \"it's\")"
    assert service.run("os.environ['KEPT'], os.environ.get('NEW')").text == "('mine', None)"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "code must be a string"),
        ({"code": 5}, "code must be a string"),
        ({"code": "1", "context_id": "x", "language": "python"}, "Only one of context_id or language"),
        ({"code": "1", "language": "r"}, "language 'r' is not part of this template; there is: bash, javascript"),
        ({"code": "1", "language": "cobol"}, "language 'cobol' is not known"),
        ({"code": "1", "env_vars": {"a b": "c"}}, "'a b' is not a variable's name"),
        ({"code": "1", "env_vars": {"A": 1}}, "env_vars must be an object of strings"),
        ([], "the body must be a JSON object"),
    ],
)
def test_what_is_wrong_is_said(service: Interpreter, body: object, said: str):
    answer = service.http.post("/execute", json=body)
    assert answer.status_code == 400
    assert said in answer.text


def test_an_unknown_context_is_not_found(service: Interpreter):
    answers = [
        service.http.post("/execute", json={"code": "1", "context_id": "nope"}),
        service.http.delete("/contexts/nope"),
        service.http.post("/contexts/nope/restart"),
    ]
    assert [(a.status_code, a.text) for a in answers] == [(404, "Context nope not found")] * 3


# ----------------------------------------------------------------------------------------------- slowly and not at all


def test_who_reads_slowly_slows_the_code_down(service: Interpreter, tmp_path: Path):
    """Nothing on the way keeps what is not read: the code stands still when the pipes and sockets are full."""
    progress = tmp_path / "progress"
    code = f"for i in range(3000):\n  print('x' * 100_000)\n  open({str(progress)!r}, 'w').write(str(i))"
    with service.stream(code) as lines:
        next(lines)
        last = -1
        while (now := int(progress.read_text() or 0) if progress.exists() else 0) != last or now == 0:
            last = now
            time.sleep(1)
        assert last < 1000  # a tenth of it fits into what the kernels of both sides hold
        total = sum(len(json.loads(line)["text"]) for line in lines if '"stdout"' in line)
    assert total > 3000 * 100_000 - 200_000


def test_who_hangs_up_interrupts_the_code(service: Interpreter):
    service.run("kept = 7")
    service.hang_up_on("import time\nprint('begun')\nwhile True: time.sleep(0.01)")
    assert service.run("kept").text == "7"
    service.hang_up_on("while True: print('and on')")
    assert service.run("kept").text == "7"


def test_code_that_does_not_let_itself_be_interrupted_loses_its_process(service: Interpreter):
    mine = context(service)
    service.run("kept = 7", context_id=mine)
    service.hang_up_on(
        "import time\nwhile True:\n  try: print('begun'); time.sleep(60)\n  except KeyboardInterrupt: pass",
        context_id=mine,
    )
    told = service.run("'kept' in globals()", context_id=mine)
    assert told.text == "False"
    assert "did not stop within 10 s of an interrupt" in told.stderr


def test_output_between_executions_is_told_to_nobody_and_holds_up_nobody(service: Interpreter):
    service.run(
        "import threading\ndef flood():\n  global n\n  for n in range(3000): print('y' * 1000)\n"
        "late = threading.Thread(target=flood); late.start()"
    )
    told = service.run("late.join(30); late.is_alive(), n")
    assert told.text == "(False, 2999)"


# ------------------------------------------------------------------------------------------------------------ contexts


def test_contexts_are_apart_and_have_directories(service: Interpreter, tmp_path: Path):
    mine = context(service, cwd=str(tmp_path))
    listed = {c["id"]: c for c in service.http.get("/contexts").json()}
    assert listed[mine] == {"id": mine, "language": "python", "cwd": str(tmp_path)}
    assert service.run("import os; only_here = 1; os.getcwd()", context_id=mine).text == str(tmp_path)
    assert service.run("'only_here' in globals()").text == "False"
    assert service.http.delete(f"/contexts/{mine}").status_code == 204
    assert mine not in {c["id"] for c in service.http.get("/contexts").json()}


@pytest.mark.parametrize("cwd", ["relative", "/nonexistent", "/etc/passwd"])
def test_a_directory_that_is_none_is_refused(service: Interpreter, cwd: str):
    answer = service.http.post("/contexts", json={"cwd": cwd})
    assert answer.status_code == 400
    assert cwd in answer.text


def test_contexts_run_at_the_same_time_and_executions_of_one_in_turn(service: Interpreter):
    mine = context(service)
    with service.stream("import time\nprint('begun')\ntime.sleep(300)", context_id=mine) as lines:
        next(line for line in lines if '"stdout"' in line)
        assert service.run("1 + 1").text == "2"
    order: list[str] = []

    def run(name: str) -> None:
        order.append(service.run(f"import time; time.sleep(0.3); '{name}'", context_id=mine).text or "")

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == ["a", "b"]


def test_a_restart_forgets_and_ends_what_runs(service: Interpreter):
    mine = context(service)
    service.run("old = 1", context_id=mine)
    with service.stream("import time\nprint('begun')\ntime.sleep(300)", context_id=mine) as lines:
        next(line for line in lines if '"stdout"' in line)
        assert service.http.post(f"/contexts/{mine}/restart").status_code == 200
        *_, last = map(json.loads, lines)
    assert last == {
        "type": "error", "name": "ContextDied", "value": "the context was restarted", "traceback": ""
    }  # fmt: skip
    assert service.run("'old' in globals()", context_id=mine).text == "False"


def test_a_process_that_dies_says_how_and_is_started_anew(service: Interpreter):
    mine = context(service)
    told = service.run("import os\nprint('last words')\nos._exit(3)", context_id=mine)
    assert told.stdout == "last words\n"
    assert told.error["value"] == "its process ended with exit code 3; what it held is gone"
    killed = service.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", context_id=mine)
    assert "SIGKILL (perhaps short of memory)" in killed.error["value"]
    assert service.run("1 + 1", context_id=mine).text == "2"
    service.run("import threading, os\nthreading.Timer(0.2, os._exit, (4,)).start()", context_id=mine)
    time.sleep(1)
    quietly = service.run("2 + 2", context_id=mine)
    assert quietly.text == "4"
    assert quietly.stderr == "its process ended with exit code 4; it was started anew, and what it held is gone\n"


def test_no_two_kernels_draw_the_same_numbers(service: Interpreter):
    draw = "import random, secrets, uuid\n(random.random(), secrets.token_hex(8), uuid.uuid4().hex)"
    drawn = {service.run(draw, context_id=context(service)).text for _ in range(3)}
    assert len(drawn) == 3


def test_in_another_sandbox_variables_are_its_own_and_generators_seeded_anew(service: Interpreter):
    service.life.write_text(json.dumps({"sandbox_id": "sb1", "env": {"WHO": "first"}}))
    assert service.run("import os, random; os.environ['WHO']").text == "first"
    service.run("random.seed(1); state = random.getstate()")
    assert service.run("random.getstate() == state").text == "True"
    service.life.unlink()
    service.life.write_text(json.dumps({"sandbox_id": "sb2", "env": {"WHO": "second"}}))
    assert service.run("os.environ['WHO'], random.getstate() == state").text == "('second', False)"
    mine = context(service)
    assert service.run("import os; os.environ['WHO']", context_id=mine).text == "second"


# ---------------------------------------------------------------------------------------------------------------- bash


def test_bash_keeps_variables_directory_and_functions(service: Interpreter, tmp_path: Path):
    told = service.run(f'cd {tmp_path}; export A=1; f() {{ echo "f $1"; }}; echo out; echo err >&2', language="bash")
    assert (told.stdout, told.stderr, told.of("error")) == ("out\n", "err\n", [])
    assert service.run('f "$A"; pwd; cat', language="bash").stdout == f"f 1\n{tmp_path}\n"


def test_bash_tells_a_status_that_is_not_zero(service: Interpreter):
    told = service.run("echo so far; false", language="bash")
    assert told.stdout == "so far\n"
    assert (told.error["name"], told.error["value"]) == ("ExitStatus", "1")
    assert service.run("if then", language="bash").error["value"] != "0"
    ended = service.run("exit 7", language="bash")
    assert ended.error["value"] == "its process ended with exit code 7; what it held is gone"
    assert service.run("echo again", language="bash").stdout == "again\n"


def test_bash_variables_of_an_execution_end_with_it(service: Interpreter):
    service.run("export KEPT=mine", language="bash")
    told = service.run('echo "$KEPT $NEW"', language="bash", env_vars={"KEPT": 'it\'s "$yours"', "NEW": "`x`"})
    assert told.stdout == 'it\'s "$yours" `x`\n'
    assert service.run('echo "$KEPT ${NEW-none}"', language="bash").stdout == "mine none\n"


def test_who_hangs_up_on_bash_interrupts_it_and_its_variables_stay(service: Interpreter):
    service.run("kept=7", language="bash")
    for code in ("echo begun; while true; do sleep 0.1; done", "echo begun; while :; do :; done"):
        service.hang_up_on(code, language="bash")
        assert service.run("echo $kept", language="bash").stdout == "7\n"
