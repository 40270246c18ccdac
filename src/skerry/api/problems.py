"""Refusals: RFC 9457 problem documents, made from `core.errors` and from nothing else.

Whatever is raised ends here as one document with a stable `code`. An exception that is not ours says nothing about
itself to the caller: it is logged with the request's id, and the caller gets the id.
"""

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from skerry.api import wire
from skerry.core.errors import InternalError, InvalidRequest, NotFound, SkerryError

MEDIA_TYPE = "application/problem+json"


class MethodNotAllowed(SkerryError):
    code = "method_not_allowed"
    status = 405


class NotAcceptableMedia(SkerryError):
    """The body is not of the media type that this operation reads."""

    code = "unsupported_media_type"
    status = 415


class RangeNotSatisfiable(SkerryError):
    code = "range_not_satisfiable"
    status = 416


class ClientGone(SkerryError):
    """The client hung up; nobody is there to be answered. Never seen by anybody but the access log."""

    code = "client_gone"
    status = 499


def title(code: str) -> str:
    text = code.replace("_", " ")
    return text[:1].upper() + text[1:]


def document(error: SkerryError, request_id: str) -> dict[str, Any]:
    """The problem document of an error."""
    body: dict[str, Any] = {
        "type": f"/errors#{error.code}",
        "title": title(error.code),
        "status": error.status,
        "code": error.code,
        "detail": error.message,
        "retry": error.retry,
        "request_id": request_id,
    }
    if isinstance(error, InvalidRequest) and error.problems:
        body["errors"] = [problem.as_dict() for problem in error.problems]
    if error.context:
        body["context"] = error.context
    return body


def response(error: SkerryError, request_id: str) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(0, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = str(error.context.get("allowed", ""))
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.context['size']}"
    return wire.Json(document(error, request_id), error.status, headers, media_type=MEDIA_TYPE)


def unexpected() -> InternalError:
    """What a caller is told about an exception that is not ours."""
    return InternalError("something went wrong in the server; the request's id finds it in the server's log")


def of_http(error: HTTPException, method: str, path: str, allowed: str) -> SkerryError:
    """Starlette's own refusals: no such route, or not with this method."""
    if error.status_code == 405:
        return MethodNotAllowed(f"{method} is not possible here", allowed=allowed)
    if error.status_code == 404:
        return NotFound("there is nothing at this address", code="route_not_found", path=path)
    if 400 <= error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return unexpected()
