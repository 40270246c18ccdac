"""The application: which sandbox, may the caller, and then whose answer it is."""

import asyncio
from typing import Any, Final, cast

import structlog
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.api.e2b.envd import errors, rest
from skerry.api.e2b.envd.call import BadUserError, Call, current, keepalive_of, user_of
from skerry.api.e2b.envd.connect import CODECS, MESSAGE_BYTES_MAX, Rpc
from skerry.api.e2b.envd.filesystem import FilesystemService
from skerry.api.e2b.envd.process import ProcessService
from skerry.api.e2b.envd.watches import Watchers
from skerry.api.e2b.gen.filesystem_connect import FilesystemASGIApplication
from skerry.api.e2b.gen.process_connect import ProcessASGIApplication
from skerry.api.observe import deny
from skerry.api.problems import ClientGone
from skerry.api.streams import Owned
from skerry.control import Services
from skerry.core.errors import SkerryError
from skerry.core.lifecycle import State
from skerry.core.models import Sandbox

EXPIRY_MAX: Final = 2**62
_AWAKE: Final = frozenset({State.RUNNING, State.PAUSING, State.RESUMING})

log = structlog.get_logger("skerry.api")


def create_envd_app(services: Services, stopping: asyncio.Event, owned: Owned) -> "EnvdApp":
    """An ASGI application that answers for the sandbox in `scope["skerry.sandbox_id"]`; where that is None, for the one
    whose signature the URL carries. `stopping` is set when the server goes down: streams end then. `owned` owns what
    goes on between requests."""
    return EnvdApp(services, stopping, owned)


class EnvdApp:
    def __init__(self, services: Services, stopping: asyncio.Event, owned: Owned) -> None:
        self._services = services
        self._watchers = Watchers(owned)
        how: dict[str, Any] = {"read_max_bytes": MESSAGE_BYTES_MAX, "codecs": CODECS}
        process = ProcessASGIApplication(ProcessService(), **how)
        filesystem = FilesystemASGIApplication(FilesystemService(self._watchers), **how)
        self._rpc = {
            "/process.Process/": Rpc(cast("ASGIApp", process), stopping),
            "/filesystem.Filesystem/": Rpc(cast("ASGIApp", filesystem), stopping),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await deny(errors.answer(404, "there is no WebSocket at this address"), send)
            return
        answer = await self._answer(scope, receive, send)
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """The answer; None where it was sent already."""
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        path: str = scope["path"]
        sandbox, refusal = self._sandbox(scope, headers, query)
        if sandbox is None:
            return refusal
        try:
            call = Call(
                services=self._services,
                sandbox=sandbox,
                principal=self._services.tokens.principal_of(sandbox),
                # A signature is for the user that the URL names: no header may make another of it.
                user=query.get("username") or None if path == "/files" else user_of(headers),
                keepalive_s=keepalive_of(headers),
            )
        except BadUserError as error:
            return errors.answer(401, str(error))
        try:
            rpc = self._rpc.get(path[: path.rfind("/") + 1])
            if rpc is None:
                return await _plain(call, Request(scope, receive))
            current.set(call)
            await rpc(scope, receive, send)
        except ClientGone:
            raise
        except SkerryError as error:
            if call.broken is not None or error.code == "stopping":
                raise  # the answer has begun: it is cut
            return errors.to_http(error, sandbox.id)
        return None

    # ------------------------------------------------------------------------------------------------------- may they

    def _sandbox(self, scope: Scope, headers: Headers, query: QueryParams) -> tuple[Sandbox | None, Response]:
        """The sandbox, for one who may use it; else None, and what to answer."""
        tokens, sandbox_id = self._services.tokens, scope["skerry.sandbox_id"]
        signed = scope["path"] == "/files" and scope["method"] in {"GET", "POST"}
        if sandbox_id is None:
            found, refusal = self._by_signature(scope["method"], query) if signed else (None, _unnamed())
            if found is None:
                return None, refusal
            return (found, refusal) if _answers(found) else (None, errors.away(found.id))
        found = tokens.find(sandbox_id)
        if found is None or not _answers(found):
            return None, errors.away(sandbox_id)
        token = headers.get("x-access-token")
        if tokens.opens(sandbox_id, token) or (scope["path"] == "/health" and scope["method"] == "GET"):
            return found, _unnamed()
        if token is None and signed:
            owner, refusal = self._by_signature(scope["method"], query)
            if owner is None:
                return None, refusal
            return (owner, refusal) if owner.id == sandbox_id else (None, errors.answer(401, "invalid signature"))
        return None, errors.answer(401, errors.UNAUTHORIZED)

    def _by_signature(self, method: str, query: QueryParams) -> tuple[Sandbox | None, Response]:
        """Whose token has signed this URL."""
        signature, said = query.get("signature"), query.get("signature_expiration")
        if not signature:
            return None, errors.answer(401, "missing signature query parameter")
        if said is not None and not (said.isascii() and said.isdigit() and int(said) < EXPIRY_MAX):
            return None, errors.answer(400, "signature_expiration must be a time in Unix seconds")
        expires = None if said is None else int(said)
        operation = "read" if method == "GET" else "write"
        found = self._services.tokens.find_signed(
            signature, query.get("path", ""), operation, query.get("username", ""), expires
        )
        if found is None:
            return None, errors.answer(401, "invalid signature")
        if expires is not None and rest.expired(expires):
            return None, errors.answer(401, "signature is already expired")
        return found, _unnamed()


def _answers(sandbox: Sandbox) -> bool:
    """Whether it runs, or will at the first request."""
    return sandbox.state in _AWAKE or (sandbox.state is State.PAUSED and sandbox.spec.auto_resume)


def _unnamed() -> Response:
    return errors.answer(400, "missing header: E2b-Sandbox-Id")


async def _plain(call: Call, request: Request) -> Response:
    """What is not Connect. E2B's internal calls (/init, /freeze and their like) are not here, as nothing else is."""
    methods = rest.ROUTES.get(request.url.path)
    if methods is None:
        return errors.answer(404, "there is nothing at this address")
    handler = methods.get(request.method)
    if handler is None:
        return errors.answer(405, f"{request.method} is not possible here", {"Allow": ", ".join(methods)})
    return await handler(call, request)
