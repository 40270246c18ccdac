"""What may leave a sandbox: rules, policies in layers, and verdicts with their reason. Pure.

A rule is a text:

    example.org                  this name, on ports 80 and 443
    *.example.org                every name below it, however deep, but not the name itself
    github.com:22                this name on this port; `:22,443`, `:8000-8010` and `:*` work too
    10.9.0.0/24:5432             addresses, on these ports; without ports, on all
    db.internal:5432 -> 10.0.0.7:5432    a tunnel: this name and port, led to a private service and nothing beside it

A policy is a stack of layers (the project's, its template's, the sandbox's own). Something is allowed when **every**
layer allows it, so that an inner layer can only narrow what an outer one gave.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_network
from typing import Final

import idna

from skerry.core.errors import InvalidRequest, Problem
from skerry.core.models import EgressLayer
from skerry.core.netaddr import Address, Network, parse_address

NAME_MAX: Final = 253
RULES_MAX: Final = 1000
WEB_PORTS: Final = ((80, 80), (443, 443))
ALL_PORTS: Final = ((1, 65535),)
GRAMMAR: Final = "NAME[:PORTS], *.NAME[:PORTS], ADDRESS[/LENGTH][:PORTS]"

_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
_PORTS: Final = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*|\*", re.ASCII)

Ports = tuple[tuple[int, int], ...]
"""Ranges, both ends included."""


class Mode(StrEnum):
    """What becomes of what no rule of the layer names."""

    DENY = "deny"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Rule:
    text: str
    """As it is shown: normalised."""
    ports: Ports
    name: str | None = None
    """A name, or the name that others are below of (`below`)."""
    below: bool = False
    network: Network | None = None
    target: tuple[str, int] | None = None
    """Of a tunnel: where it leads."""

    def covers_name(self, name: str) -> bool:
        if self.name is None:
            return False
        return name.endswith("." + self.name) if self.below else name == self.name

    def covers_address(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network

    def covers_port(self, port: int) -> bool:
        return any(low <= port <= high for low, high in self.ports)

    def overlaps(self, other: "Rule") -> bool:
        """Whether there is anything that both cover."""
        if not any(low <= end and start <= high for low, high in self.ports for start, end in other.ports):
            return False
        if self.network is not None and other.network is not None:
            return self.network.version == other.network.version and self.network.overlaps(other.network)
        if self.name is None or other.name is None:
            return False
        if self.below and other.below:
            return self.name == other.name or self.covers_name(other.name) or other.covers_name(self.name)
        return other.covers_name(self.name) if other.below else self.covers_name(other.name)


@dataclass(frozen=True, slots=True)
class Layer:
    """One level's say. A rule that allows wins over one that denies; `mode` decides where no rule speaks."""

    origin: str
    """Such as "project", "template" or "sandbox": named in verdicts."""
    mode: Mode = Mode.DENY
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    allowed: bool
    rule: str
    """The rule that decided, such as `project: allow example.org` or `sandbox: nothing allows it`."""
    target: tuple[str, int] | None = None
    """Where a tunnel leads."""
    listed: bool = False
    """An allow rule names the address itself: it may be a private one."""


@dataclass(frozen=True, slots=True)
class Policy:
    layers: tuple[Layer, ...]
    """From the outermost on. Without any, everything is refused."""

    def look_up(self, name: str) -> Verdict:
        """Whether the name may be asked for at all: on some port it could be reached."""
        return self._all(lambda rule: rule.covers_name(name), lambda _: False)

    def connect(self, name: str, port: int, real: Address | None = None) -> Verdict:
        """Whether a connection to what was looked up by this name may be made; `real`: the address it leads to."""
        return self._all(
            lambda rule: rule.covers_name(name) and rule.covers_port(port),
            lambda rule: _at(rule, real, port),
        )

    def connect_address(self, address: Address, port: int) -> Verdict:
        """Whether a connection to an address that no name stands for may be made."""
        return self._all(lambda rule: _at(rule, address, port), lambda rule: _at(rule, address, port))

    def could_allow(self, rule: Rule) -> bool:
        """Whether there is anything that this rule covers and every layer may allow: else a layer within that has the
        rule can never allow anything by it."""
        return bool(self.layers) and all(
            layer.mode is Mode.OPEN or any(rule.overlaps(own) for own in layer.allow) for layer in self.layers
        )

    def _all(self, allows: Callable[[Rule], bool], denies: Callable[[Rule], bool]) -> Verdict:
        if not self.layers:
            return Verdict(allowed=False, rule="there is no policy")
        verdicts = [_judge(layer, allows, denies) for layer in self.layers]
        refused = next((verdict for verdict in verdicts if not verdict.allowed), None)
        # Only the outermost layer, which the project's administrator writes, leads anywhere private.
        return refused or verdicts[0]


def _at(rule: Rule, address: Address | None, port: int) -> bool:
    return address is not None and rule.covers_address(address) and rule.covers_port(port)


def _judge(layer: Layer, allows: Callable[[Rule], bool], denies: Callable[[Rule], bool]) -> Verdict:
    for rule in layer.allow:
        if allows(rule):
            text = f"{layer.origin}: allow {rule.text}"
            return Verdict(allowed=True, rule=text, target=rule.target, listed=rule.network is not None)
    for rule in layer.deny:
        if denies(rule):
            return Verdict(allowed=False, rule=f"{layer.origin}: deny {rule.text}")
    if layer.mode is Mode.OPEN:
        return Verdict(allowed=True, rule=f"{layer.origin}: open")
    return Verdict(allowed=False, rule=f"{layer.origin}: no rule allows it")


