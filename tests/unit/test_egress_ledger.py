"""What is written down of a sandbox's traffic: all of it, at a bounded cost."""

import asyncio
from ipaddress import IPv4Address

from hypothesis import given
from hypothesis import strategies as st

from skerry.core.models import NetworkEvent
from skerry.core.policy import Verdict
from skerry.egress.dns import Lookup
from skerry.egress.ledger import KINDS_AT_ONCE, KINDS_MAX, Ledger
from skerry.egress.relay import Connection
from skerry.node.net.refused import Refused, parse

NO = Verdict(allowed=False, rule="project: no rule allows it")


async def test_the_first_of_a_kind_is_told_at_once_and_the_rest_as_a_count() -> None:
    told: list[NetworkEvent] = []
    ledger = Ledger("sb1", told.append)
    for _ in range(1000):
        ledger.look_up(Lookup("evil.test", "A", NO))
    assert [(event.name, event.record, event.count) for event in told] == [("evil.test", "A", 1)]
    ledger.close()
    assert [event.count for event in told] == [1, 999]


async def test_a_flood_of_kinds_is_counted_exactly() -> None:
    told: list[NetworkEvent] = []
    ledger = Ledger("sb1", told.append)
    for number in range(10_000):
        ledger.look_up(Lookup(f"x{number}.evil.test", "A", NO))
    ledger.close()
    assert len(told) <= KINDS_MAX + 1
    assert sum(event.count for event in told) == 10_000


async def test_a_long_flood_of_different_names_is_told_slowly_and_counted_whole() -> None:
    told: list[NetworkEvent] = []
    ledger = Ledger("sb1", told.append)
    for window in range(50):
        for number in range(KINDS_MAX):
            ledger.look_up(Lookup(f"x{window}-{number}.evil.test", "A", NO))
        ledger.close()
    assert len(told) < KINDS_AT_ONCE + 200
    assert sum(event.count for event in told) == 50 * KINDS_MAX


async def test_connections_add_up_their_bytes() -> None:
    told: list[NetworkEvent] = []
    ledger = Ledger("sb1", told.append)
    yes = Verdict(allowed=True, rule="project: allow a.test")
    for _ in range(3):
        ledger.connection(Connection("a.test", IPv4Address("1.1.1.1"), 443, yes, 10, 20, 1.0))
    ledger.close()
    assert (sum(event.sent_bytes for event in told), sum(event.received_bytes for event in told)) == (30, 60)


async def test_a_window_ends_by_itself() -> None:
    told: list[NetworkEvent] = []
    ledger = Ledger("sb1", told.append)
    ledger.packet("tcp", "1.1.1.1", 443)
    ledger.packet("tcp", "1.1.1.1", 443)
    async with asyncio.timeout(20):
        while len(told) < 2:
            await asyncio.sleep(0.05)
    ledger.packet("tcp", "1.1.1.1", 443)
    assert len(told) == 3
    ledger.close()


def test_a_packet_as_the_kernel_logs_it() -> None:
    ip = bytes([0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 169, 254, 0, 2, 1, 1, 1, 1]) + (5000).to_bytes(2, "big")
    ip += (443).to_bytes(2, "big") + bytes(16)
    attribute = (4 + len(ip)).to_bytes(2, "little") + (9).to_bytes(2, "little") + ip
    body = bytes([2, 0, 0, 1]) + attribute
    message = (16 + len(body)).to_bytes(4, "little") + (0x400).to_bytes(2, "little") + bytes(10) + body
    assert parse(message) == [Refused("tcp", "1.1.1.1", 443)]
    assert parse(message + message[:20]) == [Refused("tcp", "1.1.1.1", 443)]


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed(data: bytes) -> None:
    head = (16 + len(data)).to_bytes(4, "little") + (0x400).to_bytes(2, "little") + bytes(10)
    assert isinstance(parse(data), list)
    assert isinstance(parse(head + data), list)
