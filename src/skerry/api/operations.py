"""How an operation is put on a router, and what OpenAPI says about it.

Handlers take the request and give the answer; what FastAPI would do between the two (bodies, queries, answers through
models) is done in `requests` and `wire`, where raw bytes survive and refusals are ours. What that takes from FastAPI's
knowledge is told to OpenAPI here, from the same models that are enforced.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import problems
from skerry.api.schemas import ProblemView

Handler = Callable[[Request], Awaitable[Response]]

SAID: Final = {
    200: "Done",
    201: "Made",
    204: "Done, nothing to say",
    206: "The part that was asked for",
    400: "The request is wrong as it stands",
    401: "No key, an unknown one, or a revoked one",
    403: "The key or the guest's user may not do this",
    404: "There is no such thing",
    409: "Not in this state",
    410: "The sandbox is over",
    413: "The body is too large",
    415: "The body is not application/json",
    416: "The range is outside the file",
    429: "A limit of the tenant is reached",
    500: "Something of ours broke",
    502: "The guest did not answer; `retry` says whether it may have acted",
    503: "Not now",
    507: "A disk is full: the guest's, or the host's",
}

COMMON: Final = (400, 401, 403, 500, 503)
SANDBOX: Final = (*COMMON, 404, 409, 410, 429, 502)
REST: Final = (*SANDBOX, 507)
FILES: Final = (*SANDBOX, 413, 507)

PATH_PARAMETERS: Final = {
    "sandbox_id": "A sandbox's id",
    "process": "A process id (pr…) or a pid of the guest",
    "key_id": "A key's id",
    "snapshot": "A snapshot's id or name",
    "secret": "A secret's name",
    "template": "A template's name",
    "token": "A step token's id",
}


@dataclass(frozen=True, slots=True)
class Content:
    """An answer that is not one JSON document."""

    media: tuple[str, ...]
    schema: Mapping[str, Any]
    headers: Mapping[str, str] | None = None


NDJSON: Final = Content(("application/x-ndjson", "text/event-stream"), {"type": "string"})
BYTES: Final = Content(("application/octet-stream",), {"type": "string", "format": "binary"})

Answer = type[BaseModel] | Content | None


def add(
    router: APIRouter,
    method: str,
    path: str,
    handler: Handler,
    *,
    summary: str,
    answers: Mapping[int, Answer],
    errors: Iterable[int] = (),
    query: type[BaseModel] | None = None,
    body: type[BaseModel] | None = None,
    body_needed: bool = True,
    raw_body: bool = False,
    headers: Mapping[str, str] | None = None,
    public: bool = False,
) -> None:
    """Put an operation on `router` with all that OpenAPI is to say about it."""
    extra: dict[str, Any] = {"parameters": _parameters(router.prefix + path, query, headers or {})}
    statuses = set(errors)
    if body is not None:
        extra["requestBody"] = {
            "required": body_needed,
            "content": {"application/json": {"schema": inline_schema(body)}},
        }
        statuses |= {413, 415}
    elif raw_body:
        extra["requestBody"] = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
    extra["security"] = [] if public else [{"bearer": []}, {"apiKey": []}]
    responses: dict[int | str, dict[str, Any]] = {status: _answer(status, a) for status, a in answers.items()}
    for status in sorted(statuses):
        responses[status] = {
            "description": SAID[status],
            "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemView"}}},
        }
    router.add_api_route(
        path,
        handler,
        methods=[method],
        summary=summary,
        operation_id=f"{handler.__module__.rsplit('.', 1)[-1]}_{handler.__name__}",
        status_code=min(answers),
        response_class=Response,
        response_model=None,
        responses=responses,
        openapi_extra=extra,
    )


def _answer(status: int, answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"description": SAID[status]}
    if isinstance(answer, Content):
        said["content"] = {media: {"schema": dict(answer.schema)} for media in answer.media}
        if answer.headers:
            said["headers"] = {
                name: {"description": text, "schema": {"type": "string"}} for name, text in answer.headers.items()
            }
    elif answer is not None:
        said["model"] = answer
    return said


def _parameters(path: str, query: type[BaseModel] | None, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        for name, text in PATH_PARAMETERS.items()
        if f"{{{name}}}" in path
    ]
    if query is not None:
        schema = inline_schema(query)
        needed = set(schema.get("required", ()))
        for name, shape in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": name in needed, "schema": _without_null(shape)})
    for name, text in headers.items():
        found.append(
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        )
    return found


def _without_null(shape: dict[str, Any]) -> dict[str, Any]:
    """A query cannot say null: drop it from "T or null"."""
    options = [option for option in shape.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) != 1:
        return shape
    rest = {key: value for key, value in shape.items() if key not in {"anyOf", "default"}}
    return {**options[0], **rest}


def inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema with its `$defs` put in place (they are few and never recursive)."""
    schema = model.model_json_schema()
    defs: dict[str, Any] = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(defs[str(node["$ref"]).rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items()}
        if isinstance(node, list):
            return [resolve(value) for value in node]
        return node

    return resolve(schema)


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """What all operations share: the problem's shape and the two ways to give a key."""
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})["ProblemView"] = inline_schema(ProblemView)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    return document
