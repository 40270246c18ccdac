"""Bytes as they come, and the text they are. Pure.

Output arrives cut anywhere, also inside a character. Here nothing depends on where it was cut.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, Final

from skerry.sdk.errors import bad_answer

LINE_MAX: Final = 64 * 1024 * 1024
"""Longest line of NDJSON that is taken, bytes: far above what a server sends."""


def decode(data: bytes, *, whole: bool = True) -> str:
    """UTF-8 with what is not UTF-8 replaced. `whole=False`: a character that was cut at the end is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=whole)


class TextStream:
    """Incremental UTF-8: the texts it gives, joined, are the text of the bytes, joined."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back: the replacement of a character that never got its end."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Capture:
    """One output stream: the first `limit` bytes are kept, all of them are counted."""

    def __init__(self, limit: int, offset: int = 0) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._text = TextStream()
        self.offset = offset
        """Where the next byte stands in the stream, from the process's start."""
        self.truncated = offset > 0

    def feed(self, offset: int, data: bytes) -> tuple[bytes, str]:
        """Take bytes that stand at `offset`; gives what of it is new, as bytes and as text."""
        data = data[max(0, self.offset - offset) :] if offset < self.offset else data
        lead = self.gap(offset) if offset > self.offset else ""
        self.offset += len(data)
        room = self._limit - len(self._kept)
        self._kept += data[: max(0, room)]
        if len(data) > room:
            self.truncated = True
        return data, lead + self._text.feed(data)

    def gap(self, to: int) -> str:
        """The stream goes on at `to`; what lay between is lost."""
        if to > self.offset:
            self.truncated = True
            self.offset = to
            return self._text.flush()
        return ""

    def flush(self) -> str:
        return self._text.flush()

    @property
    def data(self) -> bytes:
        return bytes(self._kept)

    @property
    def text(self) -> str:
        return decode(self.data, whole=False)


class Ndjson:
    """Objects of a stream of lines, wherever it is cut. A line that is no object is an error, never skipped."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        lines = data.split(b"\n")
        for line in lines[:-1]:
            self._rest += line
            whole, self._rest = self._rest, bytearray()
            if whole.strip():
                yield _object(whole)
        self._rest += lines[-1]
        if len(self._rest) > LINE_MAX:
            raise bad_answer(f"a line of more than {LINE_MAX} bytes")

    @property
    def partial(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest.strip())


def _object(line: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise bad_answer("a line of the stream is no JSON object")
    return value
