"""`/v1/sandboxes/{id}/ports`: where a sandbox's ports are. What is behind them is `api.ports`' to answer."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api.v1.access import principal_of, services_of

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/ports", tags=["ports"])


async def look(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    sandbox_id: str = request.path_params["sandbox_id"]
    found = await services_of(request).ports.addresses(principal, sandbox_id)
    return wire.Json(
        {
            "url": found.url,
            "path": f"/v1/sandboxes/{sandbox_id}/ports/{{port}}/",
            "public": found.public,
            "token": found.token,
        }
    )


operations.add(
    router,
    "GET",
    "",
    look,
    summary="Where its ports are, and the token that opens them",
    answers={200: schemas.PortsView},
    errors=(*operations.COMMON, 404, 410),
)
