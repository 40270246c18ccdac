"""The application: E2B's routes, and one way to refuse."""

from typing import Final
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.api import problems
from skerry.api.e2b.control import absent, errors, sandboxes, snapshots, telemetry, templates
from skerry.control import Services
from skerry.core.errors import SkerryError

MAX_BODY_BYTES: Final = 4 * 1024 * 1024

_BOX: Final = "/sandboxes/{sandbox_id}"
_TEMPLATE: Final = "/templates/{ref}"

ROUTES: Final = (
    ("POST", "/sandboxes", sandboxes.create_v1),
    ("POST", "/v2/sandboxes", sandboxes.create_v2),
    ("GET", "/sandboxes", sandboxes.list_v1),
    ("GET", "/v2/sandboxes", sandboxes.list_v2),
    ("GET", "/sandboxes/metrics", telemetry.metrics_of_many),
    ("GET", _BOX, sandboxes.get),
    ("DELETE", _BOX, sandboxes.kill),
    ("POST", f"{_BOX}/timeout", sandboxes.set_timeout),
    ("POST", f"{_BOX}/refreshes", sandboxes.refresh),
    ("POST", f"{_BOX}/pause", sandboxes.pause),
    ("POST", f"{_BOX}/resume", sandboxes.resume),
    ("POST", f"{_BOX}/connect", sandboxes.connect_v1),
    ("POST", f"/v2{_BOX}/connect", sandboxes.connect_v2),
    ("POST", f"{_BOX}/fork", sandboxes.fork),
    ("PUT", f"{_BOX}/network", sandboxes.update_network),
    ("GET", f"{_BOX}/metrics", telemetry.metrics),
    ("GET", f"{_BOX}/logs", telemetry.logs_v1),
    ("GET", f"/v2{_BOX}/logs", telemetry.logs_v2),
    ("POST", f"{_BOX}/snapshots", snapshots.take),
    ("GET", "/snapshots", snapshots.list_),
    ("GET", "/templates", templates.list_),
    ("GET", "/v2/templates", templates.list_),
    ("GET", "/default-templates", templates.list_),
    ("GET", "/templates/aliases/{ref}", templates.alias),
    ("POST", "/templates/tags", templates.assign_tags),
    ("DELETE", "/templates/tags", templates.delete_tags),
    ("GET", _TEMPLATE, templates.get),
    ("DELETE", _TEMPLATE, templates.delete),
    ("GET", f"{_TEMPLATE}/tags", templates.tags),
    ("GET", f"{_TEMPLATE}/tags/{{rest:path}}", absent.changes),
    ("POST", "/templates", absent.builds),
    ("POST", "/v2/templates", absent.builds),
    ("POST", "/v3/templates", absent.builds),
    ("POST", _TEMPLATE, absent.builds),
    ("PATCH", _TEMPLATE, absent.changes),
    ("PATCH", f"/v2{_TEMPLATE}", absent.changes),
    ("GET", f"{_TEMPLATE}/files/{{hash}}", absent.builds),
    ("POST", f"{_TEMPLATE}/builds/{{build_id}}", absent.builds),
    ("POST", f"/v2{_TEMPLATE}/builds/{{build_id}}", absent.builds),
    ("GET", f"{_TEMPLATE}/builds/{{build_id}}/{{what}}", absent.builds),
    ("GET", "/secrets", absent.secrets),
    ("POST", "/secrets", absent.secrets),
    ("GET", "/secrets/{secret_id}", absent.secrets),
    ("POST", "/secrets/{secret_id}", absent.secrets),
    ("DELETE", "/secrets/{secret_id}", absent.secrets),
    ("GET", "/volumes", absent.volumes),
    ("POST", "/volumes", absent.volumes),
    ("GET", "/volumes/{volume_id}", absent.volumes),
    ("DELETE", "/volumes/{volume_id}", absent.volumes),
)
"""Method, path, handler. What is more exact comes first."""


def create_control_app(
    services: Services,
    *,
    domain: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Starlette:
    """The application over `services`, which must be open for as long as it serves.

    `domain`: below which sandboxes have names (`PORT-ID.DOMAIN`); None: what the client was told.
    """
    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for method, path, handler in ROUTES],
        middleware=[Middleware(WholeSegments)],
        exception_handlers={SkerryError: _refused, HTTPException: _http_refused, Exception: _unexpected},
    )
    app.router.redirect_slashes = False
    app.state.services = services
    app.state.domain = domain
    app.state.max_body_bytes = max_body_bytes
    return app


class WholeSegments:
    """Keeps an encoded slash within its segment of the path: a template's `namespace/name` is one. Segments reach the
    handlers encoded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes | None = scope.get("raw_path")
        if raw is not None and b"%" in raw:
            path = raw.partition(b"?")[0].decode("ascii", "replace")
            segments = [quote(unquote(part), safe=":@") for part in path.split("/")]
            scope = {**scope, "path": "/".join(segments)}
        await self.app(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001 - a handler's form
    if not isinstance(error, SkerryError) or isinstance(error, problems.ClientGone):
        raise error
    return errors.response(error)


async def _http_refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    allowed = ", ".join(sorted(_methods(request))) if error.status_code == 405 else ""
    return errors.response(problems.of_http(error, request.method, path, allowed))


def _methods(request: Request) -> set[str]:
    """All that can be done with the request's path (a route knows its own only)."""
    path = request.scope["path"]
    found: set[str] = set()
    for route in request.app.router.routes:
        if route.path_regex.match(path):
            found |= route.methods
    return found


async def _unexpected(request: Request, error: Exception) -> Response:  # noqa: ARG001 - logged by whom it is raised to
    return errors.response(problems.unexpected())
