"""How an error of the services is told to E2B's clients: status, message and headers, for all routes in one place.

Clients decide by the status (404: it is not there; 409 on a pause: it rests already; 429 and 503 have exceptions of
their own) and try again by themselves when told `Should-Retry: true`, or not told at all on some statuses. So that is
said whenever it matters: "true" only where nothing was done and trying again helps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from skerry.api import wire
from skerry.core.errors import Conflict, Gone, GuestUnreachable, InvalidRequest, OutcomeUnknown, Problem, SkerryError

FIELDS: Final[Mapping[str, str]] = {
    "template": "templateID",
    "origin": "template",
    "timeout_ms": "timeout",
    "extend_timeout_ms": "timeout",
    "env": "envVars",
    "auto_pause": "autoPause",
    "auto_pause_memory": "autoPauseMemory",
    "mask_request_host": "network.maskRequestHost",
    "network.allow": "network.allowOut",
    "network.deny": "network.denyOut",
    "allow": "allowOut",
    "deny": "denyOut",
}
"""What the services call it → what it is called here."""

ERROR_CODES: Final[Mapping[str, str]] = {
    "idempotency_mismatch": "idempotency_request_mismatch",
    "node_full": "sandbox_capacity_unavailable",
    "vm_start_failed": "sandbox_create_failed",
    "guest_unresponsive": "sandbox_snapshot_guest_agent_unresponsive",
}

STATUSES: Final[Mapping[str, int]] = {"idempotency_mismatch": 422}


@dataclass(frozen=True, slots=True)
class Told:
    status: int
    message: str
    error_code: str | None
    retry: bool | None
    """None: the status says it."""
    retry_after: float | None = None

    def body(self) -> dict[str, Any]:
        said: dict[str, Any] = {"code": self.status, "message": self.message}
        return said if self.error_code is None else {**said, "error_code": self.error_code}


def tell(error: SkerryError) -> Told:
    status = _status(error)
    retry = None
    if status >= 500 or status == 429:
        retry = error.retry == "safe"
    return Told(
        status,
        _message(error),
        ERROR_CODES.get(error.code),
        retry,
        error.retry_after if retry else None,
    )


def response(error: SkerryError) -> Response:
    told = tell(error)
    headers: dict[str, str] = {}
    if told.retry is not None:
        headers["Should-Retry"] = "true" if told.retry else "false"
    if told.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(told.retry_after))
    if told.status == 405:
        headers["Allow"] = str(error.context.get("allowed", ""))
    return wire.Json(told.body(), told.status, headers)


def _status(error: SkerryError) -> int:
    if isinstance(error, Gone):
        return 404
    if isinstance(error, Conflict) and error.retry == "safe":
        return 503  # something else is under way. A 409 would say to a pause that it rests already
    if isinstance(error, GuestUnreachable):
        return 503  # a 502 says of a sandbox that it is not there
    if isinstance(error, OutcomeUnknown):
        return 500
    return STATUSES.get(error.code, error.status)


def _message(error: SkerryError) -> str:
    if isinstance(error, InvalidRequest) and error.problems:
        return "; ".join(_sentence(problem) for problem in error.problems[:5])
    return error.message


def _sentence(problem: Problem) -> str:
    head, dot, rest = problem.field.partition(".")
    if head == "network":
        within, dot, rest = rest.partition(".")
        head = f"network.{within}"
    field = FIELDS.get(head, head) + dot + rest
    message, given, allowed = problem.message, problem.given, problem.allowed
    if head == "cursor" and "of this list" in message:  # logs have a parameter of that name
        field = "nextToken"
    if head.endswith("timeout_ms") and isinstance(given, int) and isinstance(allowed, str):
        low, _, high = allowed.partition("..")
        return f"{field}: must be from {int(low) // 1000} to {int(high) // 1000} seconds, not {given / 1000:g}"
    shown = problem.as_dict()["given"]
    return f"{field}: {message}" + (f", not {shown!r}" if shown is not None else "")
