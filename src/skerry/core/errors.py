"""Every error Skerry raises on purpose. Nothing else crosses a module's edge; foreign exceptions are wrapped there.

    SkerryError
    ├── InvalidRequest ........ 400  the request is wrong as it stands; `problems` names each field
    ├── Unauthenticated ....... 401
    ├── Forbidden ............. 403
    ├── NotFound .............. 404
    ├── Conflict .............. 409
    ├── Gone .................. 410  the sandbox is over; `code` says how it ended
    ├── TooLarge .............. 413
    ├── LimitExceeded ......... 429
    ├── InternalError ......... 500
    ├── NotSupported .......... 501  it can be named, but it cannot be done here
    ├── GuestUnreachable ...... 502  never dispatched: safe to retry
    ├── OutcomeUnknown ........ 502  dispatched, no answer: look before you retry
    ├── Unavailable ........... 503  not now: safe to retry later
    └── NoSpace ............... 507  the guest's disk is full; nothing half-written is left

`code` is stable and is what a program matches on. `retry` is the retry class: "safe" (nothing happened), "never"
(the same request fails again), "unknown" (it may have happened). Messages and context must hold no secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

RetryClass = Literal["safe", "never", "unknown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a request: which field, what was given, what is allowed."""

    field: str
    message: str
    given: Any = None
    allowed: Any = None

    def as_dict(self) -> dict[str, Any]:
        return {"field": self.field, "message": self.message, "given": clip(self.given), "allowed": self.allowed}


def clip(value: Any, limit: int = 200) -> Any:
    """A value as it may be repeated in an error: long texts cut, with their length."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]}… ({len(value)} characters)"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return clip(repr(value), limit)


class SkerryError(Exception):
    """The root. `str(error)` is one line for a person; `code`, `status` and `retry` are for programs."""

    code: str = "internal_error"
    status: ClassVar[int] = 500
    retry: RetryClass = "never"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retry: RetryClass | None = None,
        retry_after: float | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if retry is not None:
            self.retry = retry
        self.retry_after = retry_after
        """Seconds after which a retry makes sense, where that is known."""
        self.context = {k: clip(v) for k, v in context.items() if v is not None}


class InvalidRequest(SkerryError):
    """The request is wrong as it stands. One `Problem` per field."""

    code = "invalid_request"
    status = 400

    def __init__(
        self, message: str, *, problems: Sequence[Problem] = (), code: str | None = None, **context: Any
    ) -> None:
        super().__init__(message, code=code, **context)
        self.problems = tuple(problems)

    @classmethod
    def of(
        cls, field: str, message: str, *, given: Any = None, allowed: Any = None, code: str | None = None
    ) -> "InvalidRequest":
        """An error about one field."""
        return cls(f"{field}: {message}", problems=[Problem(field, message, given, allowed)], code=code)


class Unauthenticated(SkerryError):
    code = "unauthenticated"
    status = 401


class Forbidden(SkerryError):
    code = "forbidden"
    status = 403


class NotFound(SkerryError):
    code = "not_found"
    status = 404


class Conflict(SkerryError):
    code = "conflict"
    status = 409


class Gone(SkerryError):
    """The sandbox is over. Codes: sandbox_killed, sandbox_expired, sandbox_idle, sandbox_failed."""

    code = "sandbox_killed"
    status = 410


class TooLarge(SkerryError):
    code = "too_large"
    status = 413


class LimitExceeded(SkerryError):
    code = "limit_exceeded"
    status = 429


class InternalError(SkerryError):
    """Something of ours broke. `step` in the context says where, if one step of several did."""


class NotSupported(SkerryError):
    """It can be asked for, and this server has nothing of the kind."""

    code = "not_supported"
    status = 501


class GuestUnreachable(SkerryError):
    """The guest could not be reached, and nothing was dispatched."""

    code = "guest_unreachable"
    status = 502
    retry = "safe"


class OutcomeUnknown(SkerryError):
    """The request was dispatched and the line broke before the answer: it may have been carried out."""

    code = "outcome_unknown"
    status = 502
    retry = "unknown"


class Unavailable(SkerryError):
    code = "unavailable"
    status = 503
    retry = "safe"


class NoSpace(SkerryError):
    code = "no_space"
    status = 507
