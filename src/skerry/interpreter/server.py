"""The HTTP interface: what E2B's code interpreter clients speak."""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from skerry.interpreter import events
from skerry.interpreter.context import Context, DiedError
from skerry.interpreter.contexts import Contexts, RefusedError

BODY_MAX: Final = 32 * 1024 * 1024
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE_BYTES_MAX: Final = 128 * 1024 - 257
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as refused:
        return web.Response(status=refused.status, text=str(refused))
    except (DiedError, TimeoutError, OSError) as error:
        if request.transport is None or request.transport.is_closing():
            raise
        return web.Response(status=500, text=f"the context's process did not come up: {error}")


class Server:
    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def app(self) -> web.Application:
        app = web.Application(middlewares=[refusals], client_max_size=BODY_MAX)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.post("/execute", self.execute),
                web.get("/contexts", self.list),
                web.post("/contexts", self.create),
                web.delete("/contexts/{id}", self.remove),
                web.post("/contexts/{id}/restart", self.restart),
            ]
        )
        return app

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def ready(self, _request: web.Request) -> web.Response:
        """Answers once the default context has run something."""
        context = await self._contexts.default()
        async with contextlib.aclosing(context.execute("pass", {})) as told:
            async for _ in told:
                pass
        return web.Response(text="OK")

    async def execute(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        code, context_id = _text(body, "code", required=True), _text(body, "context_id")
        language, env = _text(body, "language"), _variables(body)
        assert code is not None  # noqa: S101 - it is required
        if context_id and language:
            raise RefusedError(400, "Only one of context_id or language can be provided")
        context = self._contexts.get(context_id) if context_id else await self._contexts.default(language)
        return await _stream(request, context, code, env)

    async def list(self, _request: web.Request) -> web.Response:
        return web.json_response([context.told() for context in self._contexts.all()])

    async def create(self, request: web.Request) -> web.Response:
        body = await _body(request)
        context = await self._contexts.create(_text(body, "language"), _text(body, "cwd"))
        return web.json_response(context.told())

    async def remove(self, request: web.Request) -> web.Response:
        await self._contexts.remove(request.match_info["id"])
        return web.Response(status=204)

    async def restart(self, request: web.Request) -> web.Response:
        context = self._contexts.get(request.match_info["id"])
        await asyncio.shield(context.restart())
        return web.json_response(context.told())


async def _stream(request: web.Request, context: Context, code: str, env: dict[str, str]) -> web.StreamResponse:
    """A line per event, as they come. Who reads slowly slows the code down; who goes away interrupts it."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    async with contextlib.aclosing(context.execute(code, env)) as told:
        try:
            async for event in told:
                await response.write(events.line(event))
        except (DiedError, TimeoutError) as error:  # the answer has begun: there is no status left to say it with
            await response.write(events.line(events.error("ContextDied", f"it could not be started anew: {error}")))
    await response.write_eof()
    return response


async def _body(request: web.Request) -> dict[str, Any]:
    """A JSON object; none at all is an empty one. Raises RefusedError."""
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    return body


def _text(body: dict[str, Any], name: str, *, required: bool = False) -> str | None:
    value = body.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise RefusedError(400, f"{name} must be a string")
    return value


def _variables(body: dict[str, Any]) -> dict[str, str]:
    given = body.get("env_vars")
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise RefusedError(400, "env_vars must be an object of strings")
    for name, value in given.items():
        if not VARIABLE.fullmatch(name):
            raise RefusedError(400, f"env_vars: {name[:100]!r} is not a variable's name")
        if "\0" in value or len(value.encode("utf-8", "surrogatepass")) > VARIABLE_BYTES_MAX:
            raise RefusedError(400, f"env_vars: the value of {name} is more than an environment can carry")
    return given
