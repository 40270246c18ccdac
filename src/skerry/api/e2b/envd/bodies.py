"""Request bodies of uploads, never held whole: inflated, and taken apart into the files of a form."""

import zlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from skerry.core.errors import InvalidRequest

PIECE_BYTES: Final = 64 * 1024
"""How much of an inflated body is held at a time."""
HEADER_BYTES_MAX: Final = 32 * 1024
"""Of one part of a form: its file's whole path is in it."""
_GZIP: Final = 31  # zlib's window bits for gzip alone


async def body(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes, inflated where it is gzip. Raises InvalidRequest."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in {"", "identity"}:
        source = _chunks(request)
    elif encoding == "gzip":
        source = inflated(_chunks(request))
    else:
        raise InvalidRequest(f"unsupported Content-Encoding: {encoding}; allowed: gzip, identity")
    async for chunk in source:
        yield chunk


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise InvalidRequest("the client hung up before the end of the body", code="upload_aborted") from None


async def inflated(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What gzip members hold, one after the other, in pieces. Raises InvalidRequest for what is not gzip, or ends
    early."""
    inflater = zlib.decompressobj(_GZIP)
    begun = False
    async for chunk in chunks:
        data = chunk
        while data:
            if inflater.eof:
                inflater = zlib.decompressobj(_GZIP)
            begun = True
            try:
                piece = inflater.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise InvalidRequest("error decompressing request body: it is not gzip") from None
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if piece:
                yield piece
    if not begun or not inflater.eof:
        raise InvalidRequest("error decompressing request body: it ends early")


@dataclass
class Part:
    """One part of a form. Its bytes come by iterating over it, once, before the next part is asked for."""

    name: str | None
    filename: str | None
    _form: "Form"

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._form.data()


@dataclass
class _Head:
    name: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    disposition: bytes = b""


class Form:
    """multipart/form-data as it comes."""

    def __init__(self, chunks: AsyncIterator[bytes], content_type: str) -> None:
        """Raises InvalidRequest if the type names no boundary."""
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise InvalidRequest("error parsing multipart form: the Content-Type names no boundary")
        self._chunks = chunks
        self._seen: deque[Part | bytes | None] = deque()
        """Parts, their bytes, and None at the end of each."""
        self._head = _Head()
        self._whole = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_begin,
                    "on_header_field": self._on_field,
                    "on_header_value": self._on_value,
                    "on_header_end": self._on_header,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_end,
                    "on_end": self._on_whole,
                },
                max_header_size=HEADER_BYTES_MAX,
            )
        except ValueError as error:
            raise InvalidRequest(f"error parsing multipart form: {error}") from None

    async def parts(self) -> AsyncIterator[Part]:
        """Each in turn; what is left of one when the next is asked for is skipped. Raises InvalidRequest for what is
        no form, or ends early."""
        while await self._more():
            seen = self._seen.popleft()
            if isinstance(seen, Part):
                yield seen

    async def data(self) -> AsyncIterator[bytes]:
        while await self._more():
            seen = self._seen.popleft()
            if not isinstance(seen, bytes):
                return
            yield seen

    async def _more(self) -> bool:
        """Read until there is something. False at the end of the form."""
        while not self._seen:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                if not self._whole:
                    raise InvalidRequest("error reading form: it ends early")
                return False
            try:
                self._parser.write(chunk)
            except MultipartParseError as error:
                raise InvalidRequest(f"error reading form: {error}") from None
        return True

    # ---------------------------------------------------------------------------------------------- the parser's news

    def _on_begin(self) -> None:
        self._head = _Head()

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._head.name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._head.value += data[start:end]

    def _on_header(self) -> None:
        if self._head.name.lower() == b"content-disposition":
            self._head.disposition = bytes(self._head.value)
        self._head.name.clear()
        self._head.value.clear()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._head.disposition)
        name, filename = (_text(options.get(key)) for key in (b"name", b"filename"))
        self._seen.append(Part(name, filename, self))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if end > start:
            self._seen.append(data[start:end])

    def _on_end(self) -> None:
        self._seen.append(None)

    def _on_whole(self) -> None:
        self._whole = True


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")
