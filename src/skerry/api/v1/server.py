"""What the server says about itself."""

from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api.v1.access import metrics_of, principal_of, services_of
from skerry.core.lifecycle import LIVE

router = APIRouter(tags=["server"])

PLAIN: Final = operations.Content(("text/plain",), {"type": "string"})


async def info(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = services_of(request).server.info(principal)
    return wire.Json(
        {
            "version": found.version,
            "node_id": found.node_id,
            "accelerator": found.accelerator,
            "vmm": found.vmm,
            "templates": list(found.templates),
        }
    )


async def health(request: Request) -> Response:
    requests.no_query(request)
    return wire.Json({"status": "ok"})


async def metrics(request: Request) -> Response:
    requests.no_query(request)
    numbers = metrics_of(request)
    counts = services_of(request).server.by_state()
    for state in LIVE:
        numbers.sandboxes.labels(state.value).set(counts.get(state, 0))
    numbers.pool.found = services_of(request).server.pools()
    return Response(numbers.text(), media_type=CONTENT_TYPE_LATEST)


operations.add(
    router,
    "GET",
    "/v1/server",
    info,
    summary="Version, accelerator, templates",
    answers={200: schemas.ServerView},
    errors=operations.COMMON,
)
operations.add(
    router,
    "GET",
    "/health",
    health,
    summary="Whether the server serves",
    answers={200: schemas.Health},
    errors=(400, 500),
    public=True,
)
operations.add(
    router,
    "GET",
    "/metrics",
    metrics,
    summary="Prometheus",
    answers={200: PLAIN},
    errors=(400, 500),
    public=True,
)
