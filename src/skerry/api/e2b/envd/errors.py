"""From `core.errors` to what E2B's clients look for: Connect codes, HTTP statuses, and the words that they match on."""

from typing import Any, Final

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from skerry.api import wire
from skerry.core.errors import (
    Conflict,
    Forbidden,
    Gone,
    GuestUnreachable,
    InvalidRequest,
    LimitExceeded,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    SkerryError,
    TooLarge,
    Unavailable,
)

NOT_FOUND: Final = "The sandbox was not found"
"""Clients look for "was not found": the sandbox is over, or rests."""
UNAUTHORIZED: Final = "unauthorized access, please provide a valid access token or method signing if supported"
_STDIN: Final = frozenset({"stdin_not_open", "stdin_closed", "process_exited"})
_NOT_THAT_KIND: Final = frozenset(
    {"not_a_directory", "is_a_directory", "not_a_regular_file", "symlink_loop", "not_a_pty"}
)


def is_away(error: SkerryError) -> bool:
    """Whether the sandbox is over, rests, or never was: for these clients all the same."""
    if isinstance(error, Gone):
        return True
    return error.code in {"sandbox_not_found", "sandbox_paused", "sandbox_state"}


def breaks(error: SkerryError) -> bool:
    """Whether a stream that has begun cannot be ended in order by this."""
    return is_away(error) or isinstance(error, (GuestUnreachable, OutcomeUnknown)) or error.code == "stopping"


def message_of(error: SkerryError) -> str:
    """Those that clients match on, and our own."""
    said = error.context
    if is_away(error):
        return NOT_FOUND
    if error.code == "user_not_found":
        return f"invalid username: '{said.get('user', '')}'"
    if error.code == "cwd_not_found":
        return f"cwd '{said.get('cwd', '')}' does not exist"
    if error.code == "path_not_found":
        return f"path '{said.get('path', '')}' does not exist"
    if error.code == "is_a_directory":
        return f"path '{said.get('path', '')}' is a directory"
    if isinstance(error, NoSpace):
        return "not enough disk space available"
    return error.message


def to_connect(error: SkerryError) -> ConnectError:
    return ConnectError(_code(error), message_of(error))


def _code(error: SkerryError) -> Code:
    if is_away(error) or isinstance(error, (GuestUnreachable, OutcomeUnknown)):
        return Code.UNAVAILABLE
    if error.code == "user_not_found":
        return Code.UNAUTHENTICATED
    if isinstance(error, InvalidRequest) or error.code in _NOT_THAT_KIND:
        return Code.INVALID_ARGUMENT
    if isinstance(error, NotFound):
        return Code.NOT_FOUND
    if isinstance(error, Forbidden):
        return Code.PERMISSION_DENIED
    if error.code == "path_exists":
        return Code.ALREADY_EXISTS
    if isinstance(error, Conflict) and error.code not in _STDIN:
        return Code.FAILED_PRECONDITION
    if isinstance(error, (LimitExceeded, TooLarge)):
        return Code.RESOURCE_EXHAUSTED
    if isinstance(error, Unavailable):
        return Code.UNAVAILABLE if error.code == "stopping" else Code.RESOURCE_EXHAUSTED
    return Code.INTERNAL


def status_of(error: SkerryError) -> int:
    if is_away(error):
        return 502
    if error.code == "user_not_found":
        return 401
    if isinstance(error, Conflict):
        return 400
    if isinstance(error, (GuestUnreachable, OutcomeUnknown)):
        return 503  # 502 says something else here
    return error.status


def answer(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> wire.Json:
    """A refusal as E2B's plain HTTP calls have it."""
    return wire.Json({"code": status, "message": message, **more}, status, headers)


def away(sandbox_id: str) -> wire.Json:
    """What E2B's gateway says of a sandbox that is not there."""
    return wire.Json({"sandboxId": sandbox_id, "message": NOT_FOUND, "code": 502}, 502)


def to_http(error: SkerryError, sandbox_id: str) -> wire.Json:
    if is_away(error):
        return away(sandbox_id)
    headers = {"Content-Range": f"bytes */{error.context['size']}"} if error.status == 416 else None
    return answer(status_of(error), message_of(error), headers)
