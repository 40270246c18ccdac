"""The ports' face: finds out who asks, gets a connection, and lets the request through."""

import asyncio

import h11
import structlog
from starlette.types import Receive, Scope, Send

from skerry.api.front import raw_path
from skerry.api.observe import deny
from skerry.api.ports import answers, headers
from skerry.api.ports.client import ClientSide
from skerry.api.ports.exchange import Exchange, splice
from skerry.api.ports.headers import TCP, Client
from skerry.api.problems import ClientGone
from skerry.api.routing import Named, Route
from skerry.api.streams import attended, server_stops
from skerry.control import PortConnection, Services
from skerry.core.errors import InvalidRequest, SkerryError, Unauthenticated

log = structlog.get_logger("skerry.api")


class PortsApp:
    """An ASGI application below `Front`. WebSockets come to it as upgrades (see `ClientSide`), not as their own scope:
    a server that cannot hand over a connection refuses them."""

    def __init__(self, services: Services, stopping: asyncio.Event) -> None:
        """`stopping` is set when the server begins to stop: what is endless ends then, the rest gets its grace."""
        self._services = services
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            cannot = InvalidRequest("this server cannot hand over a WebSocket", code="malformed_http")
            await deny(answers.refuse(cannot, scope), send)
            return
        client = ClientSide(scope, receive, send)
        try:
            await attended(self._serve(scope, client), client.listen(), self._end_of_the_endless(client))
        except ClientGone:
            raise
        except SkerryError as error:
            if client.begun:
                raise
            await answers.refuse(error, scope)(scope, receive, send)
        else:
            await client.finish()

    async def _end_of_the_endless(self, client: ClientSide) -> None:
        await client.endless.wait()
        await server_stops(self._stopping)

    async def _serve(self, scope: Scope, client: ClientSide) -> None:
        route: Route = scope["skerry.route"]
        given: list[headers.Header] = scope["headers"]
        upgrade = headers.upgrade_of(given) if client.can_upgrade else None
        headers.framing(given)  # what is wrong in itself is refused before anybody is woken for it
        if not headers.values(given, b"expect"):
            client.want_body()
        connection = await self._connect(route, given)
        try:
            if upgrade == TCP and route.named is Named.PATH:
                await client.begin(101, [(b"connection", b"Upgrade"), (b"upgrade", TCP)])
                await splice(connection, client)
            else:
                await Exchange(connection, client).run(self._request(scope, connection, upgrade))
        finally:
            await connection.aclose()

    async def _connect(self, route: Route, given: list[headers.Header]) -> PortConnection:
        """By name or by headers: whoever may come. By path: with a key or the traffic token."""
        assert route.sandbox_id is not None and route.port is not None  # noqa: S101 - what a port's route has
        ports, token = self._services.ports, _only(given, headers.TRAFFIC_TOKEN)
        if route.named is not Named.PATH:
            return await ports.visit(route.sandbox_id, route.port, token)
        if token is not None:
            return await ports.visit(route.sandbox_id, route.port, token, token_needed=True)
        principal = await self._services.keys.authenticate(_key_of(given))
        return await ports.connect(principal, route.sandbox_id, route.port)

    def _request(self, scope: Scope, connection: PortConnection, upgrade: bytes | None) -> h11.Request:
        route: Route = scope["skerry.route"]
        client = scope.get("client")
        tokens = self._services.tokens
        made = headers.to_guest(
            scope["headers"],
            route,
            Client(client[0] if client else "unknown", scope["scheme"]),
            mask=connection.sandbox.spec.mask_request_host,
            upgrade=upgrade,
            is_token=lambda text: tokens.opens(connection.sandbox.id, text),
        )
        target = route.rest if route.rest is not None else raw_path(scope) or b"/"
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        try:
            return h11.Request(method=scope["method"], target=target, headers=made)
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"the request cannot be passed on: {error}", code="malformed_http") from error


def _only(given: list[headers.Header], name: bytes) -> str | None:
    """A header that is given at most once."""
    found = headers.values(given, name)
    if len(found) > 1:
        raise InvalidRequest.of(name.decode("ascii"), "is given more than once")
    return found[0].decode("latin-1").strip() if found else None


def _key_of(given: list[headers.Header]) -> str:
    """The API key: `X-API-Key`, and only without it `Authorization`, which otherwise is the sandbox's server's."""
    key = _only(given, headers.API_KEY)
    if key is None:
        scheme, _, key = (_only(given, headers.AUTHORIZATION) or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
    if not key:
        raise Unauthenticated(
            "give an API key (X-API-Key, or Authorization: Bearer KEY) or the sandbox's traffic token",
            code="key_missing",
        )
    return key
