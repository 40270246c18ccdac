"""The outermost application: gives every request to the face that it is for.

Each face is an application of its own with its own shape of errors. What names a sandbox wrongly is refused here.
"""

from dataclasses import dataclass
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.api import problems
from skerry.api.observe import Metrics, Observe, deny
from skerry.api.routing import BadRouteError, Face, Named, decide, domains_of


@dataclass(frozen=True, slots=True)
class Faces:
    """The applications besides the native one; what is None is answered by that one, as an unknown address.

    `envd` finds the sandbox's id in `scope["skerry.sandbox_id"]` (None: the URL's signature says which), `ports` the
    whole route in `scope["skerry.route"]`. Neither gets lifespan events.
    """

    control: ASGIApp | None = None
    envd: ASGIApp | None = None
    ports: ASGIApp | None = None


class Front:
    def __init__(self, native: FastAPI, faces: Faces, *, metrics: Metrics, domain: str | None = None) -> None:
        """`native` answers for itself; the others are observed here. `domain`: that of the sandboxes' host names."""
        self.native = native
        self.domains = domains_of(domain)
        self._refuse = Observe(_refuse, metrics=metrics)
        self._apps: dict[Face, ASGIApp] = {
            Face.NATIVE: native,
            Face.CONTROL: self._watched(faces.control, metrics),
            Face.ENVD: self._watched(faces.envd, metrics),
            Face.PORT: self._watched(faces.ports, metrics),
        }

    def _watched(self, app: ASGIApp | None, metrics: Metrics) -> ASGIApp:
        return self.native if app is None else Observe(app, metrics=metrics)

    def takes_upgrade(self, headers: list[tuple[bytes, bytes]], path: bytes) -> bool:
        """Whether a connection is to be handed over when this request upgrades it (see `HttpProtocol`)."""
        try:
            return decide(headers, path, self.domains).face is Face.PORT
        except BadRouteError:
            return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.native(scope, receive, send)
            return
        try:
            route = decide(scope["headers"], raw_path(scope), self.domains)
        except BadRouteError as error:
            scope["skerry.refused"] = error
            await self._refuse(scope, receive, send)
            return
        if route.rest is not None and route.face is Face.ENVD:
            scope = below(scope, route.rest)
        scope["skerry.route"] = route
        scope["skerry.face"] = route.face.value
        scope["skerry.sandbox_id"] = route.sandbox_id
        await self._apps[route.face](scope, receive, send)


def raw_path(scope: Scope) -> bytes:
    """The path as the client wrote it, without the query."""
    found: bytes | None = scope.get("raw_path")
    return found.partition(b"?")[0] if found is not None else scope["path"].encode("utf-8", "surrogateescape")


def below(scope: Scope, rest: bytes) -> Scope:
    """The scope of what has its own root at the address of a sandbox's port."""
    return {**scope, "raw_path": rest, "path": unquote(rest.decode("latin-1"), errors="surrogateescape")}


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """400: in the native form where the native path was wrong, else as text."""
    error: BadRouteError = scope["skerry.refused"]
    answer: Response
    if error.named is Named.PATH:
        answer = problems.response(error, scope["skerry.request_id"])
    else:
        answer = PlainTextResponse(error.message + "\n", error.status)
    if scope["type"] == "websocket":
        await deny(answer, send)
    else:
        await answer(scope, receive, send)
