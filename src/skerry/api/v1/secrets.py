"""`/v1/secrets`: put, list, look, delete. No answer holds a value."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, wire
from skerry.api import schemas_secrets as shapes
from skerry.api.v1.access import principal_of, services_of

router = APIRouter(prefix="/v1/secrets", tags=["secrets"])


async def put(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.PutSecret)
    found = await services_of(request).secrets.put(principal, request.path_params["secret"], wanted.value)
    return wire.Json(wire.secret(found), 201 if found.version == 1 else 200)


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).secrets.list(principal)
    return wire.Json({"items": [wire.secret(each) for each in found]})


async def get(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found, versions = await services_of(request).secrets.get(principal, request.path_params["secret"])
    kept = [{"version": version, "created_at": wire.timestamp(at)} for version, at in versions]
    return wire.Json({**wire.secret(found), "versions": kept})


async def delete(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    await services_of(request).secrets.delete(principal, request.path_params["secret"])
    return Response(status_code=204)


operations.add(
    router,
    "PUT",
    "/{secret}",
    put,
    summary="Set a secret, or a new version of it",
    answers={200: shapes.SecretView, 201: shapes.SecretView},
    errors=(*operations.COMMON, 409, 429),
    body=shapes.PutSecret,
)
operations.add(
    router,
    "GET",
    "",
    list_,
    summary="The project's secrets, by name, without values",
    answers={200: shapes.SecretList},
    errors=operations.COMMON,
)
operations.add(
    router,
    "GET",
    "/{secret}",
    get,
    summary="A secret and the versions that are kept, without values",
    answers={200: shapes.SecretVersions},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "DELETE",
    "/{secret}",
    delete,
    summary="Delete a secret: no command gets it any more",
    answers={204: None},
    errors=(*operations.COMMON, 404, 409),
)
