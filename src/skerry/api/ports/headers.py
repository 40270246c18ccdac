"""What of a request's headers a sandbox's server gets to see, and what of its answer's the client does. Pure.

What belongs to one connection ends at the gateway on both sides (RFC 9110, 7.6.1); framing is made anew on both. Keys
and tokens of ours never reach a sandbox.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from skerry.api.routing import ID_HEADER, PORT_HEADER, Named, Route
from skerry.control import SECRET_PATTERN
from skerry.core.errors import InvalidRequest, SkerryError

Header = tuple[bytes, bytes]

TRAFFIC_TOKEN: Final = b"e2b-traffic-access-token"
ACCESS_TOKEN: Final = b"x-access-token"
API_KEY: Final = b"x-api-key"
AUTHORIZATION: Final = b"authorization"
TCP: Final = b"skerry-tcp"
"""The protocol to upgrade to for the bare bytes of a TCP connection."""

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS: Final = frozenset(
    {
        b"host",
        b"content-length",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-forwarded-prefix",
        ID_HEADER,
        PORT_HEADER,
        TRAFFIC_TOKEN,
    }
)
"""Set here, or for the gateway alone."""
_KEY: Final = re.compile(rb"(bearer\s+)?(" + SECRET_PATTERN.encode() + rb"|e2b_[0-9a-f]{92})\s*", re.IGNORECASE)
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


class CodingUnknown(SkerryError):
    """A transfer coding that is not `chunked`."""

    code = "transfer_coding_unknown"
    status = 501


class BadAnswer(SkerryError):
    """What a sandbox's server answered cannot be passed on."""

    code = "bad_port_answer"
    status = 502
    retry = "unknown"


@dataclass(frozen=True, slots=True)
class Client:
    """Who is at the other end, as far as the sandbox's server is told."""

    address: str
    scheme: str


def values(headers: Iterable[Header], name: bytes) -> list[bytes]:
    return [value for found, value in headers if found == name]


def tokens(headers: Iterable[Header], name: bytes) -> set[bytes]:
    """The members of a list header, lower-case."""
    return {token.strip().lower() for value in values(headers, name) for token in value.split(b",")} - {b""}


def upgrade_of(headers: Iterable[Header]) -> bytes | None:
    """The protocol that a request wants to change to."""
    headers = list(headers)
    found = values(headers, b"upgrade")
    return found[0].strip() if len(found) == 1 and b"upgrade" in tokens(headers, b"connection") else None


def framing(headers: list[Header]) -> list[Header]:
    """How the body is delimited towards the sandbox: as the client has delimited it.

    Raises InvalidRequest for what two readers might read differently, CodingUnknown.
    """
    lengths, codings = values(headers, b"content-length"), values(headers, b"transfer-encoding")
    if lengths and codings:
        raise InvalidRequest("Content-Length and Transfer-Encoding do not go together", code="malformed_http")
    if len(lengths) > 1 or (lengths and not _DIGITS.fullmatch(lengths[0])):
        raise InvalidRequest.of("Content-Length", "must be one number", code="malformed_http")
    if lengths:
        return [(b"content-length", lengths[0])]
    if not codings:
        return []
    if [coding.strip().lower() for coding in codings] != [b"chunked"]:
        raise CodingUnknown("Transfer-Encoding: chunked is the only one that is read here")
    return [(b"transfer-encoding", b"chunked")]


def to_guest(
    headers: list[Header],
    route: Route,
    client: Client,
    *,
    mask: str | None,
    upgrade: bytes | None,
    is_token: Callable[[str], bool],
) -> list[Header]:
    """The request's headers as the sandbox's server gets them.

    `mask`: the sandbox's `mask_request_host`. `is_token`: whether a text is the sandbox's access token.
    """
    hosts = values(headers, b"host")
    if len(hosts) != 1:
        raise InvalidRequest.of("Host", "must be given once", given=len(hosts), allowed=1, code="malformed_http")
    host = hosts[0] if mask is None else mask.replace("${PORT}", str(route.port)).encode("ascii")
    dropped = HOP_BY_HOP | _OURS | tokens(headers, b"connection")
    passed = [(name, value) for name, value in headers if name not in dropped and not _secret(name, value, is_token)]
    forwarded = [*values(headers, b"x-forwarded-for"), client.address.encode("ascii", "replace")]
    made = [
        (b"host", host),
        *framing(headers),
        (b"x-forwarded-for", b", ".join(forwarded)),
        (b"x-forwarded-host", hosts[0]),
        (b"x-forwarded-proto", client.scheme.encode("ascii")),
    ]
    if route.named is Named.PATH:
        made.append((b"x-forwarded-prefix", f"/v1/sandboxes/{route.sandbox_id}/ports/{route.port}".encode("ascii")))
    if upgrade is None:
        made.append((b"connection", b"close"))
    else:
        made += [(b"connection", b"Upgrade"), (b"upgrade", upgrade)]
    return [*made, *passed]


def _secret(name: bytes, value: bytes, is_token: Callable[[str], bool]) -> bool:
    if name in {API_KEY, AUTHORIZATION}:
        return _KEY.fullmatch(value) is not None
    return name == ACCESS_TOKEN and is_token(value.decode("latin-1"))


def to_client(status: int, headers: Iterable[Header]) -> list[Header]:
    """An answer's headers as the client gets them; the length stays where there is one. Raises BadAnswer."""
    if not 200 <= status <= 599:
        raise BadAnswer(f"the server in the sandbox answered with the status {status}")
    headers = list(headers)
    dropped = HOP_BY_HOP | (tokens(headers, b"connection") - {b"content-length"})
    if status in {204, 304} or values(headers, b"transfer-encoding"):
        dropped |= {b"content-length"}
    return _sound((name, value) for name, value in headers if name not in dropped)


def switched(headers: Iterable[Header]) -> list[Header]:
    """The headers of a 101: as they are, but for what else concerns the connection. Raises BadAnswer."""
    headers = list(headers)
    kept = _sound((name, value) for name, value in headers if name not in HOP_BY_HOP)
    return [(b"connection", b"Upgrade"), *((b"upgrade", value) for value in values(headers, b"upgrade")), *kept]


def _sound(headers: Iterable[Header]) -> list[Header]:
    found = list(headers)
    for name, value in found:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadAnswer("the server in the sandbox answered with a header that is none")
    return found
