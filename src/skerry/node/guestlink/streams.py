"""What comes from a guest piece by piece: a process's events, a file's bytes, changes, a port's bytes."""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from skerry.core.errors import InternalError
from skerry.core.models import Exited, FileInfo, Output, ProcessEvent, ProcessInfo, Stream, WatchEvent
from skerry.guest import protocol
from skerry.node.guestlink import parse
from skerry.node.guestlink.channel import Channel

_STREAMS = {protocol.STDOUT: Stream.STDOUT, protocol.STDERR: Stream.STDERR, protocol.PTY: Stream.PTY}
_OFFSET = protocol.OFFSET.size
_NOWHERE: Mapping[Stream, int] = {}


class LinkProcessStream:
    """`contract.ProcessStream` over one connection."""

    def __init__(
        self, channel: Channel, process: ProcessInfo, begins: Mapping[Stream, int] = _NOWHERE, *, follow: bool = True
    ) -> None:
        self._channel = channel
        self._process = process
        self._begins = begins
        self._follow = follow
        self._next: dict[Stream, int] = {}
        self._over = False

    @property
    def process(self) -> ProcessInfo:
        return self._process

    @property
    def begins(self) -> Mapping[Stream, int]:
        return self._begins

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ProcessEvent:
        if self._over:
            raise StopAsyncIteration
        channel = self._channel
        kind, payload = await channel.frame()
        stream = _STREAMS.get(kind)
        if stream is not None:
            if len(payload) <= _OFFSET:
                channel.fail("the guest breaks the protocol: output without bytes")
            offset = protocol.OFFSET.unpack_from(payload)[0]
            self._advance(stream, offset, len(payload) - _OFFSET)
            return Output(stream, offset, payload[_OFFSET:])
        if kind == protocol.EXIT:
            status = channel.parse(parse.exit_status, channel.load(payload))
            self._over = True
            channel.done()
            return Exited(status)
        if kind == protocol.GAP:
            gap = channel.parse(parse.gap, channel.load(payload))
            self._advance(gap.stream, gap.offset, gap.missed)
            return gap
        if kind == protocol.END and not self._follow:
            self._over = True
            channel.done()
            raise StopAsyncIteration
        raise channel.unexpected(kind, payload)

    def _advance(self, stream: Stream, offset: int, size: int) -> None:
        """Streams have no holes but those that a gap names."""
        if offset != self._next.get(stream, offset) or offset + size > protocol.MAX_INT:
            self._channel.fail("the guest breaks the protocol: output out of order")
        self._next[stream] = offset + size

    async def aclose(self) -> None:
        self._channel.close()


class LinkFileDownload:
    """`contract.FileDownload` over one connection."""

    def __init__(self, channel: Channel, info: FileInfo, length: int) -> None:
        self._channel = channel
        self._info = info
        self._length = length
        self._left = length
        self._over = False

    @property
    def info(self) -> FileInfo:
        return self._info

    @property
    def length(self) -> int:
        return self._length

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        channel = self._channel
        kind, payload = await channel.part()
        if kind == protocol.DATA and 0 < len(payload) <= self._left:
            self._left -= len(payload)
            return payload
        if kind == protocol.END and self._left == 0:
            self._over = True
            channel.close()
            raise StopAsyncIteration
        if kind in (protocol.DATA, protocol.END):
            channel.fail("the guest breaks the protocol: not the announced number of bytes")
        raise channel.unexpected(kind, payload)

    async def aclose(self) -> None:
        self._channel.close()


class LinkItems:
    """JSON values that come in ITEMS frames until END. `endless`: an END breaks the protocol."""

    def __init__(self, channel: Channel, *, endless: bool) -> None:
        self._channel = channel
        self._endless = endless
        self._items: deque[Any] = deque()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._over:
                raise StopAsyncIteration
            kind, payload = await self._channel.frame()
            if kind == protocol.ITEMS:
                items = self._channel.load(payload)
                if not isinstance(items, list):
                    self._channel.fail("the guest breaks the protocol: not a list")
                self._items.extend(items)
            elif kind == protocol.END and not self._endless:
                self._over = True
                self._channel.close()
            else:
                raise self._channel.unexpected(kind, payload)
        return self._items.popleft()

    async def aclose(self) -> None:
        self._channel.close()


class LinkWatchStream:
    """`contract.WatchStream` over one connection."""

    def __init__(self, channel: Channel, watch_id: str, offset: int) -> None:
        self._channel = channel
        self._items = LinkItems(channel, endless=True)
        self._next = offset
        self._watch_id = watch_id

    @property
    def watch_id(self) -> str:
        return self._watch_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        event = self._channel.parse(parse.watch_event, await self._items.__anext__())
        if event.offset != self._next:
            self._channel.fail("the guest breaks the protocol: changes out of order")
        self._next += 1
        return event

    async def aclose(self) -> None:
        self._channel.close()


class LinkConnection:
    """`contract.Connection`: after the agent's OK the connection is the port's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._early = channel.take_rest()
        self._writing = asyncio.Lock()

    async def read(self, limit: int = 262_144) -> bytes:
        if limit <= 0:
            raise InternalError("a read of nothing", step="guest_connection_read")
        if self._early:
            data, self._early = self._early[:limit], self._early[limit:]
            return data
        return await self._channel.read(limit)

    async def write(self, data: bytes) -> None:
        async with self._writing:
            await self._channel.send(data)

    async def write_eof(self) -> None:
        async with self._writing:
            self._channel.send_eof()

    async def aclose(self) -> None:
        self._channel.close()
