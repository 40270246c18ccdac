"""The resolver of a sandbox, as a function: from a query to its answer. Asks nobody; a look-up carries nothing out.

What is answered:

- A of an allowed name: the one address that stands for the name.
- Any other type of an allowed name: nothing of that type (NOERROR, empty). So there is no IPv6, and no SVCB record
  whose key would encrypt a ClientHello.
- A name that no rule allows: NXDOMAIN, which clients take at once where they would try REFUSED again, with the extended
  error "Prohibited" and the rule.
- `localhost` and what is below it: 127.0.0.1 and ::1.
- PTR of an address that stands for a name: the name.
- Other classes, transfers, updates, several questions: REFUSED, NOTIMP or FORMERR.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any, Final

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.reversename
import dns.rrset

from skerry.core.policy import Policy, Verdict, parse_name
from skerry.egress.names import NameTable

TTL_S: Final = 60
REFUSED_TTL_S: Final = 5
UDP_MAX: Final = 1232
"""The largest datagram sent, whatever the client says it takes."""
QUERY_MAX: Final = 4096

_LOCALHOST: Final = {dns.rdatatype.A: "127.0.0.1", dns.rdatatype.AAAA: "::1"}
_TRANSFERS: Final = {dns.rdatatype.AXFR, dns.rdatatype.IXFR}


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question that a policy judged, for the record."""

    name: str
    kind: str
    """Of record, such as "A"."""
    verdict: Verdict
    address: IPv4Address | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    wire: bytes
    lookup: Lookup | None = None
    """None where no policy was asked."""


def answer(query: bytes, policy: Policy, table: NameTable, *, tcp: bool = False) -> Reply | None:
    """None for what is no query: it gets no answer."""
    if len(query) > QUERY_MAX:
        return None
    try:
        asked = dns.message.from_wire(query, ignore_trailing=False)
    except dns.exception.DNSException:
        return _malformed(query)
    if asked.flags & dns.flags.QR:
        return None
    if asked.opcode() != dns.opcode.QUERY:
        return _wire(_reply(asked, dns.rcode.NOTIMP), tcp)
    if len(asked.question) != 1:
        return _wire(_reply(asked, dns.rcode.FORMERR), tcp)
    question = asked.question[0]
    if question.rdclass != dns.rdataclass.IN or question.rdtype in _TRANSFERS:
        return _wire(_reply(asked, dns.rcode.REFUSED), tcp)
    return _judged(asked, question, policy, table, tcp)


def refused(query: bytes, *, tcp: bool = False) -> Reply | None:
    """For one that asks too often."""
    try:
        asked = dns.message.from_wire(query, ignore_trailing=False)
    except dns.exception.DNSException:
        return None
    return None if asked.flags & dns.flags.QR else _wire(_reply(asked, dns.rcode.REFUSED), tcp)


def _judged(asked: Any, question: Any, policy: Policy, table: NameTable, tcp: bool) -> Reply:  # noqa: FBT001
    kind = dns.rdatatype.to_text(question.rdtype)
    text = question.name.to_text(omit_final_dot=True)
    name = parse_name(text)
    if name is not None and (name == "localhost" or name.endswith(".localhost")):
        return _wire(_with(asked, question, _LOCALHOST.get(question.rdtype)), tcp)
    if question.name.is_subdomain(dns.reversename.ipv4_reverse_domain):
        return _wire(_pointer(asked, question, table), tcp)
    verdict = policy.look_up(name) if name is not None else Verdict(allowed=False, rule="it is no host name")
    if not verdict.allowed or name is None:
        lookup = Lookup(name or text[:255], kind, verdict)
        return _wire(_prohibited(asked, verdict), tcp, lookup)
    if question.rdtype not in {dns.rdatatype.A, dns.rdatatype.ANY}:
        return _wire(_with(asked, question, None), tcp, Lookup(name, kind, verdict))
    address = table.address(name)
    if address is None:
        full = Verdict(allowed=False, rule="the sandbox has looked up too many names")
        return _wire(_reply(asked, dns.rcode.REFUSED), tcp, Lookup(name, kind, full))
    return _wire(_with(asked, question, str(address)), tcp, Lookup(name, kind, verdict, address))


def _reply(asked: Any, rcode: dns.rcode.Rcode) -> Any:
    made = dns.message.make_response(asked, recursion_available=True, our_payload=UDP_MAX)
    made.set_rcode(rcode)
    return made


def _with(asked: Any, question: Any, data: str | None) -> Any:
    made = _reply(asked, dns.rcode.NOERROR)
    if data is None:
        _add_soa(made)
        return made
    kind = dns.rdatatype.A if question.rdtype == dns.rdatatype.ANY else question.rdtype
    made.answer.append(dns.rrset.from_text(question.name, TTL_S, "IN", kind, data))
    return made


def _prohibited(asked: Any, verdict: Verdict) -> Any:
    made = _reply(asked, dns.rcode.NXDOMAIN)
    _add_soa(made)
    if asked.edns >= 0:
        why = dns.edns.EDEOption(dns.edns.EDECode.PROHIBITED, f"not allowed: {verdict.rule}"[:200])
        made.use_edns(0, payload=UDP_MAX, options=[why])
    return made


def _add_soa(made: Any) -> None:
    """Says for how long a "no" may be remembered (RFC 2308)."""
    data = f"skerry.invalid. nobody.skerry.invalid. 1 60 60 60 {REFUSED_TTL_S}"
    made.authority.append(dns.rrset.from_text(dns.name.root, REFUSED_TTL_S, "IN", "SOA", data))


def _pointer(asked: Any, question: Any, table: NameTable) -> Any:
    try:
        address = IPv4Address(dns.reversename.to_address(question.name))
    except (dns.exception.DNSException, ValueError):
        address = None
    name = table.name(address) if address is not None else None
    if name is None:
        made = _reply(asked, dns.rcode.NXDOMAIN)
        _add_soa(made)
        return made
    return _with(asked, question, f"{name}." if question.rdtype == dns.rdatatype.PTR else None)


def _malformed(query: bytes) -> Reply | None:
    """FORMERR with the query's id, for what at least has a header of a query."""
    if len(query) < 12 or query[2] & 0x80:
        return None
    return Reply(query[:2] + bytes([0x80 | (query[2] & 0x79), int(dns.rcode.FORMERR)]) + bytes(8))


def _wire(made: Any, tcp: bool, lookup: Lookup | None = None) -> Reply:  # noqa: FBT001
    try:
        wire = made.to_wire(max_size=65_535 if tcp else UDP_MAX)
    except dns.exception.TooBig:
        made.answer.clear()
        made.authority.clear()
        made.flags |= dns.flags.TC
        wire = made.to_wire(max_size=UDP_MAX)
    return Reply(wire, lookup)
