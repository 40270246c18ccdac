"""The resolver as a function: what it answers, and that it never fails on what it is sent."""

from ipaddress import IPv4Address

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.policy import Layer, Policy, parse_rules
from skerry.egress.dns import UDP_MAX, Reply, answer, refused
from skerry.egress.names import FIRST, NAMES_MAX, NETWORK, NameTable

POLICY = Policy((Layer("project", allow=parse_rules("allow", ["a.test", "*.w.test"])),))


def ask(name: str, kind: str = "A", table: NameTable | None = None, **how: int) -> tuple[dns.message.Message, Reply]:
    reply = answer(dns.message.make_query(name, kind, use_edns=0, **how).to_wire(), POLICY, table or NameTable())
    assert reply is not None
    return dns.message.from_wire(reply.wire), reply


def test_an_allowed_name_has_one_address_for_ever() -> None:
    table = NameTable()
    first, reply = ask("A.Test", table=table)
    assert [str(item) for item in first.answer[0]] == [str(NETWORK[FIRST])]
    assert first.question[0].name.to_text() == "A.Test."  # as it was asked: clients check the case they drew
    assert reply.lookup is not None
    assert (reply.lookup.name, reply.lookup.verdict.allowed) == ("a.test", True)
    ask("x.w.test", table=table)
    again, _ = ask("a.test", table=table)
    assert again.answer[0][0] == first.answer[0][0]
    assert NameTable(table.names).name(IPv4Address(str(NETWORK[FIRST + 1]))) == "x.w.test"


@pytest.mark.parametrize("kind", ["AAAA", "HTTPS", "SVCB", "TXT", "MX", "SRV", "NULL", "CNAME", "NS", "DNSKEY"])
def test_an_allowed_name_has_nothing_else(kind: str) -> None:
    message, _ = ask("a.test", kind)
    assert (message.rcode(), message.answer) == (dns.rcode.NOERROR, [])


@pytest.mark.parametrize(
    "name", ["evil.test", "w.test", "secret123.evil.test", "a.test.evil", "x." * 120 + "test", "."]
)
@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "ANY"])
def test_any_other_name_does_not_exist(name: str, kind: str) -> None:
    message, reply = ask(name, kind)
    assert message.rcode() == dns.rcode.NXDOMAIN
    assert "not allowed" in str(message.options[0])
    assert reply.lookup is not None
    assert not reply.lookup.verdict.allowed


@pytest.mark.parametrize(("name", "kind", "said"), [("localhost", "A", "127.0.0.1"), ("x.localhost", "AAAA", "::1")])
def test_localhost_is_the_guest(name: str, kind: str, said: str) -> None:
    message, reply = ask(name, kind)
    assert str(message.answer[0][0]) == said
    assert reply.lookup is None


def test_an_address_tells_its_name() -> None:
    table = NameTable(["a.test"])
    message, _ = ask(NETWORK[FIRST].reverse_pointer, "PTR", table)
    assert str(message.answer[0][0]) == "a.test."
    message, _ = ask("8.8.8.8.in-addr.arpa", "PTR", table)
    assert message.rcode() == dns.rcode.NXDOMAIN


def test_what_is_not_asked_this_way() -> None:
    assert ask("a.test", "AXFR")[0].rcode() == dns.rcode.REFUSED
    assert ask("version.bind", "TXT", rdclass=3)[0].rcode() == dns.rcode.REFUSED
    update = dns.message.make_query("a.test", "A")
    update.set_opcode(dns.opcode.NOTIFY)
    reply = answer(update.to_wire(), POLICY, NameTable())
    assert reply is not None
    assert dns.message.from_wire(reply.wire).rcode() == dns.rcode.NOTIMP


def test_a_full_table_refuses() -> None:
    table = NameTable(f"n{number}" for number in range(NAMES_MAX))
    assert ask("a.test", table=table)[0].rcode() == dns.rcode.REFUSED
    assert len(table.names) == NAMES_MAX


def test_answers_are_no_queries() -> None:
    query = dns.message.make_query("a.test", "A")
    query.flags |= dns.flags.QR
    assert answer(query.to_wire(), POLICY, NameTable()) is None
    assert refused(query.to_wire()) is None


def test_one_who_asks_too_often_is_refused() -> None:
    reply = refused(dns.message.make_query("a.test", "A").to_wire())
    assert reply is not None
    assert dns.message.from_wire(reply.wire).rcode() == dns.rcode.REFUSED


QUERY = dns.message.make_query("a.test", "A", use_edns=0).to_wire()


@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=100).map(lambda tail: QUERY[:12] + tail),
        st.tuples(st.integers(0, len(QUERY) - 1), st.integers(0, 255)).map(
            lambda change: QUERY[: change[0]] + bytes([change[1]]) + QUERY[change[0] + 1 :]
        ),
    )
)
def test_any_bytes_get_a_small_answer_or_none(query: bytes) -> None:
    reply = answer(query, POLICY, NameTable())
    if reply is not None:
        assert len(reply.wire) <= UDP_MAX
        assert reply.wire[:2] == query[:2]
        assert reply.wire[2] & 0x80
