"""The edge between the client's logic and the world.

The logic is written once, as coroutines over the `IO` protocol. `io_async` waits with asyncio. `io_blocking` blocks
inside calls that never suspend, so that `finish` runs a coroutine to its end with one step: the blocking API is the
same code, without a thread and without an event loop.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from skerry.core.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

CONNECT_TIMEOUT = 10.0
"""Seconds to connect, and to get a connection out of the pool."""
STREAM_READ_TIMEOUT = 60.0
"""Seconds of silence after which a stream is held to be broken; servers say `keepalive` every 15 s."""
REQUEST_READ_TIMEOUT = 120.0
CREATE_READ_TIMEOUT = 600.0
"""A cold boot of a large template on a busy machine takes its time."""
WRITE_TIMEOUT = 300.0
"""Seconds for one piece of an upload, not for all of it."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | AsyncIterator[bytes] | None = None
    read_timeout: float = REQUEST_READ_TIMEOUT


class Reply(Protocol):
    """An answer whose head has come. `aclose` must be called; it may be called twice."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises httpx.TransportError where the line breaks."""
        ...

    async def aclose(self) -> None: ...


class Socket(Protocol):
    """A WebSocket. Raises what `websockets` raises."""

    async def send(self, message: str | bytes) -> None: ...
    async def recv(self, timeout: float | None) -> str | bytes:
        """The next message. TimeoutError after `timeout` seconds, with nothing lost."""
        ...

    async def aclose(self) -> None: ...


class IO(Protocol):
    async def open(self, request: Request) -> Reply:
        """Send, and wait for the head of the answer. Raises httpx.TransportError."""
        ...

    async def websocket(self, url: str, headers: Mapping[str, str]) -> Socket: ...
    async def sleep(self, seconds: float) -> None: ...
    async def local(self, function: Callable[[], T]) -> T:
        """Do something short that blocks on this machine, such as reading a piece of a file."""
        ...

    async def notify(self, callback: Callable[[Any], Any], value: Any) -> None:
        """Call a callback of the user's; wait for it if that is possible and it wants it."""
        ...

    async def aclose(self) -> None: ...


def finish(work: Awaitable[T]) -> T:
    """Run what never suspends to its end. Only for work over a blocking IO."""
    step = work.__await__()
    try:
        next(step)
    except StopIteration as end:
        return end.value
    refusal = InvalidRequest("asynchronous iterators and callbacks need the asynchronous client", code="needs_async")
    throw = getattr(step, "throw", None)
    if throw is not None:
        throw(refusal)  # unwinds what is suspended
    raise refusal


class Closing(Protocol):
    async def __aenter__(self) -> Any: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...


C = TypeVar("C", bound=Closing)


class Opening(Generic[C]):
    """Something on its way: `await` it to get it, or use it directly: `async with sandbox.pty() as terminal`."""

    def __init__(self, work: Coroutine[Any, Any, C]) -> None:
        self._work = work
        self._made: C | None = None

    def __await__(self) -> Any:
        return self._work.__await__()

    async def __aenter__(self) -> C:
        self._made = await self._work
        return await self._made.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._made.__aexit__(kind, error, trace) if self._made is not None else None


def opening(function: Callable[P, Coroutine[Any, Any, C]]) -> Callable[P, Opening[C]]:
    """Decorator: what `function` makes can be awaited, or entered with `async with`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Opening[C]:
        return Opening(function(*args, **kwargs))

    return call


class AsyncStream(Generic[T_co]):
    """Values as they come: `async for`. Use it with `async with`, or `aclose` it, unless it is read to its end."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __aiter__(self) -> "AsyncStream[T_co]":
        return self

    async def __anext__(self) -> T_co:
        return await anext(self._source)

    async def __aenter__(self) -> "AsyncStream[T_co]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading and free the connection. May be called twice."""
        await self._source.aclose()
