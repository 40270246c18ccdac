"""The wire protocol between a host and the agent in its guest. Pure: bytes in, frames out; no sockets.

One TCP connection carries one operation. A frame is

    length  4 bytes, big endian: bytes of payload, at most MAX_PAYLOAD
    kind    1 byte
    payload JSON (ASCII, an object or an array) or raw bytes, as the kind says

The host opens with HELLO (who speaks) and REQUEST (what is wanted; a long one is cut into PART frames that precede it);
the agent answers OK or ERROR, and what follows depends on the operation (docs/reference/guest-protocol.md).
Either side may be hostile to the other: a frame that is too long, of an unknown kind or not the JSON it should be
raises ProtocolError, and a decoder never holds more than one frame and one read.
"""

import json
from struct import Struct
from typing import Any, Final

VERSION: Final = 1
PORT: Final = 1024
GUEST_ADDRESS: Final = "169.254.0.2"
HOST_ADDRESS: Final = "169.254.0.1"

MAX_PAYLOAD: Final = 256 * 1024
MAX_HELLO: Final = 4096
MAX_REQUEST: Final = 20 * 1024 * 1024
"""All parts of one request: 2 MiB of argv and 1 MiB of environment, each byte escaped at worst."""

HELLO: Final = 1
PART: Final = 2
REQUEST: Final = 3
OK: Final = 4
ERROR: Final = 5
DATA: Final = 6
END: Final = 7
STDOUT: Final = 8
STDERR: Final = 9
PTY: Final = 10
GAP: Final = 11
EXIT: Final = 12
ITEMS: Final = 13

FROM_HOST: Final = frozenset({HELLO, PART, REQUEST, DATA, END})
FROM_GUEST: Final = frozenset({OK, ERROR, DATA, END, STDOUT, STDERR, PTY, GAP, EXIT, ITEMS})

HEADER: Final = Struct(">IB")
OFFSET: Final = Struct(">Q")
"""What precedes the bytes in STDOUT, STDERR and PTY: how many bytes of the stream came before them."""

MAX_INT: Final = 2**63 - 1


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def frame(kind: int, payload: bytes) -> bytes:
    """One frame. The payload must fit; use `frames` for what may not."""
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError(f"a frame of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    return HEADER.pack(len(payload), kind) + payload


# The encoder's and the decoder's compiled halves: what `json.dumps` and `json.loads` put around them is made anew for
# each call and costs more than most of our values do.
_encoder: Any = json.encoder
_as_usual: Any = json.JSONEncoder().default
_indent, _sort_keys, _skip_keys, _allow_nan = None, False, False, False
_encode = _encoder.c_make_encoder(
    None, _as_usual, _encoder.encode_basestring_ascii, _indent, ":", ",", _sort_keys, _skip_keys, _allow_nan
)


def dump(value: Any) -> bytes:
    """JSON as it travels: ASCII, so that names that are not UTF-8 pass as lone surrogates."""
    return "".join(_encode(value, 0)).encode("ascii")


def _refuse_constant(name: str) -> Any:
    raise ProtocolError(f"{name} is not JSON")


_decoder: Any = json.JSONDecoder(parse_constant=_refuse_constant)
_scan = _decoder.scan_once


def load(payload: bytes) -> Any:
    """JSON from the other side, nothing around it. Raises ProtocolError for anything else, however deep or odd."""
    try:
        text = payload.decode("ascii")
        value, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration) as e:
        raise ProtocolError(f"not JSON: {type(e).__name__}") from None
    if end != len(text):
        raise ProtocolError("not JSON: more than one value")
    return value


def load_object(payload: bytes) -> dict[str, Any]:
    value = load(payload)
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object")
    return value


def request_frames(hello: dict[str, Any], request: dict[str, Any]) -> bytes:
    """HELLO and REQUEST, the latter cut into parts where it is long."""
    body = dump(request)
    if len(body) > MAX_REQUEST:
        raise ProtocolError(f"a request of {len(body)} bytes is over the limit of {MAX_REQUEST}")
    out = [frame(HELLO, dump(hello))]
    at = 0
    while len(body) - at > MAX_PAYLOAD:
        out.append(frame(PART, body[at : at + MAX_PAYLOAD]))
        at += MAX_PAYLOAD
    out.append(frame(REQUEST, body[at:]))
    return b"".join(out)


class Decoder:
    """Bytes in any portions in, frames out.

    `allowed` are the kinds this side takes. After a ProtocolError the decoder is of no further use: the stream has
    no more frame boundaries.
    """

    __slots__ = ("_allowed", "_buffer", "_head")

    def __init__(self, allowed: frozenset[int]) -> None:
        self._allowed = allowed
        self._buffer = bytearray()
        self._head: tuple[int, int] | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    @property
    def buffered(self) -> int:
        """Bytes taken in and not yet given out."""
        return len(self._buffer)

    def take_rest(self) -> bytes:
        """What was taken in beyond the frames given out; the decoder is empty after it. Between two frames only."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._head = None
        return rest

    def next(self) -> tuple[int, bytes] | None:
        """The next whole frame as (kind, payload), or None until more bytes have come."""
        buffer = self._buffer
        if self._head is None:
            if len(buffer) < 5:
                return None
            length, kind = HEADER.unpack_from(buffer)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_PAYLOAD}")
            if kind not in self._allowed:
                raise ProtocolError(f"frame kind {kind} is not expected here")
            self._head = (length, kind)
        length, kind = self._head
        if len(buffer) < 5 + length:
            return None
        payload = bytes(memoryview(buffer)[5 : 5 + length])
        del buffer[: 5 + length]
        self._head = None
        return kind, payload
