"""`IO` that blocks: httpx.Client and websockets' threaded client. Its coroutines never suspend."""

import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from skerry.core.errors import InvalidRequest
from skerry.sdk.config import Target
from skerry.sdk.http import client_options, socket_options, timeouts
from skerry.sdk.io import Reply, Request, Socket, finish

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

T = TypeVar("T")


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """An asynchronous iterator that never suspends, as an ordinary one. Closes it when it is left."""
    try:
        while True:
            try:
                value = finish(anext(source))
            except StopAsyncIteration:
                return
            yield value
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            finish(close())


class _Reply:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self._response.iter_bytes():
            yield chunk

    async def aclose(self) -> None:
        self._response.close()


class _Socket:
    """In the connection's context, which `aclose` leaves."""

    def __init__(self, connection: "AbstractContextManager[ClientConnection]") -> None:
        self._context = ExitStack()
        self._connection = self._context.enter_context(connection)

    async def send(self, message: str | bytes) -> None:
        self._connection.send(message)

    async def recv(self, timeout: float | None) -> str | bytes:
        return self._connection.recv(timeout)

    async def aclose(self) -> None:
        self._context.close()


class BlockingIO:
    def __init__(self, target: Target, *, transport: httpx.BaseTransport | None = None) -> None:
        self._loopback = target.is_loopback
        self._client = httpx.Client(transport=transport, **client_options(target))

    async def open(self, request: Request) -> Reply:
        content = request.content
        body = content if content is None or isinstance(content, bytes) else iterate(content)
        built = self._client.build_request(
            request.method, request.url, headers=request.headers, content=body, timeout=timeouts(request)
        )
        return _Reply(self._client.send(built, stream=True))

    async def websocket(self, url: str, headers: Mapping[str, str]) -> Socket:
        from websockets.sync.client import connect  # most programs open no terminal

        return _Socket(connect(url, additional_headers=headers, **socket_options(loopback=self._loopback)))

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this IO is the one that blocks

    async def local(self, function: Callable[[], T]) -> T:
        return function()

    async def notify(self, callback: Callable[[Any], Any], value: Any) -> None:
        result = callback(value)
        if inspect.iscoroutine(result):
            result.close()
            raise InvalidRequest("an asynchronous callback needs the asynchronous client", code="needs_async")

    async def aclose(self) -> None:
        self._client.close()
