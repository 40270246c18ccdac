"""Plain HTTP on its way out: every request of a connection must name the host that was looked up.

The bytes pass as they are. A request's head is held until its end has come and was judged, so that the server never
sees a head that names another host: not in the first request, not in one behind it (pipelined, or after a body), not in
what follows an upgrade that the server did not agree to.
"""

from collections.abc import Callable
from typing import Any, Final

import httptools

from skerry.egress.sniff import Malformed

HEAD_MAX: Final = 64 * 1024
"""The bytes held while a head is not whole."""


class RequestGuard:
    """The client's half of one connection.

    `check(host, port)` is called for each request with its authority (host as given, port None where none was) and
    raises to refuse it.
    """

    def __init__(self, check: Callable[[str | None, int | None], None]) -> None:
        self._check = check
        self._held = bytearray()
        self._failure: Exception | None = None
        self._requests = 0
        self.waiting = False
        """An upgrade was asked for: feed nothing more before `answered`."""
        self._raw = False
        self._begin()

    def _begin(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        self._in_head = False
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._hosts: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """What may go on to the server now. Raises what `check` raises, or Malformed."""
        if self._raw:
            return data
        self._held += data
        self._parse(data)
        if self._failure is not None:
            raise self._failure
        if self._in_head:
            self._bound()
            return b""
        passed = bytes(self._held)
        self._held.clear()
        return passed

    def answered(self, status: int) -> None:
        """The server's answer to the request for an upgrade: after 101 the connection is no HTTP any more."""
        self.waiting = False
        if status == 101:
            self._raw = True
        else:
            self._begin()

    def _bound(self) -> None:
        if len(self._held) > HEAD_MAX:
            raise Malformed(f"a request head of more than {HEAD_MAX} bytes")

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if upgrade.args[0] < len(data):
                raise Malformed("bytes behind a request for an upgrade, before its answer") from None
            if self._requests > 1:
                raise Malformed("a request for an upgrade that is not the first of its connection") from None
            self.waiting = True
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._failure = self._failure or (cause if isinstance(cause, Exception) else error)
        except httptools.HttpParserError as error:
            raise Malformed(f"a request that is not HTTP: {error}") from None

    # -------------------------------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        self._in_head = True
        self._requests += 1
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"host":
            self._hosts.append(value)

    def on_headers_complete(self) -> None:
        try:
            self._check(*authority(self._parser.get_method(), self._target, self._hosts))
        except Exception as error:
            self._failure = error
            raise
        self._in_head = False


def authority(method: bytes, target: bytes, hosts: list[bytes]) -> tuple[str | None, int | None]:
    """Host and port that a request is for: the target's in absolute form, else the Host header's (RFC 9112 §3.2, 3.3).

    Raises Malformed where there are several, or they differ, or it is no host, or for CONNECT.
    """
    if method == b"CONNECT":
        raise Malformed("CONNECT, which only a proxy answers")
    if len(hosts) > 1:
        raise Malformed("more than one Host header")
    host = hosts[0].strip() if hosts else b""
    absolute = _of_target(target)
    if absolute is not None and host and absolute.lower() != host.lower():
        raise Malformed("a Host that is not the one of the request's target")
    given = absolute or host
    return _split(given) if given else (None, None)


def _of_target(target: bytes) -> bytes | None:
    scheme, found, rest = target.partition(b"://")
    if target.startswith(b"/") or not found or not scheme.isalpha():
        return None
    place = rest.split(b"/", 1)[0].split(b"?", 1)[0]
    if b"@" in place:
        raise Malformed("a request target with user information")
    return place


def _split(given: bytes) -> tuple[str, int | None]:
    if not given.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in given):
        raise Malformed("a Host that is no host")
    text = given.decode("ascii")
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        return text, None
    if not (port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise Malformed("a Host with a port that is none")
    return host, int(port)
