"""What the two sides of one connection say, as far as it has to agree with the name that was looked up."""

import asyncio
import re
import socket
from typing import Final

from skerry.core.policy import parse_name
from skerry.egress.http import RequestGuard
from skerry.egress.sniff import Hello, Kind, Malformed, MoreNeeded, sniff

FIRST_BYTE_S: Final = 120.0
"""How long a client may take to say what it wants, where it has to speak first."""
HEAD_S: Final = 30.0
"""How long a begun ClientHello or request head may take to be whole."""
CHUNK: Final = 64 * 1024
ANSWER_MAX: Final = 64 * 1024
EXPLAIN_S: Final = 2.0

CLIENT_FIRST: Final = {80: Kind.HTTP, 443: Kind.TLS}
"""What is spoken on these ports, and nothing else."""

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})[ \r\n]")
_ACCESS_DENIED, _INTERNAL_ERROR = 49, 80


class Disagreement(Exception):
    """The client says one thing and has looked up another. The text names both."""


async def first_words(sock: socket.socket) -> bytes:
    """What a client that has to speak first says first; empty where it leaves without a word.

    Raises TimeoutError, OSError.
    """
    async with asyncio.timeout(FIRST_BYTE_S):
        return await asyncio.get_running_loop().sock_recv(sock, CHUNK)


class Words:
    """Filters for the two ways of a connection to `name`:`port`. Give `outgoing` everything from the first byte on.

    Both raise Disagreement or Malformed.
    """

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._begin: bytes | None = b""
        """What came so far, until it is clear what is spoken."""
        self._guard: RequestGuard | None = None
        self._answer: bytearray | None = None
        """The server's answer to a request for an upgrade, as far as it came."""
        self._answered = asyncio.Event()
        self.kind = Kind.OTHER

    def judge(self, hello: Hello) -> None:
        self.kind = hello.kind
        required = CLIENT_FIRST.get(self._port)
        if required is not None and hello.kind is not required:
            raise Disagreement(f"port {self._port} is for {required.value}, and this is {hello.kind.value}")
        if hello.kind is Kind.HTTP2:
            raise Disagreement("HTTP/2 without TLS cannot be judged request by request")
        if hello.kind is Kind.TLS:
            if hello.hidden_name:
                raise Disagreement("an encrypted ClientHello hides the name it is for")
            self._same(hello.name, "SNI")
        elif hello.kind is Kind.HTTP:
            self._guard = RequestGuard(self._check_request)

    def _check_request(self, host: str | None, port: int | None) -> None:
        self._same(host, "Host")
        if port is not None and port != self._port:
            raise Disagreement(f"Host names port {port}, and the connection is to {self._port}")

    def _same(self, given: str | None, where: str) -> None:
        if given is None:
            raise Disagreement(f"no {where} says that it is for {self._name}")
        if parse_name(given) != self._name:
            raise Disagreement(f"{where} is {given[:255]}, and what was looked up is {self._name}")

    async def outgoing(self, data: bytes) -> bytes:
        if self._begin is not None:
            self._begin += data
            try:
                hello = sniff(self._begin)
            except MoreNeeded:
                return b""
            data, self._begin = self._begin, None
            self.judge(hello)
        if self._guard is None:
            return data
        if self._guard.waiting:
            await self._answered.wait()
        passed = self._guard.feed(data)
        if self._guard.waiting and self._answer is None:
            self._answer = bytearray()
        return passed

    async def incoming(self, data: bytes) -> bytes:
        if self._guard is not None and self._answer is not None and self._guard.waiting:
            self._answer += data
            self._read_answer(self._guard, self._answer)
        return data

    def _read_answer(self, guard: RequestGuard, answer: bytearray) -> None:
        """Whether the server agreed to the upgrade; interim answers before that are passed over."""
        while len(answer) >= 13:
            status = _STATUS.match(answer)
            if status is None:
                raise Malformed("an answer to a request for an upgrade that is not HTTP")
            code = int(status[1])
            if code >= 200 or code == 101:
                guard.answered(code)
                self._answered.set()
                return
            head, end, _ = bytes(answer).partition(b"\r\n\r\n")
            if not end:
                break
            del answer[: len(head) + 4]
        if len(answer) > ANSWER_MAX:
            raise Malformed(f"an answer with a head of more than {ANSWER_MAX} bytes")


async def explain(sock: socket.socket, kind: Kind, status: int, text: str) -> bool:
    """Tell a client why its connection ends, in what it speaks: 403 or 502 and the reason, or a TLS alert.

    False where it speaks neither. Raises OSError, TimeoutError.
    """
    if kind is Kind.HTTP:
        reason = {403: "Forbidden", 502: "Bad Gateway"}[status]
        body = f"{text}\n".encode("ascii", "replace")
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        data = f"{head}Connection: close\r\n\r\n".encode("ascii") + body
    elif kind is Kind.TLS:
        # RFC 8446 §6: an alert record of two bytes, fatal.
        data = bytes([21, 3, 3, 0, 2, 2, _ACCESS_DENIED if status == 403 else _INTERNAL_ERROR])
    else:
        return False
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(EXPLAIN_S):
        await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(sock, CHUNK):  # bytes left unread would turn the close into a reset
            pass
    return True
