"""The tables of what E2B's clients can do here, against the clients themselves: nothing of theirs is left out, and what
is said to work is used. The methods and options are read from the installed packages (see the cases)."""

import json
import re
from pathlib import Path

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, cases

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
EVERYWHERE = "any call"
METHOD = re.compile(r"[A-Za-z]+\.(\w+|\*)")
CLASSES = {
    "Sandbox",
    "Template",
    "Volume",
    "Secret",
    "files",
    "commands",
    "pty",
    "git",
    "handle",
    "watch",
    "pages",
    "stream",
}
VERDICTS = {"yes", "no", "differs"}

Table = dict[str, dict[str, list[str]]]


def table(text: str) -> Table:
    """Method → option ("" for the method itself) → what is said of it, in Python's spelling.

    The first cell of a row names methods and options of theirs; one that names no method goes on with those of the row
    above it. The second cell begins with what is said.
    """
    told: Table = {}
    methods: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|") or len(cells) < 2:
            methods = [] if line.startswith("#") else methods
            continue
        verdict = re.split(r"\W", cells[1])[0]
        if verdict not in VERDICTS:
            continue
        names = [snake(name.partition("=")[0]) for name in re.findall(r"`([^`]+)`", cells[0])]
        if cells[0].startswith(EVERYWHERE):
            methods = [EVERYWHERE]
        methods = [name for name in names if is_method(name)] or methods
        for method in methods:
            for option in [name for name in names if not is_method(name)] or [""]:
                told.setdefault(method, {}).setdefault(option, []).append(verdict)
            told[method].setdefault("", []).append(verdict)
    return told


def is_method(name: str) -> bool:
    return bool(METHOD.fullmatch(name)) and name.partition(".")[0] in CLASSES


def snake(name: str) -> str:
    """JavaScript's names in Python's spelling; what is in milliseconds there is in seconds here."""
    where, dot, last = name.rpartition(".")
    return (
        where + dot + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower().removesuffix("_ms") if name[:1] != "/" else name
    )


@pytest.fixture(scope="module")
def e2b_env(e2b_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The clients' processes get the tables too."""
    pages = [(HOWTO / name).read_text() for name in ("e2b.md", "e2b-inside.md")]
    file = tmp_path_factory.mktemp("tables") / "table.json"
    file.write_text(json.dumps(table("\n".join(pages))))
    return {**e2b_env, "SKERRY_COMPAT_TABLE": str(file)}


@pytest.mark.parametrize("case", cases("surface.py", PYTHON), indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("surface.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()


def test_rows_are_read_as_they_are_meant() -> None:
    text = """
| | | |
| `files.read`, `files.writeFiles`: `user`, `gzip=True` | yes | |
| `streamIdleTimeoutMs` | no | |
| any other | differs | |
# another
| `orphan` | yes | |
"""
    row = {"user": ["yes"], "gzip": ["yes"], "": ["yes", "no", "differs", "differs"], "stream_idle_timeout": ["no"]}
    assert table(text) == {"files.read": row, "files.write_files": row}
