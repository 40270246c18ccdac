"""The parts of the code interpreter's service that need no kernel."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from skerry.interpreter import events
from skerry.interpreter.bash import _variables
from skerry.interpreter.context import Execution
from skerry.interpreter.kernels import said
from skerry.interpreter.life import Life, Lives


@pytest.mark.parametrize(
    ("text", "seen"), [("'a'", "a"), ("''", ""), ("'", "'"), ('"it\'s"', '"it\'s"'), ("1", "1"), ("'a", "'a")]
)
def test_a_strings_value_is_told_without_its_quotes(text: str, seen: str):
    assert events.result({"text/plain": text}, main=True)["text"] == seen


def test_a_line_is_one_line_of_ascii():
    line = events.line(events.output("stdout", "a\nb\u2028\ud800"))
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert json.loads(line)["text"] == "a\nb\u2028\ud800"


def test_a_life_is_read_when_it_changes(tmp_path: Path):
    file = tmp_path / "sandbox.json"
    lives = Lives(str(file))
    assert lives.now() == Life()
    file.write_text(json.dumps({"sandbox_id": "a", "env": {"A": "1"}}))
    assert lives.now() == lives.now() == Life(1, {"A": "1"})
    replaced = tmp_path / "new"
    replaced.write_text(json.dumps({"sandbox_id": "b", "env": {}}))
    replaced.rename(file)
    assert lives.now() == Life(2, {})
    file.unlink()
    file.write_text("broken")
    os.utime(file, ns=(1, 1))
    assert lives.now() == Life(3, {})


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3 << 8, "its process ended with exit code 3"),
        (0, "its process ended with exit code 0"),
        (9, "its process was ended by SIGKILL (perhaps short of memory)"),
        (11, "its process was ended by SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_said(status: int, text: str):
    assert said(status) == text


def test_bash_sets_variables_and_sets_them_back():
    env = {"A": "it's", "B": "$(echo no)", "C": ""}
    before, after = _variables(Execution("", env, None))
    show = 'printf "[%s]" "${A-unset}" "${B-unset}" "${C-unset}" "${!SKERRY_WAS_@}"'
    script = f"B=old; {before}; {show}; {after}; {show}"
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out == "[it's][$(echo no)][][SKERRY_WAS_B][unset][old][unset]"
