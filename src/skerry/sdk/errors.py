"""The errors a client sees: the tree of `skerry.core.errors`, rebuilt from problem bodies, and five of its own.

SkerryError
├── CommandDeadline ....... the command ran into its deadline; `result` holds what it printed
├── CommandFailed ......... only where `check=True` asked for it; `result` says how it ended
├── ForkIncomplete ........ some copies did not come up; `copies` are those that did, `errors` say why
├── TransferIncomplete .... some files of a tree were not copied; `errors` names each
└── NotConfigured ......... no address or key was found; the message says where it was looked for
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from skerry.core import errors as core
from skerry.core.errors import InvalidRequest, OutcomeUnknown, Problem, SkerryError

if TYPE_CHECKING:
    from skerry.sdk.models import CommandResult


class CommandDeadline(SkerryError):
    """The command's deadline was reached, and its whole process tree was stopped."""

    code = "command_deadline"
    status = 408

    def __init__(self, message: str, *, result: "CommandResult", **context: Any) -> None:
        super().__init__(message, **context)
        self.result = result
        """What it printed until then, and how it died."""


class CommandFailed(SkerryError):
    """`check=True`, and the command ended with anything but exit code 0."""

    code = "command_failed"
    status = 422

    def __init__(self, message: str, *, result: "CommandResult", **context: Any) -> None:
        super().__init__(message, **context)
        self.result = result


class TransferIncomplete(SkerryError):
    """Some entries of a tree were not copied; all others were. `errors` holds (path, error) for each."""

    code = "transfer_incomplete"
    status = 422

    def __init__(self, message: str, *, errors: Sequence[tuple[str, SkerryError]], **context: Any) -> None:
        super().__init__(message, **context)
        self.errors = tuple(errors)


class ForkIncomplete(SkerryError):
    """Some copies of a fork did not come up. The others run: they are in `copies`, and are the caller's to kill."""

    code = "fork_incomplete"
    status = 422

    def __init__(self, message: str, *, copies: Sequence[Any], errors: Sequence[SkerryError], **context: Any) -> None:
        super().__init__(message, **context)
        self.copies = tuple(copies)
        """Sandboxes that run."""
        self.errors = tuple(errors)
        """One for each copy that does not."""


class NotConfigured(SkerryError):
    """No server's address or no key is known."""

    code = "not_configured"
    status = 400


_BY_STATUS: Final[dict[int, type[SkerryError]]] = {
    cls.status: cls
    for cls in (
        core.Unauthenticated,
        core.Forbidden,
        core.NotFound,
        core.Conflict,
        core.Gone,
        core.TooLarge,
        core.LimitExceeded,
        core.InternalError,
        core.NotSupported,
        core.OutcomeUnknown,
        core.Unavailable,
        core.NoSpace,
    )
}
_RETRIES: Final = ("safe", "never", "unknown")


def from_problem(body: Any, status: int, *, retry_after: float | None = None) -> SkerryError:
    """The error that a problem body (RFC 9457) speaks of. `status` decides where the body is not one of ours."""
    problem: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    status = problem.get("status") if isinstance(problem.get("status"), int) else status  # pyright: ignore[reportAssignmentType]
    message = str(problem.get("detail") or problem.get("title") or f"the server answered with status {status}")
    code = problem.get("code") if isinstance(problem.get("code"), str) else None
    given = problem.get("context")
    context: dict[str, Any] = {str(k): v for k, v in given.items()} if isinstance(given, Mapping) else {}
    if problem.get("request_id"):
        context["request_id"] = problem["request_id"]
    for taken in ("code", "retry", "retry_after", "problems", "message", "self", "field", "result", "errors", "copies"):
        if taken in context:
            context[f"{taken}_"] = context.pop(taken)
    error = _build(message, status, code, problem, context)
    if problem.get("retry") in _RETRIES:
        error.retry = problem["retry"]
    error.retry_after = retry_after
    return error


def _build(
    message: str, status: int, code: str | None, problem: Mapping[str, Any], context: dict[str, Any]
) -> SkerryError:
    cls = _BY_STATUS.get(status)
    if status == core.GuestUnreachable.status and (
        code == core.GuestUnreachable.code or problem.get("retry") == core.GuestUnreachable.retry
    ):
        cls = core.GuestUnreachable
    if cls is not None:
        return cls(message, code=code, **context)
    if 400 <= status < 500:
        return InvalidRequest(message, problems=_problems(problem.get("errors")), code=code, **context)
    return core.InternalError(message, code=code, **context)


def _problems(items: Any) -> list[Problem]:
    if not isinstance(items, list):
        return []
    return [
        Problem(str(i.get("field", "")), str(i.get("message", "")), i.get("given"), i.get("allowed"))
        for i in items
        if isinstance(i, Mapping)
    ]


def bad_answer(what: str, **context: Any) -> SkerryError:
    """The server's answer has not the form it should have."""
    return core.InternalError(f"the server's answer cannot be understood: {what}", code="bad_answer", **context)


def line_broke(what: str, **context: Any) -> OutcomeUnknown:
    """Dispatched, and the line broke before the end."""
    return OutcomeUnknown(f"the line broke before {what}", **context)


def as_problem(error: SkerryError) -> dict[str, Any]:
    """An error as a problem body, for programs that read the command line's standard error."""
    body: dict[str, Any] = {
        "type": f"/errors#{error.code}",
        "title": error.code.replace("_", " ").capitalize(),
        "status": error.status,
        "code": error.code,
        "detail": error.message,
        "retry": error.retry,
    }
    if isinstance(error, InvalidRequest) and error.problems:
        body["errors"] = [p.as_dict() for p in error.problems]
    if isinstance(error, TransferIncomplete):
        body["errors"] = [{"field": path, "message": e.message, "code": e.code} for path, e in error.errors]
    if isinstance(error, ForkIncomplete):
        body["errors"] = [{"field": "copy", "message": e.message, "code": e.code} for e in error.errors]
    if error.context:
        body["context"] = error.context
    return body
