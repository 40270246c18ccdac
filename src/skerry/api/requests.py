"""From bytes to checked values: bodies, queries, headers, keys. Every refusal names the field, never a secret."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qsl

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from skerry.api.problems import NotAcceptableMedia
from skerry.api.schemas_env import TAGS
from skerry.core.errors import InvalidRequest, Problem, TooLarge, Unauthenticated

M = TypeVar("M", bound=BaseModel)

SECRET_FIELDS: Final = frozenset({"env", "envVars", "stdin", "token"})
"""Fields whose content is never repeated in an error."""

QUERY_FIELDS_MAX: Final = 256


# ------------------------------------------------------------------------------------------------------------- bodies


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"the key {twice[:100]!r} is given twice in one JSON object", code="malformed_json")
    return found


def _no_constant(name: str) -> Any:
    raise InvalidRequest(f"{name} is not JSON", code="malformed_json")


_decoder = json.JSONDecoder(object_pairs_hook=_no_twice, parse_constant=_no_constant)


def parse_json(body: bytes) -> Any:
    """Strict JSON in UTF-8. Raises InvalidRequest `malformed_json`."""
    try:
        return _decoder.decode(body.decode("utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"the body is not JSON: {error.msg} at {where}", code="malformed_json") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}", code="malformed_json") from None
    except (RecursionError, ValueError):
        raise InvalidRequest(
            "the body is nested too deeply or holds too long a number", code="malformed_json"
        ) from None


async def read_limited(request: Request, limit: int) -> bytes:
    """The whole body. Raises TooLarge `body_too_large` past `limit` bytes, before reading where the length is told."""
    told = content_length(request)
    if told is not None and told > limit:
        raise TooLarge(f"the body has {told} bytes; at most {limit} are read", code="body_too_large", limit=limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in body_stream(request):
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes", code="body_too_large", limit=limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def body(request: Request, model: type[M], *, optional: bool = False) -> M:
    """The JSON body as `model`. An empty one is `{}` where the body is optional."""
    raw = await read_limited(request, cast("int", request.app.state.max_body_bytes))
    if not raw:
        if optional:
            return validate(model, {})
        raise InvalidRequest("a JSON body is needed", code="malformed_json")
    _check_media(request)
    parsed = parse_json(raw)
    if not isinstance(parsed, dict):
        raise InvalidRequest.of("body", "must be a JSON object", given=type(parsed).__name__, allowed="object")
    return validate(model, cast("dict[str, Any]", parsed))


def _check_media(request: Request) -> None:
    """JSON in UTF-8. Raises NotAcceptableMedia."""
    media, _, parameters = (header(request, "content-type") or "").partition(";")
    media = media.strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise NotAcceptableMedia("send the body as application/json", given=media, allowed="application/json")
    name, _, charset = parameters.strip().lower().partition("=")
    if name.strip() == "charset" and charset.strip(' "') not in {"utf-8", "utf8"}:
        raise NotAcceptableMedia("send the body in UTF-8", given=charset, allowed="utf-8")


async def body_stream(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises InvalidRequest: `upload_aborted` if the client hangs up half-way; NotAcceptableMedia
    for one that is encoded, since it would be taken as it is."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in {"", "identity"}:
        raise NotAcceptableMedia("send the body without a Content-Encoding", given=encoding, allowed="identity")
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise InvalidRequest("the client hung up before the end of the body", code="upload_aborted") from None


def content_length(request: Request) -> int | None:
    value = request.headers.get("content-length")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        raise InvalidRequest.of("Content-Length", "must be a number", given=value, allowed="decimal digits")
    return int(value)


def header(connection: HTTPConnection, name: str) -> str | None:
    """A header that may be given once. Raises InvalidRequest for one that is given twice: either could be meant."""
    values = connection.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest.of(name.title(), "is given more than once", allowed="once")
    return values[0] if values else None


# ------------------------------------------------------------------------------------------------------------ queries


def query_pairs(connection: HTTPConnection) -> list[tuple[str, str]]:
    """The query's names and values; bytes that are not UTF-8 become surrogate escapes."""
    raw: bytes = connection.scope.get("query_string", b"")
    if not raw:
        return []
    text = raw.decode("utf-8", "surrogateescape")
    try:
        return parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise InvalidRequest("the query has too many parameters", code="invalid_request") from None


