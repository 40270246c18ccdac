"""`/v1/sandboxes/{id}/step-tokens`: mint, renew, list, revoke. A token is told once; what it stands for, never."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, wire
from skerry.api import schemas_secrets as shapes
from skerry.api.v1.access import principal_of, services_of
from skerry.core.secrets import reference
from skerry.core.step_tokens import StepScope

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/step-tokens", tags=["secrets"])


async def mint(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.MintStepToken)
    scope = StepScope(
        host=wanted.host,
        methods=frozenset(wanted.methods),
        path_prefix=wanted.path_prefix,
        repository=wanted.repository,
        budget=wanted.budget,
    )
    grant, token = await services_of(request).step_tokens.mint(
        principal, request.path_params["sandbox_id"], reference(wanted.secret, wanted.version), scope, wanted.step
    )
    return wire.Json({**wire.step_token(grant), "token": token}, 201)


async def renew(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.RenewStepToken)
    grant, token = await services_of(request).step_tokens.renew(
        principal, request.path_params["sandbox_id"], wanted.token
    )
    return wire.Json({**wire.step_token(grant), "token": token})


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).step_tokens.list(principal, request.path_params["sandbox_id"])
    return wire.Json({"items": [wire.step_token(grant) for grant in found]})


async def revoke(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    sandbox_id, token_id = request.path_params["sandbox_id"], request.path_params["token"]
    await services_of(request).step_tokens.revoke(principal, sandbox_id, token_id)
    return Response(status_code=204)


operations.add(
    router,
    "POST",
    "",
    mint,
    summary="Mint a step token, which stands for a secret for a minute",
    answers={201: shapes.NewStepToken},
    errors=operations.SANDBOX,
    body=shapes.MintStepToken,
)
operations.add(
    router,
    "POST",
    "/renew",
    renew,
    summary="Another token in its place, for a minute more",
    answers={200: shapes.NewStepToken},
    errors=operations.SANDBOX,
    body=shapes.RenewStepToken,
)
operations.add(
    router,
    "GET",
    "",
    list_,
    summary="The sandbox's step tokens, without their texts",
    answers={200: shapes.StepTokenList},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "DELETE",
    "/{token}",
    revoke,
    summary="Nothing is traded for it any more",
    answers={204: None},
    errors=operations.SANDBOX,
)
