"""Where a request goes, from its host, its headers and its path. Pure.

There is one HTTP port for everything: the native interface, E2B's control plane and in-VM API, and the ports of every
sandbox. What decides, in this order:

1. the host: `PORT-ID.DOMAIN`;
2. the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, on any other host;
3. the path: `/v1/sandboxes/ID/ports/PORT/…`, the paths of E2B's in-VM API (signed URLs have nothing else), those of its
   control plane; everything else is native.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from skerry.core.errors import InvalidRequest

ENVD_PORT: Final = 49983
"""The in-VM API of E2B, which the host serves. What listens on that port in a guest cannot be reached."""
ID_HEADER: Final = b"e2b-sandbox-id"
PORT_HEADER: Final = b"e2b-sandbox-port"
LOCAL: Final = "localhost"
"""Always one of the domains: browsers and curl know that everything below it is this machine."""

_ID: Final = re.compile(r"[a-z0-9]{1,64}")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_PORT_PATH: Final = re.compile(rb"/v1/sandboxes/([^/]+)/ports/([^/]+)(/.*)?", re.DOTALL)
_ENVD_PATH: Final = re.compile(rb"/(process\.Process|filesystem\.Filesystem)/.*|/files", re.DOTALL)
_CONTROL: Final = frozenset(
    {
        b"sandboxes",
        b"v2",
        b"v3",
        b"templates",
        b"default-templates",
        b"snapshots",
        b"secrets",
        b"volumes",
        b"volumecontent",
        b"teams",
        b"nodes",
        b"api-keys",
        b"access-tokens",
        b"events",
    }
)
"""First segments of E2B's control plane."""


class Face(StrEnum):
    NATIVE = "native"
    CONTROL = "control"  # E2B's control plane
    ENVD = "envd"  # E2B's in-VM API, of one sandbox
    PORT = "port"  # a port of a sandbox


class Named(StrEnum):
    """What named the sandbox."""

    HOST = "host"
    HEADERS = "headers"
    PATH = "path"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Route:
    face: Face
    named: Named = Named.NOTHING
    sandbox_id: str | None = None
    """None with `ENVD`: the signature in the URL says which."""
    port: int | None = None
    rest: bytes | None = None
    """With `PATH`: the path within the sandbox, percent-encoded as it came, with its leading slash."""


class BadRouteError(InvalidRequest):
    """A host, a header or a path that names a sandbox wrongly."""

    code = "bad_route"

    def __init__(self, message: str, named: Named) -> None:
        super().__init__(message)
        self.named = named


def decide(headers: Iterable[tuple[bytes, bytes]], raw_path: bytes, domains: frozenset[str]) -> Route:
    """`headers` with lower-case names; `raw_path` still percent-encoded; `domains` lower-case, without ports.

    Raises BadRouteError.
    """
    hosts: list[bytes] = []
    ids: list[bytes] = []
    ports: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == ID_HEADER:
            ids.append(value)
        elif name == PORT_HEADER:
            ports.append(value)
    if len(hosts) > 1:
        raise BadRouteError("more than one Host header", Named.HOST)
    named = _by_host(hosts[0], domains) if hosts else None
    if named is None and (ids or ports):
        named = _by_headers(ids, ports)
    if named is not None:
        return named
    return _by_path(raw_path)


def _by_host(value: bytes, domains: frozenset[str]) -> Route | None:
    label, dot, parent = host_name(value).partition(".")
    if not dot or parent not in domains or "-" not in label:
        return None
    port, _, sandbox_id = label.partition("-")
    return _to_port(Named.HOST, sandbox_id, port)


def host_name(value: bytes) -> str:
    """What a Host header names: lower-case, without port and final dot. An IPv6 address keeps its brackets."""
    text = value.decode("latin-1").lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0].removesuffix(".")


def _by_headers(ids: list[bytes], ports: list[bytes]) -> Route:
    for name, found in (("E2b-Sandbox-Id", ids), ("E2b-Sandbox-Port", ports)):
        if not found:
            raise BadRouteError(f"missing header: {name}", Named.HEADERS)
        if len(found) > 1:
            raise BadRouteError(f"{name} is given more than once", Named.HEADERS)
    return _to_port(Named.HEADERS, ids[0].decode("latin-1"), ports[0].decode("latin-1"))


def _by_path(raw_path: bytes) -> Route:
    found = _PORT_PATH.fullmatch(raw_path)
    if found is not None:
        sandbox_id, port, rest = found.groups()
        return _to_port(Named.PATH, sandbox_id.decode("latin-1"), port.decode("latin-1"), rest or b"/")
    if _ENVD_PATH.fullmatch(raw_path):
        return Route(Face.ENVD)
    first = raw_path.removeprefix(b"/").partition(b"/")[0]
    return Route(Face.CONTROL if first in _CONTROL else Face.NATIVE)


def _to_port(named: Named, sandbox_id: str, port: str, rest: bytes | None = None) -> Route:
    if not _ID.fullmatch(sandbox_id):
        raise BadRouteError("that is not a sandbox's id: lower-case letters and digits", named)
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise BadRouteError("that is not a port: 1 to 65535", named)
    face = Face.ENVD if int(port) == ENVD_PORT else Face.PORT
    return Route(face, named, sandbox_id, int(port), rest)


def domains_of(domain: str | None) -> frozenset[str]:
    """The names below which sandboxes have names. `domain` may hold a port, which does not matter here."""
    return frozenset({LOCAL} if domain is None else {LOCAL, host_name(domain.encode("ascii"))})
