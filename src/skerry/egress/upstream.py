"""From a name to a connection to its real host, made by this machine and to public addresses only."""

import asyncio
import contextlib
import socket
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import unquote, urlsplit

from skerry.core.errors import Forbidden, InvalidRequest, Unavailable
from skerry.core.netaddr import Address, Network, is_public
from skerry.core.policy import ALL_PORTS, Rule, parse_rule, parse_rules

RESOLVE_S: Final = 10.0
CONNECT_S: Final = 10.0
ADDRESSES_MAX: Final = 8
"""So many of a name's addresses are tried."""
ANSWER_MAX: Final = 16 * 1024

Resolve = Callable[[str], Awaitable[Sequence[Address]]]


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy that is asked to CONNECT: on networks that have no other way out."""

    host: str
    port: int
    authorization: str | None = None
    """Value of `Proxy-Authorization`."""


async def resolve(name: str) -> Sequence[Address]:
    """The name's addresses, as this machine's resolver gives them now. Raises Unavailable `name_not_resolved`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"{name} could not be resolved: {error}", code="name_not_resolved", name=name) from None
    return [ip_address(entry[4][0]) for entry in found if "%" not in str(entry[4][0])]


class Upstream:
    """How this machine reaches what sandboxes may reach.

    `allow`: networks that are not public and may be reached all the same (registries within a company's network).
    `private`: what is not public and may be reached where a policy's rule names it itself, by a tunnel or an address:
    a project's administrator is not the one whose network this is.
    """

    def __init__(
        self,
        *,
        allow: Collection[Network] = (),
        private: Collection[Rule] = (),
        proxy: Proxy | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._allow = tuple(allow)
        self._private = tuple(private)
        self._proxy = proxy
        self._resolve = resolve

    def may_reach(self, address: Address) -> bool:
        return is_public(address) or any(
            address.version == network.version and address in network for network in self._allow
        )

    async def connect(
        self, host: str, port: int, *, trusted: bool, refuse: Callable[[Address], None] = lambda _: None
    ) -> tuple[socket.socket, Address | None]:
        """A non-blocking socket that is connected to the host, and the address it went to.

        `trusted`: a rule named this very host, so it may be a private one. `refuse` raises for an address that the
        policy forbids. Raises Forbidden `address_not_public`, Unavailable `name_not_resolved` or `host_unreachable`.
        """
        if self._proxy is not None and not trusted:
            return await self._by_proxy(self._proxy, host, port), None
        found = list(dict.fromkeys(await self._addresses(host)))
        usable = [a for a in found if self.may_reach(a) or (trusted and self._opened(host, a, port))]
        if found and not usable:
            why = "; its operator has not opened it (egress_private_allow)" if trusted else ""
            where = f"{host} leads to {found[0]}, which" if host != str(found[0]) else host
            raise Forbidden(f"{where} is no public address{why}", code="address_not_public", host=host)
        return await _first(host, port, usable, refuse)

    def _opened(self, host: str, address: Address, port: int) -> bool:
        return any(
            rule.covers_port(port) and (rule.covers_name(host) or rule.covers_address(address))
            for rule in self._private
        )

    async def _to_proxy(self, proxy: Proxy) -> socket.socket:
        """The operator has named it: it may be anywhere."""
        found = list(dict.fromkeys(await self._addresses(proxy.host)))
        return (await _first(proxy.host, proxy.port, found, lambda _: None))[0]

    async def _addresses(self, host: str) -> Sequence[Address]:
        with contextlib.suppress(ValueError):
            return [ip_address(host)]
        return await self._resolve(host)

    async def _by_proxy(self, proxy: Proxy, host: str, port: int) -> socket.socket:
        """The proxy resolves the name: what is public is its business then."""
        sock = await self._to_proxy(proxy)
        loop = asyncio.get_running_loop()
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
        if proxy.authorization is not None:
            head += f"Proxy-Authorization: {proxy.authorization}\r\n"
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_sendall(sock, f"{head}\r\n".encode("ascii"))
                answer = await _head(sock)
        except (OSError, TimeoutError) as error:
            sock.close()
            raise Unavailable(f"the proxy {proxy.host} broke: {error}", code="host_unreachable", host=host) from None
        status = answer.split(b" ", 2)[1:2]
        if not status or not status[0].startswith(b"2"):
            sock.close()
            line = answer.split(b"\r\n", 1)[0].decode("ascii", "replace")
            raise Unavailable(f"the proxy {proxy.host} refused {authority}: {line}", code="host_unreachable", host=host)
        return sock


def upstream_of(allow: Sequence[str], private: Sequence[str], tunnels: Sequence[str], proxy: str | None) -> Upstream:
    """As an operator says it, in rules' grammar: networks in `allow`; names and networks, with ports, in `private`; the
    targets of `tunnels` are private ones that may be reached, too. Raises InvalidRequest that names the wrong entry."""
    networks = parse_rules("egress_upstream_allow", allow)
    for index, rule in enumerate(networks):
        if rule.network is None or rule.ports != ALL_PORTS:
            raise InvalidRequest.of(f"egress_upstream_allow.{index}", "is not a network", given=rule.text)
    opened = list(parse_rules("egress_private_allow", private))
    for rule in parse_rules("egress_allow", tunnels, tunnels=True):
        if rule.target is not None:
            host, port = rule.target
            opened.append(parse_rule(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    return Upstream(
        allow=[rule.network for rule in networks if rule.network is not None],
        private=opened,
        proxy=None if proxy is None else proxy_of(proxy),
    )


def proxy_of(url: str) -> Proxy:
    """Raises InvalidRequest, which never repeats the URL: a password may be in it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if parts.scheme != "http" or host is None or parts.path not in {"", "/"} or parts.query:
        raise InvalidRequest.of("egress_proxy", "is not a proxy's URL", allowed="http://[USER:PASSWORD@]HOST[:PORT]")
    said = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        said = f"Basic {b64encode(pair.encode()).decode('ascii')}"
    return Proxy(host, port, said)


async def _first(
    host: str, port: int, addresses: Sequence[Address], refuse: Callable[[Address], None]
) -> tuple[socket.socket, Address]:
    """A connection to the first of them that takes it, and which one. Raises Unavailable `host_unreachable`."""
    failure: Exception | None = None
    for address in addresses[:ADDRESSES_MAX]:
        refuse(address)
        try:
            return await _open(address, port), address
        except (OSError, TimeoutError) as error:
            failure = error
    raise Unavailable(
        f"{host}:{port} could not be reached: {failure or 'it has no address'}", code="host_unreachable", host=host
    )


async def _open(address: Address, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _head(sock: socket.socket) -> bytes:
    """An answer's head, read so that no byte behind it is taken."""
    loop = asyncio.get_running_loop()
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if len(head) > ANSWER_MAX:
            raise OSError("its answer is too long")
        byte = await loop.sock_recv(sock, 1)
        if not byte:
            raise OSError("it closed the connection")
        head += byte
    return head
