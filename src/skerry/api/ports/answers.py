"""What the gateway itself says when there is no server to say something.

By the path, problems as everywhere in the native interface. By host name and by headers, E2B's JSON, whose texts its
clients match on; a browser gets a page.
"""

import html
import math
from typing import Any

from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from skerry.api import problems, wire
from skerry.api.routing import Named, Route
from skerry.core.errors import Gone, InvalidRequest, SkerryError

NOT_FOUND = "The sandbox was not found"
PORT_CLOSED = "The sandbox is running but port is not open"
TOKEN_HEADER = "'e2b-traffic-access-token'"  # noqa: S105 - a header's name
TOKEN_MISSING = f"Sandbox is secured with traffic access token. Token header {TOKEN_HEADER} is missing"
TOKEN_WRONG = f"Sandbox is secured with traffic access token. Provided token in header {TOKEN_HEADER} is invalid"
_AWAY = frozenset({"sandbox_not_found", "sandbox_paused"})

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:20vh auto}}code{{color:#666}}</style>
<h1>{title}</h1><p>{said}</p><p><code>{sandbox}</code></p></html>
"""


def refuse(error: SkerryError, scope: Scope) -> Response:
    """The answer to a request that did not reach a server."""
    route: Route = scope["skerry.route"]
    request_id: str = scope["skerry.request_id"]
    if route.named is Named.PATH:
        return problems.response(error, request_id)
    status, said = _as_e2b(error)
    headers: dict[str, str] = {}
    if said is NOT_FOUND:
        headers["Should-Retry"] = "false"  # E2B's clients repeat a 502 otherwise
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if status == 400:
        return Response(said + "\n", 400, headers, "text/plain")
    if _is_browser(scope):
        return _page(status, said, route, headers)
    body: dict[str, Any] = {"sandboxId": route.sandbox_id, "message": said}
    if said is PORT_CLOSED:
        body["port"] = route.port
    return wire.Json({**body, "code": status}, status, headers)


def _as_e2b(error: SkerryError) -> tuple[int, str]:
    if isinstance(error, Gone) or error.code in _AWAY:
        return 502, NOT_FOUND
    if error.code == "port_not_open":
        return 502, PORT_CLOSED
    if error.code == "traffic_token_missing":
        return 403, TOKEN_MISSING
    if error.code == "traffic_token_wrong":
        return 403, TOKEN_WRONG
    if error.code == "sandbox_state":
        return 503, error.message
    if isinstance(error, InvalidRequest):
        return 400, error.message
    return error.status, error.message


def _is_browser(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"mozilla/" in headers.get(b"user-agent", b"").lower() and b"text/html" in headers.get(b"accept", b"")


def _page(status: int, said: str, route: Route, headers: dict[str, str]) -> Response:
    title = {403: "Not public", 502: "Nothing here", 503: "Not now"}.get(status, "Not possible")
    if said is PORT_CLOSED:
        said = f"The sandbox is running but port {route.port} is not open"
    body = _PAGE.format(title=title, said=html.escape(said), sandbox=html.escape(route.sandbox_id or ""))
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
    return HTMLResponse(body, status, headers | policy)
