"""A connection to a port of the guest, made from inside: servers that listen on the loopback only are reached too."""

import _socket
import _thread
import socket
import struct
from typing import Any

from skerry.guest import args, protocol
from skerry.guest.conn import Conn, HostGone
from skerry.guest.errors import GuestError

_ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, protocol.GUEST_ADDRESS))
_CONNECT_S = 20
"""Nobody listens: that is known at once. This is for a server whose queue is full, and shorter than the host waits."""
_CHUNK = 128 * 1024


def connect_port(conn: Conn, request: dict[str, Any]) -> None:
    """Answer OK once the port has; from then on the connection is the port's bytes, without frames."""
    port = args.integer(request, "port", 1, 65535)
    there = None if port == protocol.PORT else _open(port)
    if there is None:
        raise GuestError("Conflict", "port_not_open", f"nothing listens on port {port}", port=port)
    with there:
        conn.wait_without_limit()
        conn.ok()
        early = conn.take_rest()
        if early:
            there.sendall(early)
        _splice(conn.sock, there)


def _open(port: int) -> socket.socket | None:
    for family, address in _ADDRESSES:
        s = socket.socket(family, socket.SOCK_STREAM)
        try:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Bounds connect and nothing else: cleared below.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            s.connect((address, port))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(16))
            # A port of the ephemeral range can meet itself: nobody listens there.
            if s.getsockname() != s.getpeername():
                return s
        except BlockingIOError:
            s.close()
            raise GuestError(
                "Unavailable", "guest_busy", f"what listens on port {port} accepts no connections now", port=port
            ) from None
        except OSError:
            pass
        s.close()
    return None


def _splice(host: _socket.socket, there: socket.socket) -> None:
    """Both ways until both have ended; a half-close is passed on, and a reset as a reset."""
    back = _thread.allocate_lock()
    back.acquire()
    try:
        _thread.start_new_thread(_return_way, (there, host, back))
    except RuntimeError:
        raise HostGone("no thread for the way back") from None
    if not _pass_on(host, there):
        _break(host, there)
    back.acquire()


def _return_way(there: socket.socket, host: _socket.socket, done: Any) -> None:
    try:
        if not _pass_on(there, host):
            _break(host, there)
    finally:
        done.release()


def _pass_on(source: _socket.socket, target: _socket.socket) -> bool:
    """False where either side broke."""
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        while True:
            got = source.recv_into(buffer)
            if got == 0:
                target.shutdown(socket.SHUT_WR)
                return True
            target.sendall(view[:got])
    except OSError:
        return False


def _break(host: _socket.socket, there: socket.socket) -> None:
    """Wake whoever waits on either, and let both be reset when they are closed. The host's is not shut for writing:
    that would tell it of an orderly end."""
    for s, how in ((host, socket.SHUT_RD), (there, socket.SHUT_RDWR)):
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.shutdown(how)
        except OSError:
            continue
