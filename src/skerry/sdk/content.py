"""What a caller gives as content, as pieces of bytes."""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, Final, Protocol

from skerry.core.errors import InvalidRequest
from skerry.sdk.io import IO


class Readable(Protocol):
    def read(self, size: int, /) -> Any: ...


PIECE: Final = 256 * 1024
"""Bytes read from a local file at a time."""

Content = str | bytes | bytearray | memoryview | Readable | Iterable[bytes] | AsyncIterable[bytes]


def whole(content: Any) -> bytes | None:
    """Content that is in memory already, as bytes; None for what is to be read piece by piece."""
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError:
            raise InvalidRequest.of("content", "holds half of a surrogate pair; write bytes") from None
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    return None


def body(io: IO, content: Content) -> bytes | AsyncIterator[bytes]:
    """Content as the body of a request."""
    ready = whole(content)
    return ready if ready is not None else _pieces(io, content)


async def _pieces(io: IO, content: Any) -> AsyncIterator[bytes]:
    if hasattr(content, "read"):
        while piece := await io.local(lambda: content.read(PIECE)):
            yield _bytes(piece)
    elif hasattr(content, "__aiter__"):
        async for piece in content:
            yield _bytes(piece)
    elif hasattr(content, "__iter__"):
        for piece in content:
            yield _bytes(piece)
    else:
        raise InvalidRequest.of(
            "content", "cannot be read", given=type(content).__name__, allowed="str, bytes, a file, an iterable"
        )


def _bytes(piece: Any) -> bytes:
    ready = whole(piece)
    if ready is None:
        raise InvalidRequest.of("content", "must give bytes or text", given=type(piece).__name__)
    return ready


def error_text(error: OSError) -> str:
    """A local error in one line."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
