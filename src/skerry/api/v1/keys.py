"""`/v1/keys`: make, list, revoke."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api.v1.access import principal_of, services_of

router = APIRouter(prefix="/v1/keys", tags=["keys"])


async def create(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.CreateKey)
    key, secret = await services_of(request).keys.create(principal, wanted.name, list(wanted.scopes))
    return wire.Json({**wire.key(key), "secret": secret}, 201)


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).keys.list(principal)
    return wire.Json({"items": [wire.key(key) for key in found]})


async def revoke(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    key = await services_of(request).keys.revoke(principal, request.path_params["key_id"])
    return wire.Json(wire.key(key))


operations.add(
    router,
    "POST",
    "",
    create,
    summary="Make a key; its text is shown this once",
    answers={201: schemas.NewKey},
    errors=(*operations.COMMON, 409, 429),
    body=schemas.CreateKey,
)
operations.add(router, "GET", "", list_, summary="List keys", answers={200: schemas.KeyList}, errors=operations.COMMON)
operations.add(
    router,
    "DELETE",
    "/{key_id}",
    revoke,
    summary="Revoke a key",
    answers={200: schemas.KeyView},
    errors=(*operations.COMMON, 404, 409),
)
