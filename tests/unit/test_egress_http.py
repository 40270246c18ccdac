"""Every request of a connection names the host that was looked up, or does not pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.egress.http import HEAD_MAX, RequestGuard
from skerry.egress.sniff import Malformed


class Wrong(Exception):
    pass


def guard() -> RequestGuard:
    def check(host: str | None, port: int | None) -> None:
        if host != "a.test" or port not in {None, 80}:
            raise Wrong(f"{host}:{port}")

    return RequestGuard(check)


GOOD = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
EVIL = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a.test:80\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: 1\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@given(st.lists(st.sampled_from([GOOD, POST, CHUNKED]), min_size=1, max_size=4), st.data())
def test_honest_requests_pass_as_they_are(requests: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    g = guard()
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(g.feed(piece) for piece in pieces if piece) == whole


@given(st.lists(st.sampled_from([GOOD, POST, CHUNKED]), max_size=3), st.integers(1, 40))
def test_no_byte_of_a_head_that_names_another_host_passes(before: list[bytes], size: int) -> None:
    whole = b"".join(before) + EVIL
    g = guard()
    passed = b""
    with pytest.raises(Wrong, match=r"evil\.test"):
        for at in range(0, len(whole), size):
            passed += g.feed(whole[at : at + size])
    assert b"".join(before).startswith(passed)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: evil.test\r\n\r\n",
        b"GET http://evil.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://evil.test/ HTTP/1.1\r\n\r\n",
        b"GET http://a.test@evil.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:99999\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a.test\n\n",
        b"GET / HTTP/1.1\r\nX: 1\r\n Host: a.test\r\n\r\n",
        UPGRADE + EVIL,
        GOOD + UPGRADE,
    ],
)
def test_requests_that_do_not_pass(request_: bytes) -> None:
    with pytest.raises((Malformed, Wrong)):
        guard().feed(request_)


def test_a_head_is_bounded() -> None:
    g = guard()
    g.feed(b"GET / HTTP/1.1\r\nX: ")
    with pytest.raises(Malformed, match=str(HEAD_MAX)):
        for _ in range(10):
            g.feed(b"a" * 8000)


def test_after_an_upgrade_that_was_agreed_to_anything_passes() -> None:
    g = guard()
    assert g.feed(UPGRADE) == UPGRADE
    assert g.waiting
    g.answered(101)
    assert g.feed(EVIL) == EVIL


def test_after_an_upgrade_that_was_refused_requests_are_judged_again() -> None:
    g = guard()
    g.feed(UPGRADE)
    g.answered(200)
    assert g.feed(GOOD) == GOOD
    with pytest.raises(Wrong):
        g.feed(EVIL)
