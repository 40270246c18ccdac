"""What a guest says, read strictly."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core import errors
from skerry.core.models import ExitStatus, ProcessEnd
from skerry.node.guestlink import parse
from skerry.node.guestlink.parse import Malformed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
    max_leaves=10,
)
PARSERS = [
    parse.refusal, parse.file_info, parse.exit_status, parse.process_info, parse.gap, parse.watch_event, parse.metrics,
]  # fmt: skip


@given(st.sampled_from(PARSERS), JSON)
def test_nonsense_is_malformed_and_nothing_else(parser: Any, said: Any) -> None:
    try:
        parser(said)
    except Malformed:
        return


def test_an_exit_has_a_code_or_a_signal() -> None:
    good = {"reason": "exit", "exit_code": 3, "signal": None, "duration_ms": 5}
    assert parse.exit_status(good) == ExitStatus(ProcessEnd.EXIT, 3, None, 5)
    for change in (
        {"exit_code": None},
        {"signal": "SIGKILL"},
        {"exit_code": 256},
        {"exit_code": -1},
        {"exit_code": True},
        {"reason": "done"},
        {"duration_ms": -1},
    ):
        with pytest.raises(Malformed):
            parse.exit_status({**good, **change})


def said(**changes: Any) -> dict[str, Any]:
    return {"error": "NotFound", "code": "path_not_found", "message": "m", "context": {}, **changes}


def test_refusals_are_our_errors_with_bounded_printable_text() -> None:
    error = parse.refusal(said(message="a\nb\x1b[31m", context={"path": "/x", "message": "no", "self": 1, "a b": 1}))
    assert type(error) is errors.NotFound
    assert error.code == "path_not_found"
    assert error.message == "a\ufffdb\ufffd[31m"
    assert error.context == {"path": "/x"}
    for change in (
        {"error": "Gone"},
        {"error": "OutcomeUnknown"},
        {"error": "SystemExit"},
        {"code": "a b"},
        {"code": "x" * 65},
        {"message": "x" * 5000},
        {"context": []},
        {"context": {str(n): n for n in range(17)}},
    ):
        with pytest.raises(Malformed):
            parse.refusal(said(**change))


def test_a_refused_host_was_not_dispatched() -> None:
    error = parse.refusal(said(error="Forbidden", code="wrong_token"))
    assert type(error) is errors.GuestUnreachable
    assert error.retry == "safe"


def test_invalid_requests_name_their_field() -> None:
    error = parse.refusal(said(error="InvalidRequest", code="cwd_not_found", context={"cwd": "/x"}))
    assert isinstance(error, errors.InvalidRequest)
    [problem] = error.problems
    assert (problem.field, problem.given) == ("cwd", "/x")
    error = parse.refusal(
        said(error="InvalidRequest", code="command_too_long", context={"field": "shell", "given": 5, "allowed": 4})
    )
    assert isinstance(error, errors.InvalidRequest)
    assert (error.problems[0].field, error.problems[0].given, error.problems[0].allowed) == ("shell", 5, 4)
