"""The Connect protocol: connectrpc's own server, and what E2B's clients need beyond it.

- A client that hangs up is noticed at once, not at the next message: its stream ends and lets go of the sandbox.
- What breaks a stream that has begun cuts the connection instead of ending it in order: that is how clients learn that
  the sandbox may be gone, and look.
- gRPC is refused as what it is: connectrpc would serve it, our server has no trailers.
- Errors of ours become Connect's; others say nothing about themselves.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog
from connectrpc.code import Code
from connectrpc.codec import Codec, proto_binary_codec, proto_json_codec
from connectrpc.errors import ConnectError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.api.e2b.envd import errors
from skerry.api.e2b.envd.call import Call, current
from skerry.api.problems import ClientGone
from skerry.api.streams import attended, server_stops
from skerry.core.errors import SkerryError

T = TypeVar("T")

MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""One message of a client."""
_MEDIA: Final = (b"application/json", b"application/proto", b"application/connect+json", b"application/connect+proto")

log = structlog.get_logger("skerry.api")


class Readable:
    """A codec whose messages that cannot be read are the client's fault; connectrpc calls them unknown errors."""

    def __init__(self, codec: Codec[Any, Any]) -> None:
        self._codec = codec

    def name(self) -> str:
        return self._codec.name()

    def encode(self, message: Any) -> bytes:
        return self._codec.encode(message)

    def decode(self, data: bytes | bytearray, message_class: type[T]) -> T:
        try:
            return self._codec.decode(data, message_class)
        except Exception as error:  # whatever the decoder has against it
            raise ConnectError(Code.INVALID_ARGUMENT, f"the message cannot be read: {error}") from error


CODECS: Final = (Readable(proto_binary_codec()), Readable(proto_json_codec()))


class Rpc:
    """One Connect service as an ASGI application. `current` must be set."""

    def __init__(self, app: ASGIApp, stopping: asyncio.Event) -> None:
        self._app = app
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = _Body(receive)
        answering = self._app(scope, body, _Cut(send, current.get()))
        await attended(_whole(answering), body.hung_up(), server_stops(self._stopping))


async def _whole(answering: Awaitable[None]) -> None:
    await answering


def _refusal(scope: Scope) -> errors.wire.Json | None:
    """What connectrpc would answer with a traceback, or not at all."""
    media = b""
    for name, value in scope["headers"]:
        if not (name.isascii() and value.isascii()):
            return errors.answer(400, f"the header {name!r} holds more than ASCII")
        if name == b"content-type":
            media = value.partition(b";")[0].strip().lower()
    if scope["method"] == "POST" and media not in _MEDIA:
        return errors.answer(415, "send application/json, application/proto or application/connect+json|proto")
    return None


class _Body:
    """`receive` for the service. Once the whole request is in, one place listens for the end of the client."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._whole = asyncio.Event()
        self._never = asyncio.Event()

    async def __call__(self) -> Message:
        if self._whole.is_set():
            await self._never.wait()  # whoever waits here is cancelled when the answer is over
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._whole.set()
        return message

    async def hung_up(self) -> None:
        """Raises ClientGone when the client goes away after its request."""
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            continue
        raise ClientGone("the client hung up")


class _Cut:
    """`send` that refuses to end in order what is broken."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call

    async def __call__(self, message: Message) -> None:
        if self._call.broken is not None:
            raise self._call.broken
        await self._send(message)


# -------------------------------------------------------------------------------------------------- for the services


async def told(work: Awaitable[T], timeout_ms: float | None = None) -> T:
    """Do one thing for a client; what goes wrong is told as Connect tells it, at the latest when its time is over."""
    try:
        async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
            return await work
    except SkerryError as error:
        raise errors.to_connect(error) from error
    except TimeoutError:
        raise overdue() from None


def overdue() -> ConnectError:
    return ConnectError(Code.DEADLINE_EXCEEDED, "the deadline that the client has set is over")


async def stream(
    source: AsyncIterator[T], first: Any, each: Callable[[T], AsyncIterator[Any]], alive: Any, timeout_ms: float | None
) -> AsyncIterator[Any]:
    """`first`, then what `each` makes of every item, until the source ends; `alive` after each idle while.

    The source is not closed. An error of ours is told in order, or cuts the connection where that is what it means.
    """
    call = current.get()
    loop = asyncio.get_running_loop()
    due = None if timeout_ms is None else loop.time() + timeout_ms / 1000
    yield first
    idle_since = loop.time()
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(source))
            wake = idle_since + call.keepalive_s
            wait = (wake if due is None else min(wake, due)) - loop.time()
            done, _ = await asyncio.wait({pending}, timeout=max(0.0, wait))
            if done:
                item, pending = pending.result(), None
                async for message in each(item):
                    yield message
                idle_since = loop.time()
            elif due is not None and loop.time() >= due:
                raise overdue()
            elif loop.time() >= wake:
                yield alive
                idle_since = loop.time()
    except StopAsyncIteration:
        return
    except SkerryError as error:
        if errors.breaks(error):
            call.broken = error
        raise errors.to_connect(error) from error
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, SkerryError):
                await pending


async def _next(source: AsyncIterator[T]) -> T:
    return await source.__anext__()
