"""The relay of one sandbox: takes its TCP connections, judges each by the name that was looked up, and carries it.

What a client writes (SNI, Host) must agree with that name; it never decides where a connection goes. On ports 80 and
443 the client has to speak first, HTTP and TLS; elsewhere the server may speak first, and what turns out to be HTTP or
TLS is held to the same. A connection to a bare address goes by rules for addresses, and nobody's words are judged.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

from skerry.core.errors import Forbidden, SkerryError
from skerry.core.netaddr import Address
from skerry.core.policy import Policy, Verdict
from skerry.egress.names import NETWORK, NameTable
from skerry.egress.pump import IdleError, Traffic, both_ways, reset
from skerry.egress.rate import Bucket, Pace
from skerry.egress.sniff import Malformed
from skerry.egress.upstream import Upstream
from skerry.egress.words import CHUNK, CLIENT_FIRST, HEAD_S, Disagreement, Words, explain, first_words

SO_ORIGINAL_DST: Final = 80


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 1000
    """At a time."""
    connections_per_s: int = 1000
    """New ones, on average; so many at once too, and so no fewer than may be open. 0: unbounded."""
    bytes_per_s: int = 0
    """Of all connections together, both ways. 0: unbounded."""
    idle_s: float = 3600.0
    """How long a connection may be silent."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection, for the record: told once, when it was refused or has ended."""

    name: str | None
    """None: it was to a bare address."""
    address: Address | None
    """Where it went, or, of a bare address, was to go."""
    port: int
    verdict: Verdict
    sent: int
    """Bytes from the sandbox."""
    received: int
    duration_ms: float
    error: str | None = None
    """How it failed or broke."""


@dataclass(slots=True, eq=False)
class _Flow:
    inner: socket.socket
    wanted: IPv4Address
    port: int
    name: str | None
    since: float = field(default_factory=time.monotonic)
    traffic: Traffic = field(default_factory=Traffic)
    outer: socket.socket | None = None
    real: Address | None = None
    words: Words | None = None
    orderly: bool = False
    """Both sides ended, or the client was told why: no reset."""
    cut: Verdict | None = None
    """A new policy forbids it."""


