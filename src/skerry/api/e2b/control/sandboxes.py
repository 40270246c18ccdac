"""Sandboxes: create, connect, list, look, kill, timeouts, pause, resume, fork, network."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import Response

from skerry.api import requests, wire
from skerry.api.e2b.control import models, pages, views
from skerry.api.e2b.control.context import Context
from skerry.api.e2b.control.errors import tell
from skerry.api.e2b.control.names import resolve
from skerry.api.streams import attended, hung_up
from skerry.control import Principal, Scope
from skerry.core.errors import Conflict, GuestUnreachable, InvalidRequest, SkerryError
from skerry.core.lifecycle import FINAL, State, gone
from skerry.core.models import NetworkRules, Sandbox, SandboxSpec
from skerry.core.network import ALLOW, OPEN

STATES: Final[Mapping[str, tuple[State, ...]]] = {"running": views.RUNNING, "paused": views.PAUSED}
EVERYWHERE: Final = frozenset({"0.0.0.0/0", "::/0"})
PAGE: Final = 100


# ------------------------------------------------------------------------------------------------------------- create


async def create_v1(request: Request) -> Response:
    return await _create(request, models.NewSandbox)


async def create_v2(request: Request) -> Response:
    return await _create(request, models.NewSandboxV2)


async def _create(request: Request, model: type[models.NewSandboxV2]) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    key = requests.idempotency_key(request)
    wanted = await requests.body(request, model)
    _refuse_what_is_not_here(wanted)
    spec = spec_of(wanted, asked.principal)
    making = asked.services.sandboxes.create(asked.principal, spec, idempotency_key=key, given=())
    box = await attended(making, hung_up(request.receive))
    if box.state in FINAL:  # of an earlier create under the same key
        raise gone(box.id, box.end_reason)
    return wire.Json(views.sandbox(asked.services, asked.domain, box), 201)


def spec_of(wanted: models.NewSandboxV2, principal: Principal) -> SandboxSpec:
    """What is wanted, in the services' words. Nothing ends it for being idle: E2B knows only timeouts."""
    network = wanted.network or models.Network()
    rules = rules_of(network, wanted.allow_internet_access)
    return SandboxSpec(
        template=resolve("templateID", wanted.template_id, principal).native,
        timeout_ms=wanted.timeout * 1000,
        idle_timeout_ms=None,
        auto_pause=bool(wanted.auto_pause),
        auto_pause_memory=wanted.auto_pause_memory is not False,
        auto_resume=wanted.auto_resume is not None and wanted.auto_resume.enabled,
        public_ports=network.allow_public_traffic is not False,
        mask_request_host=network.mask_request_host,
        network=None if rules == NetworkRules(OPEN) else rules,
        env=wanted.env_vars or {},
        metadata=wanted.metadata or {},
    )


def _refuse_what_is_not_here(wanted: models.NewSandboxV2) -> None:
    if wanted.mcp is not None:
        raise InvalidRequest.of("mcp", "there is no MCP gateway here; run the server as a command of your own")
    if wanted.iam is not None and wanted.iam.tokens:
        raise InvalidRequest.of("iam", "there are no workload identities here")
    if wanted.volume_mounts:
        raise InvalidRequest.of("volumeMounts", "there are no volumes here")
    if wanted.network is not None:
        if wanted.network.https_ports:
            raise InvalidRequest.of("network.httpsPorts", "traffic to ports is plain HTTP inside the sandbox")
        refuse_network(wanted.network, "network.")


def refuse_network(network: models.Network | models.NetworkUpdate, prefix: str = "") -> None:
    """What of a way out cannot be had."""
    if network.dns_servers:
        raise InvalidRequest.of(f"{prefix}dnsServers", "names are looked up by this server, and by no other")
    if network.egress_proxy is not None:
        raise InvalidRequest.of(f"{prefix}egressProxy", "a proxy is this server's to have (setting egress_proxy)")
    if network.rules:
        raise InvalidRequest.of(f"{prefix}rules", "requests leave as they are: no headers are added to them")


def rules_of(network: models.Network | models.NetworkUpdate, internet: bool | None) -> NetworkRules:  # noqa: FBT001
    """The same in our words, within what the project allows: what `allowOut` names passes although `denyOut` names it,
    too; what neither names passes, unless everything is denied."""
    denied, allowed = network.deny_out or [], network.allow_out or []
    if EVERYWHERE & set(allowed):  # all of it, whatever is denied
        return NetworkRules(OPEN)
    closed = internet is False or bool(EVERYWHERE & set(denied))
    deny = tuple(entry for entry in denied if entry not in EVERYWHERE)
    return NetworkRules(ALLOW if closed else OPEN, tuple(allowed), deny)


# --------------------------------------------------------------------------------------------------------------- list


