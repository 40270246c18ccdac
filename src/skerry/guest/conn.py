"""One connection from the host, as the agent sees it: blocking, framed."""

import _socket
import socket
from typing import Any

from skerry.guest import protocol
from skerry.guest.errors import GuestError
from skerry.guest.protocol import ProtocolError

_FIRST = 16 * 1024
"""What is read at first: most requests whole, without a large buffer for it."""


class HostGone(Exception):
    """The host closed the connection, or it broke. Whoever serves it stops; there is nobody to tell."""


class Conn:
    """Frames over a blocking socket. One operation after the other may use it."""

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self._decoder = protocol.Decoder(protocol.FROM_HOST)
        self._request: bytes | None = None
        self._patient = False
        self._bounded = False

    def recv(self) -> tuple[int, bytes]:
        """The next frame. Raises HostGone at the end of the stream, ProtocolError for what is no frame."""
        while True:
            got = self._decoder.next()
            if got is not None:
                return got
            self.fill()

    def try_recv(self) -> tuple[int, bytes] | None:
        """The next frame if it is here already."""
        return self._decoder.next()

    def fill(self) -> None:
        """Take in what comes next; blocks until something does."""
        self._decoder.feed(self._read(protocol.MAX_PAYLOAD))

    def _read(self, limit: int) -> bytes:
        try:
            data = self.sock.recv(limit)
        except OSError as e:
            raise HostGone(str(e)) from None
        if not data:
            raise HostGone("end of stream")
        return data

    def take_rest(self) -> bytes:
        """Raw bytes that came with the request, where the connection stops being framed after it."""
        return self._decoder.take_rest()

    def body(self) -> "Body":
        """The bytes of an upload, which come after the request."""
        return Body(self.sock, self._decoder.take_rest())

    def recv_hello(self) -> dict[str, Any]:
        """The begin of the next operation. HELLO and REQUEST mostly come in one piece, which is taken apart at once."""
        if self._decoder.buffered == 0:
            data = self._read(_FIRST)
            if len(data) > 10:
                size, kind = protocol.HEADER.unpack_from(data)
                rest = 5 + size
                if kind == protocol.HELLO and size <= protocol.MAX_HELLO and rest + 5 <= len(data):
                    more, kind = protocol.HEADER.unpack_from(data, rest)
                    if kind == protocol.REQUEST and rest + 5 + more == len(data):
                        self._request = data[rest + 5 :]
                        return protocol.load_object(data[5:rest])
            self._decoder.feed(data)
        kind, payload = self.recv()
        if kind != protocol.HELLO or len(payload) > protocol.MAX_HELLO:
            raise ProtocolError("a connection opens with HELLO")
        return protocol.load_object(payload)

    def recv_request(self) -> dict[str, Any]:
        if self._request is not None:
            payload, self._request = self._request, None
            return protocol.load_object(payload)
        parts: list[bytes] = []
        size = 0
        while True:
            kind, payload = self.recv()
            if kind not in (protocol.PART, protocol.REQUEST):
                raise ProtocolError("a request is PART frames and REQUEST")
            size += len(payload)
            if size > protocol.MAX_REQUEST:
                raise ProtocolError("the request is too long")
            parts.append(payload)
            if kind == protocol.REQUEST:
                return protocol.load_object(parts[0] if len(parts) == 1 else b"".join(parts))

    def wait_without_limit(self) -> None:
        """From here on the host may take its time (the handshake had to come soon)."""
        if not self._patient:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 16)
            self._patient = True

    def bound(self, size: int) -> None:
        """Let no more than this many bytes be under way to the host."""
        if not self._bounded:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            self._bounded = True

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as e:
            raise HostGone(str(e)) from None

    def send_frame(self, kind: int, payload: bytes) -> None:
        self.send(protocol.frame(kind, payload))

    def ok(self, value: dict[str, Any] | None = None) -> None:
        self.send_frame(protocol.OK, protocol.dump(value or {}))

    def error(self, error: GuestError) -> None:
        self.send_frame(protocol.ERROR, protocol.dump(error.as_dict()))


class Body:
    """The bytes of DATA frames until END, put where the caller wants them. Raises as Conn does."""

    def __init__(self, sock: _socket.socket, begun: bytes) -> None:
        self._sock = sock
        self._begun = memoryview(begun)
        """What came in together with the request."""
        self._left = 0
        self._over = False

    def read_into(self, view: memoryview) -> int:
        """Fill the view; less than that only at the end of the body. Returns how many bytes."""
        filled = 0
        while filled < len(view) and not self._over:
            if self._left == 0:
                self._next_frame()
                continue
            got = self._take(view[filled : filled + self._left])
            filled += got
            self._left -= got
        return filled

    def _next_frame(self) -> None:
        header = bytearray(protocol.HEADER.size)
        self._fill(memoryview(header))
        size, kind = protocol.HEADER.unpack(header)
        if kind not in (protocol.DATA, protocol.END) or size > protocol.MAX_PAYLOAD:
            raise ProtocolError("an upload is DATA frames and END")
        if kind == protocol.DATA:
            self._left = size
            return
        self._fill(memoryview(bytearray(size)))  # what is left unread would break the line before the answer is heard
        self._over = True

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            filled += self._take(view[filled:])

    def _take(self, view: memoryview) -> int:
        if self._begun:
            part = self._begun[: len(view)]
            view[: len(part)] = part
            self._begun = self._begun[len(part) :]
            return len(part)
        try:
            got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        except OSError as e:
            raise HostGone(str(e)) from None
        if got == 0:
            raise HostGone("end of stream before END")
        return got


class ItemSender:
    """Sends many small JSON values in frames of a good size."""

    _FLUSH_AT = 32 * 1024

    def __init__(self, conn: Conn) -> None:
        self._conn = conn
        self._items: list[bytes] = []
        self._size = 0

    def add(self, item: dict[str, Any]) -> None:
        data = protocol.dump(item)
        if self._size + len(data) + len(self._items) + 2 > protocol.MAX_PAYLOAD:
            self.flush()
        self._items.append(data)
        self._size += len(data)
        if self._size >= self._FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        if self._items:
            self._conn.send_frame(protocol.ITEMS, b"[" + b",".join(self._items) + b"]")
            self._items, self._size = [], 0