def query(connection: HTTPConnection, model: type[M]) -> M:
    """The query as `model`. A list field takes every value of its name; any other may be given once."""
    values: dict[str, Any] = {}
    for name, value in query_pairs(connection):
        field = model.model_fields.get(name)
        if field is not None and _is_list(field):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidRequest.of(name, "is given more than once", allowed="once")
        else:
            values[name] = value
    return validate(model, values)


def no_query(connection: HTTPConnection) -> None:
    """For operations without parameters: refuse any."""
    for name, _ in query_pairs(connection):
        raise InvalidRequest.of(name, "is not a parameter of this operation", allowed="none")


def _is_list(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is list


# --------------------------------------------------------------------------------------------------------- validation


def validate(model: type[M], values: Mapping[str, Any]) -> M:
    """`values` as `model`, or InvalidRequest with one `Problem` per field."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors(include_url=False)]
        text = "; ".join(f"{p.field}: {p.message}" for p in problems[:5])
        raise InvalidRequest(text, problems=problems) from None


def _problem(model: type[BaseModel], detail: Any) -> Problem:
    location: tuple[int | str, ...] = tuple(part for part in detail["loc"] if part not in TAGS)
    field = ".".join(str(part)[:100] for part in location) or "body"
    kind: str = detail["type"]
    context: dict[str, Any] = detail.get("ctx") or {}
    given: Any = detail.get("input")
    if kind == "extra_forbidden":
        known = (info.alias or name for name, info in model.model_fields.items())
        names = ", ".join(known) if len(location) == 1 else None
        return Problem(field, "is not known here", None, names)
    if kind == "missing":
        return Problem(field, "is needed", None, "a value")
    if (location and location[0] in SECRET_FIELDS) or isinstance(given, (dict, list)):
        given = type(given).__name__
    if kind in {"greater_than_equal", "less_than_equal"}:
        message, allowed = _range(model, location, context)
        return Problem(field, message, given, allowed)
    return Problem(field, _sentence(detail["msg"]), given, _allowed(context))


def _range(model: type[BaseModel], location: tuple[int | str, ...], context: dict[str, Any]) -> tuple[str, str]:
    low, high = context.get("ge"), context.get("le")
    info = model.model_fields.get(str(location[0])) if len(location) == 1 else None
    for bound in info.metadata if info else ():
        if isinstance(bound, Ge):
            low = bound.ge
        elif isinstance(bound, Le):
            high = bound.le
    if low is None:
        return f"must be at most {high}", f"..{high}"
    if high is None:
        return f"must be at least {low}", f"{low}.."
    return f"must be from {low} to {high}", f"{low}..{high}"


def _sentence(message: str) -> str:
    """pydantic's "Input should be a valid integer" as the end of a sentence that begins with the field."""
    for lead in ("Input should be", "Value error, "):
        if message.startswith(lead):
            rest = message[len(lead) :].strip()
            return f"must be {rest}" if lead == "Input should be" else rest
    return message[:1].lower() + message[1:]


def _allowed(context: dict[str, Any]) -> Any:
    for name in ("expected", "pattern", "max_length", "min_length", "gt", "lt"):
        if name in context:
            return context[name]
    return None


# --------------------------------------------------------------------------------------------------------------- keys


def key_of(connection: HTTPConnection) -> str:
    """The API key of a request or a WebSocket handshake. Raises Unauthenticated `key_missing`."""
    authorization = header(connection, "authorization")
    plain = header(connection, "x-api-key")
    bearer: str | None = None
    if authorization is not None:
        scheme, _, rest = authorization.partition(" ")
        if scheme.lower() != "bearer" or not rest.strip():
            raise Unauthenticated("the Authorization header is not of the form: Bearer KEY", code="key_missing")
        bearer = rest.strip()
    if bearer is not None and plain is not None and bearer != plain.strip():
        raise InvalidRequest.of("X-API-Key", "is not the key that the Authorization header gives", allowed="one key")
    key = bearer if bearer is not None else (plain or "").strip()
    if not key:
        raise Unauthenticated("give an API key: Authorization: Bearer KEY, or X-API-Key: KEY", code="key_missing")
    return key


def idempotency_key(request: Request) -> str | None:
    value = header(request, "idempotency-key")
    if value is None:
        return None
    if not 1 <= len(value) <= 255 or any(not "!" <= char <= "~" for char in value):
        raise InvalidRequest.of(
            "Idempotency-Key", "must be visible ASCII characters", given=f"{len(value)} characters", allowed="1..255"
        )
    return value


def request_id_of(connection: HTTPConnection) -> str:
    return str(connection.scope.get("skerry.request_id", ""))