async def list_v1(request: Request) -> Response:
    """All that run; this generation has no pages."""
    asked = await Context.of(request)
    query = requests.query(request, models.ListV1)
    asked.require_team(query.team_id)
    metadata = metadata_of(query.metadata)
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await asked.services.sandboxes.list(
            asked.principal, states=views.RUNNING, metadata=metadata, limit=PAGE, cursor=cursor
        )
        found += [views.listed(box) for box in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return wire.Json(found)


async def list_v2(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.ListV2)
    page = await asked.services.sandboxes.list(
        asked.principal,
        states=_states(query.state),
        metadata=metadata_of(query.metadata),
        origin=resolve("template", query.template, asked.principal).native if query.template else None,
        created_after=query.started_after,
        oldest_first=query.order == "asc",
        limit=query.limit,
        cursor=pages.cursor_of(query),
    )
    headers = pages.headers_of(query, page.next_cursor)
    return wire.Json([views.listed(box) for box in page.items], headers=headers)


def _states(texts: list[str]) -> list[State]:
    """Comma-joined, or one parameter for each; none is both."""
    names = [name for text in texts for name in text.split(",") if name] or list(STATES)
    for name in names:
        if name not in STATES:
            raise InvalidRequest.of("state", f"must be of {', '.join(STATES)}", given=name, allowed=", ".join(STATES))
    return [state for name in names for state in STATES[name]]


def metadata_of(text: str | None) -> dict[str, str]:
    """The filter, which is encoded thrice: the parameter, the pairs in it, and each key and value once more."""
    if not text:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=1000)
        return {unquote(key, errors="strict"): unquote(value, errors="strict") for key, value in pairs}
    except ValueError:
        raise InvalidRequest.of("metadata", "is not of the form key=value&key=value", given=text) from None


# ------------------------------------------------------------------------------------------------------ look, and kill


async def get(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    return wire.Json(views.detail(asked.services, asked.domain, await _present(asked)))


async def _present(asked: Context) -> Sandbox:
    """The one of the path, if it is not over. Raises Gone."""
    box = await asked.services.sandboxes.get(asked.principal, asked.sandbox_id)
    if box.state in FINAL:
        raise gone(box.id, box.end_reason)
    return box


async def kill(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    asked.principal.require(Scope.WRITE)
    box = await _present(asked)
    await asked.services.sandboxes.kill(asked.principal, box.id)
    return Response(status_code=204)


# ----------------------------------------------------------------------------------------------------------- timeouts


async def set_timeout(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Timeout)
    await asked.services.sandboxes.set_timeout(asked.principal, asked.sandbox_id, wanted.timeout * 1000)
    return Response(status_code=204)


async def refresh(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Refresh, optional=True)
    await asked.services.sandboxes.extend_timeout(asked.principal, asked.sandbox_id, wanted.duration * 1000)
    return Response(status_code=204)


# ------------------------------------------------------------------------------------------------------ pause, connect


async def pause(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Pause, optional=True)
    try:
        box, first = await asked.services.sandboxes.rest(
            asked.principal, asked.sandbox_id, memory=wanted.memory is not False
        )
    except GuestUnreachable as error:
        if not wanted.require_healthy_guest:
            raise
        raise Conflict(error.message, code="guest_unresponsive", sandbox_id=asked.sandbox_id) from error
    if not first:
        raise Conflict(f"sandbox {box.id} is already paused", code="sandbox_paused", sandbox_id=box.id)
    return Response(status_code=204)


async def connect_v1(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Connect)
    return await _connect(asked, wanted.timeout, wanted.memory)


async def connect_v2(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.ConnectV2, optional=True)
    return await _connect(asked, wanted.timeout, wanted.memory)


async def _connect(asked: Context, timeout_s: int, memory: bool | None) -> Response:  # noqa: FBT001 - as it was sent
    box, rested = await _wake(asked, timeout_s, memory)
    return wire.Json(views.sandbox(asked.services, asked.domain, box), 201 if rested else 200)


async def resume(request: Request) -> Response:
    """The oldest way to connect, of one that rests only."""
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Resume, optional=True)
    box = await _present(asked)
    if wanted.auto_pause is not None and wanted.auto_pause != box.spec.auto_pause:
        raise InvalidRequest.of("autoPause", "is settled when a sandbox is created", given=wanted.auto_pause)
    if box.state is State.RUNNING:
        raise Conflict(f"sandbox {box.id} is running already", code="sandbox_state", sandbox_id=box.id)
    box, _ = await _wake(asked, wanted.timeout, wanted.memory)
    return wire.Json(views.sandbox(asked.services, asked.domain, box), 201)


async def _wake(asked: Context, timeout_s: int, memory: bool | None) -> tuple[Sandbox, bool]:  # noqa: FBT001
    running = (await _present(asked)).state is State.RUNNING  # what runs has its memory
    return await asked.services.sandboxes.wake(
        asked.principal,
        asked.sandbox_id,
        timeout_ms=timeout_s * 1000,
        keep_left=False,
        memory=memory is not False or running,
    )


# --------------------------------------------------------------------------------------------------------------- fork


async def fork(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.Fork, optional=True)
    making = asked.services.forks.fork(
        asked.principal, asked.sandbox_id, wanted.count, timeout_ms=wanted.timeout * 1000
    )
    copies = await attended(making, hung_up(request.receive))
    return wire.Json([_copy(asked, copy) for copy in copies], 201)


def _copy(asked: Context, copy: Sandbox | SkerryError) -> dict[str, Any]:
    if isinstance(copy, SkerryError):
        return {"error": tell(copy).body()}
    return {"sandbox": views.sandbox(asked.services, asked.domain, copy)}


# ------------------------------------------------------------------------------------------------------------ network


async def update_network(request: Request) -> Response:
    """Replaces all rules of the way out; what is left out is cleared."""
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.NetworkUpdate, optional=True)
    asked.principal.require(Scope.WRITE)
    box = await _present(asked)
    if box.state is not State.RUNNING:
        raise Conflict(f"sandbox {box.id} is {box.state.value}", code="sandbox_state", sandbox_id=box.id)
    refuse_network(wanted)
    rules = rules_of(wanted, wanted.allow_internet_access)
    await asked.services.egress.update(asked.principal, asked.sandbox_id, rules)
    return Response(status_code=204)
