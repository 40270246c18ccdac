"""From the first bytes of a connection to the name its client says it wants. Pure; nothing is trusted, all is bounded.

Sources: RFC 8446 §4 and §5 (records, ClientHello), RFC 6066 §3 (server name), RFC 9849 (encrypted ClientHello),
RFC 9112 §3 (request line); what an HTTP request says further is `http.RequestGuard`'s.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HELLO_MAX: Final = 16 * 1024
"""Post-quantum key shares make hellos of two kilobytes."""
LINE_MAX: Final = 16 * 1024
"""Of a request line."""

_HANDSHAKE, _CLIENT_HELLO = 22, 1
_RECORD_MAX: Final = 16384
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_HOST_NAME: Final = 0

_METHOD_BYTES: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~")
_METHOD_MAX: Final = 32
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Kind(StrEnum):
    TLS = "tls"
    HTTP = "http"
    HTTP2 = "http2"
    """HTTP/2 without TLS, by prior knowledge."""
    OTHER = "other"


class MoreNeeded(Exception):
    """What came so far is the begin of something that is not judged yet."""


class Malformed(Exception):
    """It begins as a protocol that it then breaks. The text says how."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client showed first."""

    kind: Kind
    name: str | None = None
    """TLS's server name as it came, so neither checked nor lower case. None where none was given."""
    hidden_name: bool = False
    """TLS with an encrypted ClientHello: the true name may be another."""


def sniff(data: bytes) -> Hello:
    """What a connection's first bytes say. Raises MoreNeeded until they say enough, Malformed where they cannot be.

    May be called again with all bytes so far. Never needs more than 32 KiB.
    """
    if not data:
        raise MoreNeeded
    if data[0] == _HANDSHAKE:
        return _tls(data)
    if data[0] in _METHOD_BYTES:
        return _http(data)
    return Hello(Kind.OTHER)


# ---------------------------------------------------------------------------------------------------------------- TLS


class _Reader:
    """Cuts a message into fields; a field that does not fit is Malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Malformed("a ClientHello whose parts are longer than itself")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Reader":
        return _Reader(self.take(self.number(size)))


def _tls(data: bytes) -> Hello:
    message = _handshake(data)
    reader = _Reader(message)
    reader.take(2 + 32)  # legacy version, random
    reader.vector(1)  # session id
    reader.vector(2)  # cipher suites
    reader.vector(1)  # compression methods
    name: str | None = None
    hidden = False
    seen: set[int] = set()
    extensions = reader.vector(2) if reader.left else _Reader(b"")
    while extensions.left:
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind in seen:
            raise Malformed("a ClientHello with the same extension twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(body)
        elif kind == _ENCRYPTED_HELLO:
            hidden = True
    if reader.left:
        raise Malformed("a ClientHello with bytes behind its end")
    return Hello(Kind.TLS, name, hidden_name=hidden)


def _handshake(data: bytes) -> bytes:
    """The ClientHello's body, put together from as many records as it was cut into."""
    message = b""
    at = 0
    while True:
        if len(data) - at < 5:
            _more(data, at)
        if data[at] != _HANDSHAKE or data[at + 1] != 3:
            raise Malformed("a TLS record that is no handshake")
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 0 < size <= _RECORD_MAX:
            raise Malformed("a TLS record of a size that none has")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        if message[:1] not in {b"", bytes([_CLIENT_HELLO])}:
            raise Malformed("a TLS handshake that does not begin with a ClientHello")
        if len(message) >= 4:
            whole = 4 + int.from_bytes(message[1:4], "big")
            if whole > HELLO_MAX:
                raise Malformed(f"a ClientHello of more than {HELLO_MAX} bytes")
            if len(message) >= whole:
                return message[4:whole]
        if at > len(data):
            _more(data, at)


def _more(data: bytes, at: int) -> None:
    if len(data) > 2 * HELLO_MAX or at > 2 * HELLO_MAX:
        raise Malformed(f"a ClientHello of more than {HELLO_MAX} bytes")
    raise MoreNeeded


def _server_name(body: _Reader) -> str:
    names = body.vector(2)
    found: str | None = None
    while names.left:
        kind = names.number(1)
        raw = names.vector(2)
        text = raw.take(raw.left)
        if kind != _HOST_NAME or found is not None:
            raise Malformed("a server name that is not one host name")
        if not text or not text.isascii() or b"\0" in text:
            raise Malformed("a server name that is no host name")
        found = text.decode("ascii")
    if body.left or found is None:
        raise Malformed("a server name that is not one host name")
    return found


# --------------------------------------------------------------------------------------------------------------- HTTP


def _http(data: bytes) -> Hello:
    if data.startswith(_HTTP2[: len(data)]):
        if len(data) < len(_HTTP2):
            raise MoreNeeded
        return Hello(Kind.HTTP2)
    method, space, rest = data[:LINE_MAX].partition(b" ")
    if len(method) > _METHOD_MAX or not set(method) <= _METHOD_BYTES:
        return Hello(Kind.OTHER)
    line, end, _ = rest.partition(b"\n")
    if not end:
        if len(data) >= LINE_MAX:
            return Hello(Kind.OTHER)
        raise MoreNeeded
    if not space or not line.rstrip(b"\r").rpartition(b" ")[2].startswith(b"HTTP/1."):
        return Hello(Kind.OTHER)
    return Hello(Kind.HTTP)
