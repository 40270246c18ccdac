"""Bytes from one socket to another, both ways, as long as both sides want."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final

CHUNK: Final = 256 * 1024

Filter = Callable[[bytes], Awaitable[bytes]]
"""Sees bytes before they pass and returns those that may. Raising ends the connection."""
Pay = Callable[[float], Awaitable[None]]
"""Waits until so many more bytes may pass."""


class Traffic:
    """How much has passed. Both counts grow while the connection lives."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes from the sandbox."""
        self.received = 0
        """Bytes to it."""


class IdleError(Exception):
    """Neither side said anything for too long."""


async def both_ways(
    inner: socket.socket,
    outer: socket.socket,
    traffic: Traffic,
    *,
    idle_s: float,
    outgoing: Filter | None = None,
    incoming: Filter | None = None,
    pay: Pay | None = None,
) -> None:
    """Pass bytes until both sides have ended; a half-close is passed on. Non-blocking sockets; neither is closed.

    Reading waits for writing, so a slow side slows the other. Raises OSError where a side breaks, IdleError after
    `idle_s` without a byte in either direction, and what a filter raises.
    """
    loop = asyncio.get_running_loop()
    quiet_since = loop.time()

    def count(sent: int, received: int) -> None:
        nonlocal quiet_since
        traffic.sent += sent
        traffic.received += received
        quiet_since = loop.time()

    ways = [
        asyncio.ensure_future(_one_way(inner, outer, lambda n: count(n, 0), outgoing, pay)),
        asyncio.ensure_future(_one_way(outer, inner, lambda n: count(0, n), incoming, pay)),
    ]
    pending: set[asyncio.Future[None]] = set(ways)
    try:
        while pending:
            left = quiet_since + idle_s - loop.time()
            if left <= 0:
                raise IdleError("nothing was said for too long")
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
    finally:
        for each in ways:
            each.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _one_way(
    source: socket.socket,
    target: socket.socket,
    count: Callable[[int], None],
    through: Filter | None,
    pay: Pay | None,
) -> None:
    loop = asyncio.get_running_loop()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    while size := await loop.sock_recv_into(source, view):
        count(size)
        if pay is not None:
            await pay(size)
        if through is None:
            await loop.sock_sendall(target, view[:size])
        elif passed := await through(bytes(view[:size])):
            await loop.sock_sendall(target, passed)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    """Close it so that the other side sees a connection that broke, not one that ended."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
