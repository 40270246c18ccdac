"""Problem bodies become the errors they were."""

import pytest

import skerry
from skerry.core import errors as core
from skerry.sdk.errors import TransferIncomplete, as_problem, from_problem

ALL = [getattr(core, name) for name in dir(core) if isinstance(getattr(core, name), type)]
KINDS = [kind for kind in ALL if issubclass(kind, core.SkerryError) and kind is not core.SkerryError]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_the_line(kind: type[core.SkerryError]) -> None:
    sent = kind("no", sandbox_id="sb1", path="/x")
    found = from_problem(as_problem(sent), sent.status)
    assert type(found) is kind
    assert (found.message, found.code, found.retry, found.context) == ("no", sent.code, sent.retry, sent.context)
    assert as_problem(found) == as_problem(sent)


def test_problems_of_fields_survive() -> None:
    sent = core.InvalidRequest.of("cpu", "must be from 1 to 8", given=9, allowed="1..8")
    found = from_problem(as_problem(sent), 400)
    assert isinstance(found, core.InvalidRequest)
    assert found.problems == sent.problems


def test_the_classes_are_the_same_on_both_sides() -> None:
    assert skerry.NotFound is core.NotFound
    assert skerry.Gone is core.Gone


def test_code_retry_and_waiting_time_are_kept() -> None:
    body = {"status": 503, "code": "server_stopping", "retry": "unknown", "detail": "bye", "request_id": "r1"}
    found = from_problem(body, 503, retry_after=2.0)
    assert isinstance(found, core.Unavailable)
    assert (found.code, found.retry, found.retry_after) == ("server_stopping", "unknown", 2.0)
    assert found.context == {"request_id": "r1"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "InvalidRequest"),
        (405, "InvalidRequest"),
        (404, "NotFound"),
        (418, "InvalidRequest"),
        (500, "InternalError"),
    ],
)
@pytest.mark.parametrize("body", [None, "text", [], {"detail": None, "context": None, "errors": "x"}])
def test_a_body_that_is_none_of_ours_is_judged_by_its_status(status: int, kind: str, body: object) -> None:
    assert type(from_problem(body, status)).__name__ == kind


def test_502_is_unknown_unless_it_says_that_it_is_safe() -> None:
    assert type(from_problem(None, 502)) is core.OutcomeUnknown
    assert type(from_problem({"code": "x", "retry": "safe"}, 502)) is core.GuestUnreachable
    assert type(from_problem({"code": "guest_unreachable"}, 502)) is core.GuestUnreachable
    assert from_problem(None, 504).retry == "never"


def test_context_may_hold_any_name() -> None:
    found = from_problem({"status": 409, "context": {"code": 1, "message": "m", "self": "s", "x": 2}}, 409)
    assert found.context == {"code_": 1, "message_": "m", "self_": "s", "x": 2}


def test_a_broken_context_is_left_out() -> None:
    assert from_problem({"status": 404, "context": [1]}, 404).context == {}


def test_a_transfer_names_each_failure() -> None:
    error = TransferIncomplete("1 failed", errors=[("/a", core.NoSpace("full"))])
    assert as_problem(error)["errors"] == [{"field": "/a", "message": "full", "code": "no_space"}]
