"""One request to a server in a sandbox and its answer, over one connection of its own.

Nothing is held but the piece that is under way: a reader that is slow slows the writer at the other end, in both
directions. An answer is whole or broken, as its server's was.
"""

import asyncio
import contextlib
from typing import Final

import h11

from skerry.api.ports import headers
from skerry.api.ports.client import ClientSide
from skerry.api.ports.headers import BadAnswer
from skerry.api.streams import SSE_TYPE, attended
from skerry.control import PortConnection
from skerry.core.errors import OutcomeUnknown, SkerryError

HEAD_MAX: Final = 64 * 1024
"""Of an answer's head, or one piece of chunked framing."""
CONTINUE_S: Final = 1.0
"""So long a server may take to say 100 to a request that expects it; then the body is sent without."""


class Exchange:
    def __init__(self, connection: PortConnection, client: ClientSide) -> None:
        self._connection = connection
        self._client = client
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX)
        self._go_on = asyncio.Event()
        self._upgrading = False
        self._answered = False

    async def run(self, request: h11.Request) -> None:
        """Returns when the whole answer but its end was given to the client.

        Raises BadAnswer before the answer has begun, and OutcomeUnknown (or what ended the sandbox) after.
        """
        self._upgrading = any(name == b"upgrade" for name, _ in request.headers)
        expected = any(name == b"expect" and value.lower() == b"100-continue" for name, value in request.headers)
        if not expected:
            self._go_on.set()
        try:
            await self._say(request)
            await attended(self._answer(), self._feed())
        except h11.RemoteProtocolError as error:
            if self._answered:
                raise OutcomeUnknown(f"the sandbox's server broke off: {error}", retry="unknown") from error
            raise BadAnswer(f"the sandbox's server did not answer in HTTP: {error}") from error
        except OutcomeUnknown as error:
            if self._answered or error.code != OutcomeUnknown.code:
                raise
            raise BadAnswer("the sandbox's server closed the connection before it answered") from error

    # ------------------------------------------------------------------------------------------------------- request

    async def _say(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        data = self._http.send(event)
        if data:
            await self._connection.write(data)

    async def _feed(self) -> None:
        """The request's body. A server that does not want it any more may have answered all the same."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_S):
                await self._go_on.wait()
        self._go_on.set()
        self._client.want_body()
        with contextlib.suppress(SkerryError):
            if not self._upgrading:
                async for piece in self._client.pieces():
                    await self._say(h11.Data(piece))
            await self._say(h11.EndOfMessage())

    # -------------------------------------------------------------------------------------------------------- answer

    async def _answer(self) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._connection.read())
            elif isinstance(event, h11.Data):
                await self._client.write(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.Response):
                await self._begin(event)
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    await self._switch(event)
                    return
                if event.status_code == 100:
                    self._go_on.set()
            else:
                raise BadAnswer("the sandbox's server closed the connection before it answered")

    async def _begin(self, response: h11.Response) -> None:
        found = list(response.headers)
        kept = headers.to_client(response.status_code, found)
        if not self._go_on.is_set():
            kept.append((b"connection", b"close"))  # the body was not asked for, and may come or not
        if any(
            value.partition(b";")[0].strip() == SSE_TYPE.encode() for value in headers.values(kept, b"content-type")
        ):
            self._client.endless.set()
        self._answered = True
        await self._client.begin(response.status_code, kept)

    async def _switch(self, response: h11.InformationalResponse) -> None:
        self._answered = True
        await self._client.begin(101, headers.switched(response.headers))
        rest, _ = self._http.trailing_data
        if rest:
            await self._client.write(rest)
        await splice(self._connection, self._client)


async def splice(connection: PortConnection, client: ClientSide) -> None:
    """Bare bytes both ways, until the sandbox's side has ended."""
    client.endless.set()
    client.want_body()
    await attended(_down(connection, client), _up(connection, client))


async def _down(connection: PortConnection, client: ClientSide) -> None:
    while data := await connection.read():
        await client.write(data)


async def _up(connection: PortConnection, client: ClientSide) -> None:
    """A line that breaks on this way shows itself on the other, after what may still be read there."""
    with contextlib.suppress(SkerryError):
        async for piece in client.pieces():
            await connection.write(piece)
        await connection.write_eof()
