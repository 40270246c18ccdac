"""One connection to the agent: framed, with deadlines, and with an error for every way it can end.

Where a call was not dispatched, the error is GuestUnreachable; where it may have been, OutcomeUnknown. If the sandbox
is known to be over, its own error (Gone) takes their place.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from skerry.core.errors import GuestUnreachable, OutcomeUnknown, SkerryError
from skerry.guest import protocol
from skerry.guest.protocol import ProtocolError
from skerry.node.guestlink.parse import Malformed, refusal

READ_BYTES = 256 * 1024
MATCHED_BUFFER = 256 * 1024
"""Receive buffer of connections that carry a process's output (the agent bounds its side alike), so that what a broken
line loses is still kept in the guest."""
WATCH_BUFFER = 64 * 1024
"""The same for a watch's."""

T = TypeVar("T")
Gone = Callable[[], SkerryError | None]


class Channel:
    """Not for concurrent use by two readers or two writers. `close` may be called at any time and from any task."""

    def __init__(
        self, sock: socket.socket, sandbox_id: str, gone: Gone, closed: Callable[["Channel"], None],
        *, keep: Callable[[socket.socket], None] | None = None, connected: bool = False,
    ) -> None:  # fmt: skip
        """`keep` takes the connection when it is `done` with; None: it is closed then."""
        self._sock = sock
        self._connected = connected
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._sandbox_id = sandbox_id
        self._gone = gone
        self._on_close = closed
        self._decoder = protocol.Decoder(protocol.FROM_GUEST)
        self._left = 0
        """Of a DATA frame that `part` has begun to give out."""
        self._rest = b""
        """What came together with an earlier frame, for `part`."""
        self._broken: SkerryError | None = None
        self._ended = False
        self._aborted = False
        self._waiting = 0
        self.dispatched = False
        """The agent may have begun to act."""
        self.safe = False
        """What was asked changes nothing: an unknown outcome may be asked for again."""

    # ------------------------------------------------------------------------------------------------------- opening

    async def call(self, hello: dict[str, Any], request: dict[str, Any], address: tuple[str, int]) -> None:
        """Connect and send the request. Raises GuestUnreachable where nothing can have reached the agent."""
        data = protocol.request_frames(hello, request)
        if self._connected:
            await self.send(data)
            return
        self._waiting += 1
        try:
            await self._loop.sock_connect(self._sock, address)
        except OSError as e:
            self.fail(f"cannot connect: {e.strerror or e}")
        finally:
            self._done_waiting()
        await self.send(data)

    # ------------------------------------------------------------------------------------------------------- reading

    async def frame(self) -> tuple[int, bytes]:
        """The next frame. Raises as the class says where the line ends or carries nonsense."""
        while True:
            try:
                got = self._decoder.next()
            except ProtocolError as e:
                self.fail(f"the guest breaks the protocol: {e}")
            if got is not None:
                return got
            data = await self.read(READ_BYTES)
            if not data:
                self.fail("the guest closed the connection")
            self._decoder.feed(data)

    async def part(self) -> tuple[int, bytes]:
        """The next frame; a DATA frame comes in as many parts as its bytes do."""
        if self._left == 0:
            head = b""
            while len(head) < protocol.HEADER.size:
                head += await self._some(protocol.HEADER.size - len(head))
            size, kind = protocol.HEADER.unpack(head)
            if kind != protocol.DATA or not 0 < size <= protocol.MAX_PAYLOAD:
                self._decoder.feed(head + self._rest)
                self._rest = b""
                return await self.frame()
            self._left = size
        data = await self._some(self._left)
        self._left -= len(data)
        return protocol.DATA, data

    async def _some(self, limit: int) -> bytes:
        """At least a byte."""
        if self._decoder.buffered:
            self._rest = self._decoder.take_rest()
        if self._rest:
            data, self._rest = self._rest[:limit], self._rest[limit:]
        else:
            data = await self.read(min(limit, READ_BYTES))
        if not data:
            self.fail("the guest closed the connection")
        return data

    async def expect(self, kind: int) -> Any:
        """The next frame's JSON; it must be of this kind. An ERROR frame is raised as what it says."""
        got, payload = await self.frame()
        if got == kind:
            return self.load(payload)
        raise self.unexpected(got, payload)

    def unexpected(self, kind: int, payload: bytes) -> SkerryError:
        """To be raised: what an ERROR frame says; any other frame here breaks the protocol. Ends the connection."""
        if kind == protocol.ERROR:
            said = self.load(payload)
            self.close()
            return self.parse(refusal, said)
        self.close()
        return self.failure(f"the guest breaks the protocol: frame kind {kind} is not expected here")

    def load(self, payload: bytes) -> Any:
        try:
            return protocol.load(payload)
        except ProtocolError as e:
            self.fail(f"the guest breaks the protocol: {e}")

    def parse(self, parser: Callable[..., T], *args: Any) -> T:
        """Run a parser of `parse` over something the guest said."""
        try:
            return parser(*args)
        except Malformed as e:
            self.fail(f"the guest breaks the protocol: {e}")

    def take_rest(self) -> bytes:
        return self._decoder.take_rest()

    async def read(self, limit: int) -> bytes:
        """Raw bytes; b"" at the end."""
        if self._ended:
            self.fail("the connection is closed")
        self._waiting += 1
        try:
            data = await self._loop.sock_recv(self._sock, limit)
        except OSError as e:
            self.fail(f"the line to the guest broke: {e.strerror or e}")
        finally:
            self._done_waiting()
        if not data and self._aborted:
            self.fail("the line to the guest was ended")  # our own shutdown reads like the guest's end, and is none
        return data

    # ------------------------------------------------------------------------------------------------------- writing

    async def send(self, data: bytes | memoryview) -> None:
        if self._ended:
            self.fail("the connection is closed")
        self.dispatched = True
        self._waiting += 1
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as e:
            self.fail(f"the line to the guest broke: {e.strerror or e}")
        finally:
            self._done_waiting()

    async def send_data(self, data: bytes) -> None:
        """Bytes as DATA frames."""
        view = memoryview(data)
        for at in range(0, len(view), protocol.MAX_PAYLOAD):
            part = view[at : at + protocol.MAX_PAYLOAD]
            await self._send_both(protocol.HEADER.pack(len(part), protocol.DATA), part)

    async def _send_both(self, head: bytes, part: memoryview) -> None:
        """One after the other, without copying them together where the socket takes both at once."""
        if self._ended:
            self.fail("the connection is closed")
        self.dispatched = True
        try:
            sent = self._sock.sendmsg([head, part])
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self.fail(f"the line to the guest broke: {e.strerror or e}")
        if sent < len(head):
            await self.send(head[sent:])
            sent = len(head)
        if sent < len(head) + len(part):
            await self.send(part[sent - len(head) :])

    def send_eof(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as e:
            self.fail(f"the line to the guest broke: {e.strerror or e}")

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, why: str) -> NoReturn:
        """Raise the error for a line that ended too early."""
        self.close()
        raise self.failure(why)

    def failure(self, why: str) -> SkerryError:
        over = self._broken or self._gone()
        if over is not None:
            return over
        if not self.dispatched:
            return GuestUnreachable(f"sandbox {self._sandbox_id}: {why}", sandbox_id=self._sandbox_id)
        retry = "safe" if self.safe else None
        return OutcomeUnknown(f"sandbox {self._sandbox_id}: {why}", sandbox_id=self._sandbox_id, retry=retry)

    def abort(self, error: SkerryError | None) -> None:
        """End it from outside: whoever waits on it gets `error`, or what a broken line gives."""
        self._broken = self._broken or error
        self._aborted = True
        try:
            # Not close: a task that waits for this socket is woken by the shutdown, and then closes it.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def done(self) -> None:
        """The operation's last frame has been read: the connection can carry another."""
        if self._keep is None or self._waiting or self._broken or self._decoder.buffered:
            self.close()
        elif not self._ended:
            self._ended = True
            self._on_close(self)
            self._keep(self._sock)

    def close(self) -> None:
        """Idempotent. A task that still waits on it gets the error of a broken line."""
        if self._ended:
            return
        self._ended = True
        self._on_close(self)
        if self._waiting:
            self.abort(None)
        else:
            self._sock.close()

    def _done_waiting(self) -> None:
        self._waiting -= 1
        if self._ended and not self._waiting:
            self._sock.close()


def prepare(sock: socket.socket) -> None:
    """Small frames at once; a guest that has vanished is noticed after a minute and a half."""
    sock.settimeout(0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000)