def destination(sock: socket.socket) -> tuple[IPv4Address, int]:
    """Where a connection that the kernel redirected to us was to go."""
    port, address = struct.unpack("!2xH4s8x", sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    return IPv4Address(address), port


class Relay:
    """`policy` is asked anew for each connection; `record` is told of each, once."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        table: NameTable,
        upstream: Upstream,
        record: Callable[[Connection], None],
        limits: Limits | None = None,
    ) -> None:
        self._policy = policy
        self._table = table
        self._upstream = upstream
        self._record = record
        self._limits = limits or Limits()
        self._new = Bucket(self._limits.connections_per_s) if self._limits.connections_per_s else None
        self._pace = Pace(self._limits.bytes_per_s) if self._limits.bytes_per_s else None
        self._flows: dict[asyncio.Task[None], _Flow] = {}

    @property
    def connections(self) -> int:
        return len(self._flows)

    def take(self, inner: socket.socket, wanted: IPv4Address, port: int) -> None:
        """Carry an accepted, non-blocking connection that was to go there. It is the relay's from now on."""
        flow = _Flow(inner, wanted, port, self._table.name(wanted))
        if (beyond := self._beyond()) is not None:
            self._end(flow, Verdict(allowed=False, rule=beyond), None)
            return
        task = asyncio.create_task(self._carry(flow), name="egress")
        self._flows[task] = flow
        task.add_done_callback(lambda done: self._flows.pop(done, None))

    def _beyond(self) -> str | None:
        """Which limit one more connection would break."""
        if len(self._flows) >= self._limits.connections:
            return f"more than {self._limits.connections} connections at a time"
        if self._new is not None and not self._new.take():
            return f"more than {self._limits.connections_per_s} connections in a second"
        return None

    def judge_again(self) -> int:
        """After a change of the policy: cut what it forbids now. Returns how many connections that were."""
        cut = 0
        for task, flow in list(self._flows.items()):
            verdict = self._verdict(flow)
            if not verdict.allowed:
                flow.cut = verdict
                task.cancel()
                cut += 1
        return cut

    async def aclose(self) -> None:
        """Break every connection."""
        tasks = list(self._flows)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ one connection

    async def _carry(self, flow: _Flow) -> None:
        verdict = self._verdict(flow)
        error: str | None = None
        try:
            if verdict.allowed:
                await self._connect_and_pass(flow, verdict)
        except (Disagreement, Malformed, Forbidden) as refusal:
            verdict = Verdict(allowed=False, rule=str(refusal))
            await self._explain(flow, 403, verdict.rule)
        except SkerryError as failure:
            error = str(failure)
            await self._explain(flow, 502, error)
        except (OSError, IdleError, TimeoutError) as failure:
            error = str(failure) or type(failure).__name__
        except asyncio.CancelledError:
            verdict, error = (flow.cut, None) if flow.cut is not None else (verdict, "the sandbox's network ended")
        finally:
            self._end(flow, verdict, error)

    def _verdict(self, flow: _Flow) -> Verdict:
        if flow.name is not None:
            return self._policy().connect(flow.name, flow.port, flow.real)
        if flow.wanted in NETWORK:
            return Verdict(allowed=False, rule="no name that was looked up has this address")
        return self._policy().connect_address(flow.wanted, flow.port)

    async def _connect_and_pass(self, flow: _Flow, verdict: Verdict) -> None:
        first = b""
        if flow.name is not None:
            flow.words = Words(flow.name, flow.port)
            if flow.port in CLIENT_FIRST:
                first = await self._hear(flow, flow.words)
                if not first:
                    return
        await self._connect(flow, verdict)
        assert flow.outer is not None  # noqa: S101 - it is connected now
        if first:
            flow.traffic.sent += len(first)
            await asyncio.get_running_loop().sock_sendall(flow.outer, first)
        await both_ways(
            flow.inner,
            flow.outer,
            flow.traffic,
            idle_s=self._limits.idle_s,
            outgoing=flow.words.outgoing if flow.words is not None else None,
            incoming=flow.words.incoming if flow.words is not None else None,
            pay=self._pace.pay if self._pace is not None else None,
        )
        flow.orderly = True

    async def _hear(self, flow: _Flow, words: Words) -> bytes:
        """The client's first words, judged before anybody is connected to; empty where it left without any."""
        said = await first_words(flow.inner)
        first = b""
        async with asyncio.timeout(HEAD_S):
            while said and not (first := await words.outgoing(said)):
                said = await asyncio.get_running_loop().sock_recv(flow.inner, CHUNK)
        flow.orderly = not first
        return first

    async def _connect(self, flow: _Flow, verdict: Verdict) -> None:
        def refuse(address: Address) -> None:
            flow.real = address
            again = self._verdict(flow)
            if not again.allowed:
                raise Forbidden(again.rule)

        host, port = verdict.target or (flow.name or str(flow.wanted), flow.port)
        flow.outer, flow.real = await self._upstream.connect(
            host,
            port,
            trusted=verdict.target is not None or verdict.listed,
            refuse=(lambda _: None) if verdict.target is not None else refuse,
        )

    async def _explain(self, flow: _Flow, status: int, text: str) -> None:
        if flow.words is None or flow.traffic.received:
            return
        with contextlib.suppress(OSError, TimeoutError):
            flow.orderly = await explain(flow.inner, flow.words.kind, status, text)

    def _end(self, flow: _Flow, verdict: Verdict, error: str | None) -> None:
        for sock in (flow.inner, flow.outer):
            if sock is not None:
                (socket.socket.close if flow.orderly else reset)(sock)
        address = flow.real if flow.name is not None else flow.wanted
        spent = (time.monotonic() - flow.since) * 1000
        sent, received = flow.traffic.sent, flow.traffic.received
        self._record(Connection(flow.name, address, flow.port, verdict, sent, received, spent, error))
