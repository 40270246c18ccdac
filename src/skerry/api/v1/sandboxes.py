"""`/v1/sandboxes`: create, list, look, change, kill."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api.schemas_env import parted
from skerry.api.streams import attended, hung_up
from skerry.api.v1.access import metrics_of, principal_of, services_of
from skerry.core.errors import InvalidRequest
from skerry.core.lifecycle import State
from skerry.core.limits import idle_timeout_ms_default
from skerry.core.models import SandboxSpec
from skerry.core.network import inner_rules

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])


async def create(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    key = requests.idempotency_key(request)
    wanted = await requests.body(request, schemas.CreateSandbox, optional=True)
    env, secrets = parted(wanted.env)
    spec = SandboxSpec(
        template=wanted.template,
        cpu=wanted.cpu,
        memory_mb=wanted.memory_mb,
        disk_mb=wanted.disk_mb,
        timeout_ms=wanted.timeout_ms,
        idle_timeout_ms=wanted.idle_timeout_ms
        if "idle_timeout_ms" in wanted.model_fields_set
        else idle_timeout_ms_default(auto_pause=wanted.auto_pause),
        auto_pause=wanted.auto_pause,
        auto_pause_memory=wanted.auto_pause_memory,
        auto_resume=wanted.auto_resume,
        public_ports=wanted.public_ports,
        mask_request_host=wanted.mask_request_host,
        env=env,
        secrets=secrets,
        network=inner_rules(wanted.network.mode, wanted.network.allow, wanted.network.deny) if wanted.network else None,
        metadata=wanted.metadata,
    )
    began = time.perf_counter()
    making = services_of(request).sandboxes.create(principal, spec, idempotency_key=key, given=wanted.model_fields_set)
    box = await attended(making, hung_up(request.receive))  # without a key, nobody could learn its id any more
    metrics_of(request).create_seconds.observe(time.perf_counter() - began)
    return wire.Json(wire.sandbox(box), 201, {"Location": f"/v1/sandboxes/{box.id}"})


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.ListSandboxes)
    page = await services_of(request).sandboxes.list(
        principal,
        states=[State(name) for name in asked.state],
        metadata=_pairs(asked.metadata),
        template=asked.template,
        limit=asked.limit,
        cursor=asked.cursor,
    )
    return wire.Json({"items": [wire.sandbox(box) for box in page.items], "next_cursor": page.next_cursor})


def _pairs(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest.of("metadata", "must be of the form key=value", given=text, allowed="key=value")
        if found.setdefault(key, value) != value:
            raise InvalidRequest.of(
                "metadata", "asks for two values of one key", given=key, allowed="one value for each key"
            )
    return found


async def get(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    box = await services_of(request).sandboxes.get(principal, request.path_params["sandbox_id"])
    return wire.Json(wire.sandbox(box))


async def patch(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    change = await requests.body(request, schemas.PatchSandbox)
    sandboxes = services_of(request).sandboxes
    sandbox_id = request.path_params["sandbox_id"]
    if change.timeout_ms is not None and change.extend_timeout_ms is None:
        box = await sandboxes.set_timeout(principal, sandbox_id, change.timeout_ms)
    elif change.extend_timeout_ms is not None and change.timeout_ms is None:
        box = await sandboxes.extend_timeout(principal, sandbox_id, change.extend_timeout_ms)
    else:
        raise InvalidRequest.of("timeout_ms", "give exactly one of the two", allowed="timeout_ms or extend_timeout_ms")
    return wire.Json(wire.sandbox(box))


async def kill(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    box = await services_of(request).sandboxes.kill(principal, request.path_params["sandbox_id"])
    return wire.Json(wire.sandbox(box))


async def metrics(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).sandboxes.metrics(principal, request.path_params["sandbox_id"])
    return wire.Json(wire.metrics(found))


async def logs(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.Logs)
    sandboxes = services_of(request).sandboxes
    sandbox_id = request.path_params["sandbox_id"]
    if asked.console:
        if asked.cursor is not None:
            raise InvalidRequest.of("cursor", "does not go with console=true", allowed="none")
        found = await sandboxes.console(principal, sandbox_id)
        return wire.Json({"console": found.decode("utf-8", "replace")})
    page = await sandboxes.events(principal, sandbox_id, limit=asked.limit, cursor=asked.cursor)
    return wire.Json({"items": [wire.event(event) for event in page.items], "next_cursor": page.next_cursor})


operations.add(
    router,
    "POST",
    "",
    create,
    summary="Create a sandbox; it runs when this answers",
    answers={201: schemas.SandboxView},
    errors=operations.REST,
    body=schemas.CreateSandbox,
    body_needed=False,
    headers={"Idempotency-Key": "The same key and body give the same sandbox for 24 hours"},
)
operations.add(
    router,
    "GET",
    "",
    list_,
    summary="List sandboxes, newest first",
    answers={200: schemas.SandboxPage},
    errors=operations.COMMON,
    query=schemas.ListSandboxes,
)
operations.add(
    router,
    "GET",
    "/{sandbox_id}",
    get,
    summary="One sandbox",
    answers={200: schemas.SandboxView},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "PATCH",
    "/{sandbox_id}",
    patch,
    summary="Set or extend its timeout",
    answers={200: schemas.SandboxView},
    errors=operations.SANDBOX,
    body=schemas.PatchSandbox,
)
operations.add(
    router,
    "DELETE",
    "/{sandbox_id}",
    kill,
    summary="Kill it; nothing happens to one that is over",
    answers={200: schemas.SandboxView},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "GET",
    "/{sandbox_id}/metrics",
    metrics,
    summary="CPU, memory and disk of the guest",
    answers={200: schemas.MetricsView},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "GET",
    "/{sandbox_id}/logs",
    logs,
    summary="Its events, oldest first, or its console's end",
    answers={200: schemas.LogsView},
    errors=operations.SANDBOX,
    query=schemas.Logs,
)
