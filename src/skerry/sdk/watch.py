"""A watch of a directory, held by the client."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from skerry.core.errors import GuestUnreachable, OutcomeUnknown, SkerryError, Unavailable
from skerry.sdk.client import Call, Connection, stream_events
from skerry.sdk.errors import bad_answer, line_broke
from skerry.sdk.io import STREAM_READ_TIMEOUT, AsyncStream
from skerry.sdk.models import WatchEvent, parse

REATTACH: Final = 6
"""How often in a row a stream that broke is taken up again before that is an error."""
REATTACH_BACKOFF: Final = 0.1
"""Seconds, doubled before each of them: about 13 in all, in which a server may restart."""


class AsyncWatch(AsyncStream[WatchEvent]):
    """Changes as they come. The watch itself goes on in the guest: a stream that breaks is taken up again where it
    broke, and one whose sandbox is paused goes on, with nothing lost, once that is resumed. Closing it ends the watch.
    """

    def __init__(self, connection: Connection, path: str, about: Mapping[str, Any]) -> None:
        super().__init__(self._events())
        self._connection = connection
        self._path = path
        self._about = dict(about)
        self._lines: AsyncGenerator[dict[str, Any], None] | None = None
        self._over = True
        self.watch_id = ""
        self.offset = 0
        """Of the next event."""

    async def open(self, query: Mapping[str, Any]) -> "AsyncWatch":
        """Begin; what happens after this returned is seen."""
        self._lines = await self._began(query)
        self._over = False
        return self

    async def aclose(self) -> None:
        """Stop reading and end the watch. May be called twice."""
        over, self._over = self._over, True
        await self._let_go()
        await super().aclose()
        if not over:  # it would end by itself when nobody has read it for a while
            call = Call("DELETE", self._path, {"watch_id": self.watch_id}, about=self._about)
            with contextlib.suppress(SkerryError):
                await self._connection.send(call)

    # ------------------------------------------------------------------------------------------------------- inside

    async def _began(self, query: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        call = Call("GET", self._path, query, again=True, read_timeout=STREAM_READ_TIMEOUT, about=self._about)
        lines = stream_events(self._connection, call)
        try:
            first = await anext(lines, None)
        except BaseException:
            await lines.aclose()
            raise
        if first is None or first.get("type") != "watching":
            await lines.aclose()
            raise bad_answer("a watch did not begin", **self._about)
        self.watch_id = str(first.get("watch_id", ""))
        return lines

    async def _events(self) -> AsyncGenerator[WatchEvent, None]:
        failures = 0
        while True:
            before = self.offset
            try:
                if self._lines is None:
                    self._lines = await self._began({"watch_id": self.watch_id, "offset": self.offset})
                async for line in self._lines:
                    yield self._next(parse(WatchEvent, line))
                raise line_broke("the watch was ended", **self._about)
            except (OutcomeUnknown, Unavailable, GuestUnreachable):
                await self._let_go()
                failures = 1 if self.offset != before else failures + 1
                if failures > REATTACH:
                    raise
                await self._connection.io.sleep(REATTACH_BACKOFF * 2**failures)
            except SkerryError:
                self._over = True
                raise

    def _next(self, event: WatchEvent) -> WatchEvent:
        if event.offset != self.offset:
            raise bad_answer(f"a watch went from event {self.offset} to {event.offset}", **self._about)
        self.offset += 1
        return event

    async def _let_go(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.aclose()
