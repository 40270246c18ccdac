"""The client's side of an exchange: what it sends, piece by piece, what it is sent, and that it went away."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from starlette.types import Receive, Scope, Send

from skerry.api.ports.headers import Header
from skerry.api.problems import ClientGone

UPGRADE: Final = "skerry.upgrade"
"""The ASGI extension of a connection that can be handed over: an answer 101 makes the rest of it bare bytes both ways,
which come as `http.request` and go as `http.response.body`."""


class ClientSide:
    """`listen` must run for as long as the exchange does: nothing else hears that the client is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._wanted = asyncio.Event()
        self.can_upgrade = UPGRADE in scope.get("extensions", {})
        self.begun = False
        """Its answer has begun: it can be broken, not refused."""
        self.endless = asyncio.Event()
        """Set for an answer that does not end by itself, and has to be ended when the server stops."""

    async def listen(self) -> None:
        """Take what it sends, once `want_body` was called. Raises ClientGone; never returns."""
        await self._wanted.wait()
        open_ = True
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone("the client hung up")
            if message.get("body"):
                await self._pieces.put(message["body"])
            if open_ and not message.get("more_body", False):
                open_ = False
                await self._pieces.put(None)

    def want_body(self) -> None:
        """From now on it may send. A client that asked whether it may (`Expect`) is told so."""
        self._wanted.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What it sends, to the end of the request's body or of its side of the connection."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def begin(self, status: int, headers: list[Header]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Returns when the connection takes more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The answer is whole."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
