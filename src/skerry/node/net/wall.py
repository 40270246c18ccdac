"""The door of one sandbox: its resolver and its relay, on sockets that live in its namespace, served by this process.

The namespace has no way out; what leaves it leaves through here, or not at all. A wall that is not up (no policy, this
server gone) is a namespace whose questions nobody answers.
"""

import asyncio
import contextlib
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.core.models import EgressLayer, NetworkEvent
from skerry.core.policy import ALL_PORTS, Mode, Policy, Ports, policy_of
from skerry.egress import dns
from skerry.egress.ledger import Ledger
from skerry.egress.names import NameTable
from skerry.egress.rate import Bucket
from skerry.egress.relay import Limits, Relay, destination
from skerry.egress.upstream import Upstream
from skerry.node.aio import TaskSet, in_thread, log
from skerry.node.net import namespace, refused, rules
from skerry.node.net.slots import Slot

BACKLOG: Final = 1024
DATAGRAM_BYTES: Final = 4096
DNS_RATE: Final = 200.0
"""Questions a second, on average; so many at once too."""
DNS_CONNECTIONS_MAX: Final = 32
DNS_IDLE_S: Final = 10.0
EVERYWHERE: Final = IPv4Network("0.0.0.0/0")


class NameFile:
    """A sandbox's names, kept beside its VM as long as that lives: a server that takes it up again finds them.

    What is lost of it in a crash of the machine is lost with the VM.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self.table = NameTable(names)
        with contextlib.suppress(OSError):
            for name in path.read_text("ascii").splitlines():
                self.table.address(name)
        self._written = 0

    def save(self) -> None:
        """Write down those that came since. Before the answer with their address goes out."""
        names = self.table.names
        if len(names) == self._written:
            return
        with self._path.open("a" if self._written else "w", encoding="ascii") as file:
            file.writelines(f"{name}\n" for name in names[self._written :])
        self._written = len(names)


class Wall:
    """Belongs to one event loop."""

    def __init__(
        self,
        slot: Slot,
        sandbox_id: str,
        layers: Sequence[EgressLayer],
        names: NameFile,
        upstream: Upstream,
        publish: Callable[[NetworkEvent], None],
        limits: Limits,
    ) -> None:
        self._slot = slot
        self._sandbox_id = sandbox_id
        self._policy = policy_of(layers)
        self._names = names
        self._ledger = Ledger(sandbox_id, publish)
        self._relay = Relay(lambda: self._policy, names.table, upstream, self._ledger.connection, limits)
        self._tasks = TaskSet()
        self._sockets: list[socket.socket] = []
        self._questions = Bucket(DNS_RATE)
        self._askers = 0

    @property
    def names(self) -> tuple[str, ...]:
        return self._names.table.names

    async def open(self) -> None:
        """Raises InternalError (`step` wall); nothing is left open then."""
        loop = asyncio.get_running_loop()
        try:
            if bare_addresses(self._policy):  # a new namespace lets none through
                await in_thread(self._apply)
            questions = self._socket(socket.SOCK_DGRAM, rules.DNS_PORT)
            streams = self._socket(socket.SOCK_STREAM, rules.DNS_PORT)
            relayed = self._socket(socket.SOCK_STREAM, rules.RELAY_PORT)
            heard = namespace.socket_in(
                self._slot.fd, socket.SOCK_RAW, family=socket.AF_NETLINK, protocol=refused.NETLINK_NETFILTER
            )
            self._sockets.append(heard)
            refused.listen(heard, rules.REFUSED_GROUP, 64)
        except OSError as error:
            await self.aclose()
            raise InternalError(f"the sandbox's network could not be served: {error}", step="wall") from error
        loop.add_reader(questions, self._answer, questions)
        loop.add_reader(heard, self._hear, heard)
        self._tasks.spawn(self._accept(streams, self._converse), name=f"dns-{self._sandbox_id}")
        self._tasks.spawn(self._accept(relayed, self._relayed), name=f"relay-{self._sandbox_id}")

    async def change(self, layers: Sequence[EgressLayer]) -> int:
        """Another policy from now on. Connections that it forbids are cut; returns how many."""
        self._policy = policy_of(layers)
        try:
            await in_thread(self._apply)
        except OSError as error:
            raise InternalError(f"the sandbox's firewall could not be changed: {error}", step="wall") from error
        return self._relay.judge_again()

    async def aclose(self) -> None:
        """Close the door: connections break. Idempotent."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
        await self._tasks.aclose()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        await self._relay.aclose()
        self._ledger.close()

    def _socket(self, kind: int, port: int) -> socket.socket:
        sock = namespace.socket_in(self._slot.fd, kind)
        self._sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((rules.HOST_ADDRESS, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
        return sock

    def _apply(self) -> None:
        """Let the kernel pass what the policy has of bare addresses. Blocks."""
        commands = rules.listing(bare_addresses(self._policy))

        def body() -> None:
            subprocess.run(
                ["nft", "-f", "-"],
                input=commands.encode(),
                capture_output=True,
                check=True,
                timeout=namespace.COMMAND_TIMEOUT_S,
            )

        try:
            namespace.inside(self._slot.fd, body)
        except subprocess.SubprocessError as error:
            raise OSError(f"nft: {getattr(error, 'stderr', None) or error}") from error

    async def _accept(self, sock: socket.socket, take: Callable[[socket.socket], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:  # no file descriptor left: those there are will end
                log.warning("a connection of a sandbox was not taken", sandbox=self._sandbox_id, error=str(error))
                await asyncio.sleep(0.1)
                continue
            accepted.setblocking(False)  # noqa: FBT003
            take(accepted)

    def _relayed(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wanted, port = destination(sock)
        except OSError:  # it went away, or was not redirected: nobody's
            sock.close()
            return
        self._relay.take(sock, wanted, port)

    # -------------------------------------------------------------------------------------------------------- look-ups

    def _answer(self, sock: socket.socket) -> None:
        for _ in range(32):  # then the loop's other work has its turn
            try:
                query, sender = sock.recvfrom(DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                return
            wire = self._judge(query, tcp=False)
            if wire is not None:
                with contextlib.suppress(OSError):
                    sock.sendto(wire, sender)

    def _judge(self, query: bytes, *, tcp: bool) -> bytes | None:
        if not self._questions.take():
            reply = dns.refused(query, tcp=tcp)
            return reply.wire if reply is not None else None
        reply = dns.answer(query, self._policy, self._names.table, tcp=tcp)
        if reply is None:
            return None
        if reply.lookup is not None:
            self._ledger.look_up(reply.lookup)
        self._names.save()
        return reply.wire

    def _converse(self, sock: socket.socket) -> None:
        if self._askers >= DNS_CONNECTIONS_MAX:
            sock.close()
            return
        self._tasks.spawn(self._answer_all(sock), name=f"dns-stream-{self._sandbox_id}")

    async def _answer_all(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._askers += 1
        data = b""
        try:
            with sock:
                while True:
                    async with asyncio.timeout(DNS_IDLE_S):
                        more = await loop.sock_recv(sock, DATAGRAM_BYTES)
                        data += more
                        while len(data) >= 2 and len(data) >= (whole := 2 + struct.unpack("!H", data[:2])[0]):
                            wire = self._judge(data[2:whole], tcp=True)
                            data = data[whole:]
                            if wire is not None:
                                await loop.sock_sendall(sock, struct.pack("!H", len(wire)) + wire)
                    if not more or len(data) > 2 + dns.QUERY_MAX:
                        return
        except (OSError, TimeoutError):
            return
        finally:
            self._askers -= 1

    def _hear(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(refused.READ_BYTES)
        except OSError:  # ENOBUFS too: more was refused than can be told
            return
        for each in refused.parse(data):
            self._ledger.packet(each.protocol, each.address, each.port)


@dataclass(frozen=True, slots=True)
class Walls:
    """What all walls of a node share."""

    upstream: Upstream
    publish: Callable[[NetworkEvent], None]
    limits: Limits = field(default_factory=Limits)

    async def open(
        self, slot: Slot, sandbox_id: str, layers: Sequence[EgressLayer], directory: Path, names: Sequence[str]
    ) -> Wall:
        """`directory`: of its VM, where the names are kept as long as it lives. Raises InternalError."""
        file = NameFile(directory / "names", names)
        wall = Wall(slot, sandbox_id, layers, file, self.upstream, self.publish, self.limits)
        await wall.open()
        return wall


def bare_addresses(policy: Policy) -> list[tuple[IPv4Network, Ports]]:
    """Which addresses without a name the relay has to be asked about: those that the outermost layer lets through."""
    if not policy.layers:
        return []
    outermost = policy.layers[0]
    if outermost.mode is Mode.OPEN:
        return [(EVERYWHERE, ALL_PORTS)]
    return [(rule.network, rule.ports) for rule in outermost.allow if isinstance(rule.network, IPv4Network)]
