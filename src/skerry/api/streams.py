"""Long answers: newline-delimited JSON or server-sent events, with back-pressure, keepalives, and an honest end.

Every piece is awaited into the socket (uvicorn holds the sender while the client is slow), so a slow client slows the
guest's process. A stream ends with a line that says how, or it is broken: there is no third way.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.api import problems, wire
from skerry.api.problems import ClientGone
from skerry.api.requests import request_id_of
from skerry.core.errors import SkerryError, Unavailable

T = TypeVar("T")

KEEPALIVE_S: Final = 15.0
NDJSON_TYPE: Final = "application/x-ndjson"
SSE_TYPE: Final = "text/event-stream"

Line = tuple[str, str]
"""An event's type and its JSON text."""

log = structlog.get_logger("skerry.api")


def wants_sse(request: Request) -> bool:
    return SSE_TYPE in request.headers.get("accept", "")


def stopping() -> Unavailable:
    """The server is going down; what runs in the guest runs on."""
    return Unavailable(
        "the server is stopping; the process runs on: attach to it once the server is back",
        code="stopping",
        retry="unknown",
        retry_after=2,
    )


async def attended(work: Coroutine[Any, Any, T], *watchers: Awaitable[Any]) -> T:
    """Do `work` while no watcher ends. A watcher that ends first ends the work, and its exception is raised."""
    task = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        await asyncio.wait([task, *watching], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            for watcher in watching:
                if watcher.done():
                    watcher.result()
        return await task
    finally:
        everything = [task, *watching]
        for one in everything:
            one.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def hung_up(receive: Receive) -> None:
    """Raises ClientGone when the client does."""
    while True:
        message = await receive()
        if message["type"] in {"http.disconnect", "websocket.disconnect"}:
            raise ClientGone("the client hung up")


async def server_stops(event: asyncio.Event) -> None:
    await event.wait()
    raise stopping()


class EventStream(Response):
    """An answer made of events. `lines` ends by itself; a SkerryError it raises becomes the last line, `error`."""

    def __init__(self, request: Request, lines: AsyncIterator[Line]) -> None:
        self._request = request
        self._lines = lines
        self._sse = wants_sse(request)
        self._keepalive_s: float = request.app.state.keepalive_s
        self._sent_at = 0.0
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        # Set by hand: Starlette would add a charset, and an SSE client must see the bare type.
        self.headers["content-type"] = SSE_TYPE if self._sse else NDJSON_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        stop: asyncio.Event = self._request.app.state.stopping
        try:
            await attended(self._pump(send), hung_up(receive), self._keep_alive(send), server_stops(stop))
        except ClientGone:
            scope["skerry.client_gone"] = True
        except SkerryError as error:
            await self._fail(send, error)
        except Exception:
            log.exception("stream failed", request_id=request_id_of(self._request))
            await self._fail(send, problems.unexpected())
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self._lines, "aclose", None)
            if close is not None:
                with suppress(SkerryError):
                    await close()

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        async for kind, text in self._lines:
            await send(self._chunk(kind, text))
            self._sent_at = loop.time()

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._sent_at
            if silent < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent)
                continue
            await send(self._chunk("keepalive", '{"type":"keepalive"}'))
            self._sent_at = loop.time()

    async def _fail(self, send: Send, error: SkerryError) -> None:
        document = problems.document(error, request_id_of(self._request))
        await send(self._chunk("error", wire.dumps({"type": "error", "error": document})))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, kind: str, text: str) -> dict[str, Any]:
        framed = f"event: {kind}\ndata: {text}\n\n" if self._sse else f"{text}\n"
        return {"type": "http.response.body", "body": framed.encode("ascii"), "more_body": True}


class Owned:
    """Owner of work that outlives the request that began it (feeding a process's input). Closing cancels the rest."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("work in the background failed", exc_info=error)

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
