"""The HTTP application: routers over the services, one way to refuse, one way to be observed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skerry.api import operations, problems
from skerry.api.observe import Metrics, Observe
from skerry.api.requests import request_id_of
from skerry.api.streams import KEEPALIVE_S, Owned
from skerry.api.v1 import (
    egress,
    files,
    keys,
    memory,
    ports,
    processes,
    pty,
    sandboxes,
    secrets,
    server,
    step_tokens,
)
from skerry.control import Services
from skerry.core.errors import SkerryError

MAX_BODY_BYTES = 32 * 1024 * 1024
"""The largest JSON body. Bodies that are streamed (files, standard input) have no limit of ours."""


def create_app(
    services: Services,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    keepalive_s: float = KEEPALIVE_S,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application over `services`, which must be open for as long as it serves.

    `max_body_bytes` bounds JSON bodies; `keepalive_s` is the silence after which a stream says that it lives.
    """
    numbers = metrics or Metrics()
    app = FastAPI(
        title="Skerry",
        version=version("skerry"),
        summary="A Linux microVM for every AI agent, on your own hardware",
        docs_url=None,  # those pages would fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    app.state.services = services
    app.state.metrics = numbers
    app.state.max_body_bytes = max_body_bytes
    app.state.keepalive_s = keepalive_s
    app.state.stopping = asyncio.Event()
    app.state.owned = Owned()
    for part in (sandboxes, memory, processes, pty, files, ports, keys, secrets, step_tokens, egress, server):
        app.router.routes.extend(part.router.routes)  # flat: one look-up, and 405 can see all methods of a path
    app.add_exception_handler(SkerryError, _refused)
    app.add_exception_handler(HTTPException, _http_refused)
    app.add_middleware(Observe, metrics=numbers)
    app.openapi = lambda: _openapi(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.stopping.set()
        await app.state.owned.aclose()


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, SkerryError) or isinstance(error, problems.ClientGone):
        raise error
    return problems.response(error, request_id_of(request))


async def _http_refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    allowed = _methods(request) if error.status_code == 405 else ""
    return problems.response(problems.of_http(error, request.method, path, allowed), request_id_of(request))


def _methods(request: Request) -> str:
    """All that can be done with the request's path (a route knows its own only)."""
    found: set[str] = set()
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.path_regex.match(request.url.path):
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, openapi_version="3.1.0", summary=app.summary, routes=app.routes
        )
        app.openapi_schema = operations.complete(document)
    return app.openapi_schema