# ------------------------------------------------------------------------------------------------------------ parsing


def policy_of(layers: Sequence[EgressLayer]) -> Policy:
    """Raises InvalidRequest for what is no rule, and for a tunnel anywhere but in the outermost layer."""
    return Policy(
        tuple(
            Layer(
                layer.origin,
                Mode(layer.mode),
                parse_rules(f"{layer.origin}.allow", layer.allow, tunnels=index == 0),
                parse_rules(f"{layer.origin}.deny", layer.deny),
            )
            for index, layer in enumerate(layers)
        )
    )


def parse_name(text: str) -> str | None:
    """A host name as it is compared: lower case, without the dot at its end, in its ASCII form. None for what is none:
    addresses in any spelling that a C library would read, single numbers, empty or long labels."""
    name = text.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            return None
    labels = name.split(".")
    if len(name) > NAME_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    if _NUMBER.fullmatch(labels[-1]):
        return None  # what ends in a number is an address to inet_aton, or nothing
    return name


def parse_rules(field: str, texts: Sequence[str], *, tunnels: bool = False) -> tuple[Rule, ...]:
    """Raises InvalidRequest that names every entry that is no rule. Doubles are kept once.

    `tunnels`: whether a rule may lead to a private service.
    """
    if len(texts) > RULES_MAX:
        raise InvalidRequest.of(field, "has too many entries", given=len(texts), allowed=RULES_MAX)
    rules: dict[str, Rule] = {}
    problems: list[Problem] = []
    for index, text in enumerate(texts):
        try:
            rule = parse_rule(text)
        except ValueError as error:
            problems.append(Problem(f"{field}.{index}", str(error), text, GRAMMAR))
            continue
        if rule.target is not None and not tunnels:
            problems.append(
                Problem(f"{field}.{index}", "leads to a private service, which only a project may", text, "without ->")
            )
        rules.setdefault(rule.text, rule)
    if problems:
        raise InvalidRequest("; ".join(f"{p.field}: {p.message}" for p in problems[:5]), problems=problems)
    return tuple(rules.values())


def parse_rule(text: str) -> Rule:
    """Raises ValueError with what is wrong with it."""
    source, arrow, target = (part.strip() for part in text.partition("->"))
    host, ports = _split_ports(source)
    if arrow:
        return _tunnel(host, ports, target)
    network = _network(host)
    if network is not None:
        found = ports or ALL_PORTS
        return Rule(_shown(_bracketed(network), found, ALL_PORTS), found, network=network)
    below = host.startswith("*.")
    name = parse_name(host.removeprefix("*.") if below else host)
    if name is None:
        raise ValueError("is neither a name nor an address")
    found = ports or WEB_PORTS
    return Rule(_shown(f"*.{name}" if below else name, found, WEB_PORTS), found, name=name, below=below)


def _tunnel(host: str, ports: Ports | None, target: str) -> Rule:
    name = parse_name(host)
    to_host, to_ports = _split_ports(target)
    if name is None or ports is None or not _one(ports):
        raise ValueError("a tunnel begins with a name and one port")
    place = parse_address(to_host)
    to_name = str(place) if place is not None else parse_name(to_host)
    if to_name is None or to_ports is None or not _one(to_ports):
        raise ValueError("a tunnel ends with a host and one port")
    shown = f"[{to_name}]" if ":" in to_name else to_name
    text = f"{name}:{ports[0][0]} -> {shown}:{to_ports[0][0]}"
    return Rule(text, ports, name=name, target=(to_name, to_ports[0][0]))


def _one(ports: Ports) -> bool:
    return len(ports) == 1 and ports[0][0] == ports[0][1]


def _split_ports(text: str) -> tuple[str, Ports | None]:
    """Host and ports; the colons of a bare IPv6 address are its own."""
    host, colon, ports = text.rpartition(":")
    if not colon or ("]" in ports) or (":" in host and not host.endswith("]")):
        return text, None
    if not _PORTS.fullmatch(ports):
        raise ValueError("has ports that are none")
    if ports == "*":
        return host, ALL_PORTS
    found: list[tuple[int, int]] = []
    for part in ports.split(","):
        low, _, high = part.partition("-")
        bounds = (int(low), int(high or low))
        if not 1 <= bounds[0] <= bounds[1] <= 65535:
            raise ValueError("has ports out of range")
        found.append(bounds)
    return host, tuple(sorted(set(found)))


def _network(text: str) -> Network | None:
    """Addresses; None for what does not look like any. Raises ValueError for those that are wrong."""
    address, slash, length = text.partition("/")
    base = parse_address(address)
    if base is None:
        if slash:
            raise ValueError("is not a network")
        return None
    bits = base.max_prefixlen
    if slash and not (length.isascii() and length.isdigit() and len(length) <= 3 and int(length) <= bits):
        raise ValueError(f"has a prefix length that is not 0 to {bits}")
    network = ip_network((base, int(length) if slash else bits), strict=False)
    if network.network_address != base:
        raise ValueError(f"names a host within a network; the network is {network}")
    return network


def _bracketed(network: Network) -> str:
    single = network.prefixlen == network.max_prefixlen
    text = str(network.network_address) if single else str(network)
    return f"[{text}]" if network.version == 6 and single else text


def _shown(host: str, ports: Ports, usual: Ports) -> str:
    if ports == usual:
        return host
    if ports == ALL_PORTS:
        return f"{host}:*"
    return f"{host}:" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ports)
