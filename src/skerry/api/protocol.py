"""HTTP below the application: what cannot be read as HTTP is refused as everything else is, heads have a limit, and a
connection can be handed over to the application when it is to change its protocol."""

import secrets
import socket
import struct
from typing import Any, Final

import httptools
import structlog
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from skerry.api import problems, wire
from skerry.api.ports.client import UPGRADE
from skerry.core.errors import InvalidRequest, SkerryError

log = structlog.get_logger("skerry.api")

HEAD_MAX: Final = 64 * 1024
"""Bytes of a request's line and headers. One read of the socket more may come before they are counted."""


class HeadTooLarge(SkerryError):
    code = "headers_too_large"
    status = 431


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with our refusals; with upgrades for an application that has `takes_upgrade(headers, raw_path)`."""

    _in_head = True
    _head = 0
    _raw = False
    """The rest of the connection is bare bytes, for `self.cycle`."""

    def data_received(self, data: bytes) -> None:
        if self._raw:
            self._take(data)
            return
        self._unset_keepalive_if_required()
        self._head += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            self._refuse(cause if isinstance(cause, SkerryError) else _malformed())
        else:
            if self._in_head and self._head > HEAD_MAX:
                self._refuse(HeadTooLarge("the request's headers are too large", allowed=f"{HEAD_MAX} bytes"))

    def _upgrade(self, rest: bytes) -> None:
        if self._raw:
            self._take(rest)
        elif self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self._read_again(rest)

    def _read_again(self, rest: bytes) -> None:
        """Whoever does not want to upgrade reads the request as if it did not ask (the parser would drop its body)."""
        kept = b", ".join(v for n, v in self.headers if n == b"connection" and b"upgrade" not in v.lower())
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        head += [n + b": " + v for n, v in self.headers if n not in {b"upgrade", b"connection", b"http2-settings"}]
        head += [b"connection: " + kept] if kept else []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*head, b"", b""]) + rest)

    def _take(self, data: bytes) -> None:
        if data and not self.cycle.response_complete:
            self.cycle.body += data
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.cycle.message_event.set()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A side of bare bytes may end alone (not under TLS, which asyncio closes whole)."""
        if not self._raw or self.cycle.response_complete or self.scheme == "https":
            return None
        self.cycle.more_body = False
        self.cycle.message_event.set()
        return True

    # --------------------------------------------------------------------------------------------- parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_MAX:
            raise HeadTooLarge("the request's headers are too large", allowed=f"{HEAD_MAX} bytes")
        if self.parser.get_http_version() not in {"1.0", "1.1"} or self.parser.get_method() == b"CONNECT":
            raise _malformed()
        if not self.url.startswith(b"/"):
            self._check_absolute()
        self._raw = self._wants_raw()
        if not self._to_be_read_again():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._to_be_read_again():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        if not self._raw and not self._to_be_read_again():
            super().on_message_complete()

    def _check_absolute(self) -> None:
        """`GET http://HOST/…` is read if it names the host that the header names: else two readers would differ."""
        parsed = httptools.parse_url(self.url)
        named = (parsed.host or b"") + (b":%d" % parsed.port if parsed.port else b"")
        hosts = [value.lower() for name, value in self.headers if name == b"host"]
        if parsed.userinfo or hosts != [named.lower()]:
            raise InvalidRequest("the request's target and its Host differ", code="malformed_http")

    def _wants_raw(self) -> bool:
        takes = getattr(self.app, "takes_upgrade", None)
        if takes is None or self._get_upgrade() is None:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False  # pipelined behind another request: answered as if it did not ask for an upgrade
        names = {name for name, _ in self.headers}
        has_body = b"transfer-encoding" in names or b"content-length" in names
        return not has_body and takes(self.headers, httptools.parse_url(self.url).path or b"/")

    def _to_be_read_again(self) -> bool:
        return self.parser.should_upgrade() and not self._raw and not self._should_upgrade()

    def _should_upgrade(self) -> bool:
        return not self._raw and super()._should_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.cycle is cycle and (self._raw or self.scope["http_version"] == "1.0"):
            cycle = self.cycle = OpenCycle.of(cycle)
            if self._raw:
                cycle.scope["extensions"] = {UPGRADE: {}}
        super()._start_asgi_task(cycle, app)

    # ------------------------------------------------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn's own words are not for a program)
        self._refuse(_malformed())

    def _refuse(self, error: SkerryError) -> None:
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way:
            cycle.disconnected = True  # whatever works on this request is to hear no more of it
            cycle.message_event.set()
        if not (under_way and cycle.response_started) and not self.pipeline:  # else it would stand in an answer
            self.transport.write(refusal(secrets.token_hex(10), error))
        self.transport.close()


class OpenCycle(RequestResponseCycle):
    """A request and its answer where the answer may have no length and no end but the connection's: after an upgrade,
    and to a client of HTTP/1.0, which does not know chunks."""

    _bare = False

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> "OpenCycle":
        made = cls(
            scope=cycle.scope,
            transport=cycle.transport,
            flow=cycle.flow,
            logger=cycle.logger,
            access_logger=cycle.access_logger,
            access_log=cycle.access_log,
            default_headers=cycle.default_headers,
            message_event=cycle.message_event,
            expect_100_continue=cycle.waiting_for_100_continue,
            keep_alive=False,
            on_response=cycle.on_response,
        )
        made.more_body = cycle.more_body
        return made

    async def run_asgi(self, app: Any) -> None:
        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if self._bare and not self.response_complete and not self.disconnected:
                    self._break()

        await super().run_asgi(guarded)

    def _break(self) -> None:
        """Not with an end of file: that would look like a whole answer."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with socket.socket(fileno=socket.dup(sock.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.disconnected = True
        self.transport.abort()

    async def send(self, message: Any) -> None:
        if self._bare:
            await self._send_bare(message)
        elif message["type"] == "http.response.start" and self._is_bare(message):
            await self._begin_bare(message)
        else:
            await super().send(message)

    def _is_bare(self, message: Any) -> bool:
        if message["status"] == 101:
            return True
        names = {name.lower() for name, _ in message.get("headers", ())}
        old = self.scope["http_version"] == "1.0" and self.scope["method"] != "HEAD"
        return old and b"content-length" not in names and message["status"] not in {204, 304}

    async def _begin_bare(self, message: Any) -> None:
        self._bare = self.response_started = True
        self.waiting_for_100_continue = False
        content = [STATUS_LINE[message["status"]]]
        for name, value in [*self.default_headers, *message.get("headers", ())]:
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError("Invalid HTTP header.")
            if message["status"] == 101 or name.lower() != b"connection":
                content += [name, b": ", value, b"\r\n"]
        if message["status"] != 101:
            content.append(b"connection: close\r\n")
        self.transport.write(b"".join([*content, b"\r\n"]))

    async def _send_bare(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if message.get("body"):
            self.transport.write(message["body"])
        if not message.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()


def _malformed() -> InvalidRequest:
    return InvalidRequest("the request is not HTTP/1.1 that can be read", code="malformed_http")


def refusal(request_id: str, error: SkerryError) -> bytes:
    """The whole answer to what is not HTTP, after which the connection ends."""
    log.info("request", request_id=request_id, method="", path="", status=error.status)
    body = wire.dumps(problems.document(error, request_id))
    reason = STATUS_LINE[error.status].decode("ascii").strip()
    head = (
        reason,
        f"content-type: {problems.MEDIA_TYPE}",
        f"content-length: {len(body)}",
        f"x-request-id: {request_id}",
        "connection: close",
    )
    return "\r\n".join((*head, "", body)).encode("ascii")
