"""Every error has a code, a status and a retry class, and says nothing at length."""

import ast
import json
from pathlib import Path

import pytest

from skerry.core import errors
from skerry.core.errors import InvalidRequest, Problem, SkerryError, clip


def classes() -> list[type[SkerryError]]:
    """Those of the core. Others derive from them, and which of those are imported depends on the tests that run."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SkerryError)]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_kind_is_complete(kind: type[SkerryError]) -> None:
    error = kind("said", note="x", nothing=None)
    assert str(error) == error.message == "said"
    assert 400 <= error.status < 600
    assert error.code.isascii()
    assert error.code.replace("_", "").isalnum()
    assert error.code.islower()
    assert error.retry in {"safe", "never", "unknown"}
    assert error.context == {"note": "x"}


def test_only_what_was_dispatched_is_unknown() -> None:
    assert {kind.__name__ for kind in classes() if kind.retry == "unknown"} == {"OutcomeUnknown"}
    assert {kind.__name__ for kind in classes() if kind.retry == "safe"} == {"GuestUnreachable", "Unavailable"}


def test_code_and_retry_can_be_narrowed_for_one_error_only() -> None:
    error = errors.Unavailable("x", code="node_full", retry="unknown", retry_after=3)
    assert (error.code, error.retry, error.retry_after) == ("node_full", "unknown", 3)
    assert (errors.Unavailable.code, errors.Unavailable.retry) == ("unavailable", "safe")


@pytest.mark.parametrize("value", [None, 1, 1.5, True, "x", b"\xff", ["a"] * 500, "y" * 500, {"k": object()}])
def test_what_is_repeated_is_short_and_json(value: object) -> None:
    assert len(json.dumps(clip(value))) < 400


def test_one_field_at_a_time() -> None:
    error = InvalidRequest.of("cpu", "must be from 1 to 8", given=9, allowed="1..8")
    assert str(error) == "cpu: must be from 1 to 8"
    assert error.problems == (Problem("cpu", "must be from 1 to 8", 9, "1..8"),)


SOURCE = Path(errors.__file__).parents[1]
JUDGES = ("core", "control", "store", "api/v1", "api/requests.py")
"""Where requests are judged."""


def test_whoever_names_a_wrong_field_says_what_is_allowed():
    silent, found = [], 0
    for place in JUDGES:
        path = SOURCE / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and (name := ast.unparse(call.func)) in {"Problem", "InvalidRequest.of"}:
                    found += 1
                    said = "allowed" in {k.arg for k in call.keywords} or (name == "Problem" and len(call.args) == 4)
                    if not said:
                        silent.append(f"{file.relative_to(SOURCE)}:{call.lineno}")
    assert found > 50
    assert silent == []
