"""`IO` over asyncio: httpx.AsyncClient and websockets' asyncio client."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from skerry.sdk.config import Target
from skerry.sdk.http import client_options, socket_options, timeouts
from skerry.sdk.io import Reply, Request, Socket

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

T = TypeVar("T")


class _Reply:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = response.headers

    def chunks(self) -> AsyncIterator[bytes]:
        return self._response.aiter_bytes()

    async def aclose(self) -> None:
        await self._response.aclose()


class _Socket:
    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection

    async def send(self, message: str | bytes) -> None:
        await self._connection.send(message)

    async def recv(self, timeout: float | None) -> str | bytes:
        async with asyncio.timeout(timeout):
            return await self._connection.recv()

    async def aclose(self) -> None:
        await self._connection.close()


class AsyncIO:
    def __init__(self, target: Target, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._loopback = target.is_loopback
        self._client = httpx.AsyncClient(transport=transport, **client_options(target))

    async def open(self, request: Request) -> Reply:
        built = self._client.build_request(
            request.method, request.url, headers=request.headers, content=request.content, timeout=timeouts(request)
        )
        return _Reply(await self._client.send(built, stream=True))

    async def websocket(self, url: str, headers: Mapping[str, str]) -> Socket:
        from websockets.asyncio.client import connect  # most programs open no terminal

        return _Socket(await connect(url, additional_headers=headers, **socket_options(loopback=self._loopback)))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def local(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def notify(self, callback: Callable[[Any], Any], value: Any) -> None:
        result = callback(value)
        if inspect.isawaitable(result):
            await result

    async def aclose(self) -> None:
        await self._client.aclose()
