"""`/v1/egress`: what may leave the project's sandboxes; `/v1/sandboxes/{id}/network`: one sandbox's own rules."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api import schemas_egress as shapes
from skerry.api.v1.access import principal_of, services_of
from skerry.core.models import NetworkRules
from skerry.core.network import inner_rules

router = APIRouter(prefix="/v1", tags=["egress"])


async def get(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).egress.get(principal)
    return wire.Json(wire.egress(found))


async def put(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.PutEgress)
    rules = NetworkRules(wanted.mode, tuple(wanted.allow), tuple(wanted.deny))
    policy, spread = await services_of(request).egress.set(principal, rules)
    return wire.Json({**wire.egress_policy(policy), **wire.spread(spread)})


async def reset(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    return wire.Json(wire.spread(await services_of(request).egress.reset(principal)))


async def put_template(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.PutNetwork)
    rules = inner_rules(wanted.mode, wanted.allow, wanted.deny)
    template = request.path_params["template"]
    policy, spread = await services_of(request).egress.set(principal, rules, template=template)
    return wire.Json({**wire.egress_policy(policy), **wire.spread(spread)})


async def reset_template(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    template = request.path_params["template"]
    return wire.Json(wire.spread(await services_of(request).egress.reset(principal, template=template)))


async def get_network(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).egress.of_sandbox(principal, request.path_params["sandbox_id"])
    return wire.Json(wire.network_in_force(found))


async def put_network(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.PutNetwork)
    rules = inner_rules(wanted.mode, wanted.allow, wanted.deny)
    box, cut = await services_of(request).egress.update(principal, request.path_params["sandbox_id"], rules)
    return wire.Json({**(wire.network(box.spec.network) or {}), "connections_cut": cut})


async def events(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, shapes.NetworkEvents)
    page = await services_of(request).traffic.events(
        principal, request.path_params["sandbox_id"], refused=asked.refused, limit=asked.limit, cursor=asked.cursor
    )
    return wire.Json({"items": [wire.network_event(event) for event in page.items], "next_cursor": page.next_cursor})


operations.add(
    router,
    "GET",
    "/egress",
    get,
    summary="What may leave the project's sandboxes, and where the curated list comes from",
    answers={200: shapes.EgressView},
    errors=operations.COMMON,
)
operations.add(
    router,
    "PUT",
    "/egress",
    put,
    summary="Set the project's policy; connections that it forbids are cut",
    answers={200: shapes.PolicySet},
    errors=operations.COMMON,
    body=shapes.PutEgress,
)
operations.add(
    router,
    "DELETE",
    "/egress",
    reset,
    summary="Back to the default: the curated list",
    answers={200: shapes.EgressReset},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "PUT",
    "/egress/templates/{template}",
    put_template,
    summary="Narrow what may leave the sandboxes of a template",
    answers={200: shapes.PolicySet},
    errors=operations.COMMON,
    body=schemas.PutNetwork,
)
operations.add(
    router,
    "DELETE",
    "/egress/templates/{template}",
    reset_template,
    summary="The template narrows nothing any more",
    answers={200: shapes.EgressReset},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "GET",
    "/sandboxes/{sandbox_id}/network",
    get_network,
    summary="Its own rules, and all that holds for it",
    answers={200: shapes.NetworkInForce},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "PUT",
    "/sandboxes/{sandbox_id}/network",
    put_network,
    summary="Set its own rules; connections that they forbid are cut",
    answers={200: shapes.NetworkSet},
    errors=operations.SANDBOX,
    body=schemas.PutNetwork,
)
operations.add(
    router,
    "GET",
    "/sandboxes/{sandbox_id}/network/events",
    events,
    summary="What it looked up and connected to, and what was refused, oldest first",
    answers={200: shapes.NetworkEventPage},
    errors=(*operations.COMMON, 404),
    query=shapes.NetworkEvents,
)
