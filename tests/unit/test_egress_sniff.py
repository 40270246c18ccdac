"""From first bytes to what a client wants: real ClientHellos, cut in every way, and bytes that are nonsense."""

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.egress.sniff import Hello, Kind, Malformed, MoreNeeded, sniff


def client_hello(name: str | None, alpn: tuple[str, ...] = ()) -> bytes:
    """What a TLS client says first, as this machine's OpenSSL writes it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


def records(handshake: bytes, size: int) -> bytes:
    """The same message in records of `size` bytes."""
    parts = [handshake[at : at + size] for at in range(0, len(handshake), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


def with_extension(hello: bytes, kind: int, body: bytes) -> bytes:
    """A ClientHello with one more extension at its end."""
    message = hello[9:]
    session = 34 + 1 + message[34]
    suites = session + 2 + int.from_bytes(message[session : session + 2], "big")
    methods = suites + 1 + message[suites]
    extensions = message[methods + 2 :] + kind.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body
    message = message[:methods] + len(extensions).to_bytes(2, "big") + extensions
    return records(b"\x01" + len(message).to_bytes(3, "big") + message, 16384)


def server_names(*names: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes([kind]) + len(name).to_bytes(2, "big") + name for name in names)
    return len(entries).to_bytes(2, "big") + entries


def test_the_name_a_client_gives() -> None:
    assert sniff(client_hello("Allowed.test", ("h2", "http/1.1"))) == Hello(Kind.TLS, "Allowed.test")
    assert sniff(client_hello(None)) == Hello(Kind.TLS, None)


@pytest.mark.parametrize("size", [1, 2, 5, 100, 16384])
def test_a_hello_in_many_records_and_pieces(size: int) -> None:
    whole = records(client_hello("allowed.test")[5:], size)
    for cut in range(0, len(whole), 7):
        with pytest.raises(MoreNeeded):
            sniff(whole[:cut])
    assert sniff(whole).name == "allowed.test"
    assert sniff(whole + client_hello("evil.test")).name == "allowed.test"


def test_a_hidden_name_is_seen() -> None:
    assert sniff(with_extension(client_hello("outer.test"), 0xFE0D, b"\0\0\1\0\1")).hidden_name


@pytest.mark.parametrize(
    "body",
    [
        *(b"", server_names(), server_names(b""), server_names(b"a.test", b"b.test"), server_names(b"a.test", kind=1)),
        *(server_names(b"a\0.test"), server_names("bücher".encode()), server_names(b"a.test") + b"x", b"\0\5\0\0\1a"),
    ],
)
def test_a_server_name_that_is_none(body: bytes) -> None:
    with pytest.raises(Malformed):
        sniff(with_extension(client_hello(None), 0, body))


def test_two_server_names() -> None:
    with pytest.raises(Malformed, match="twice"):
        sniff(with_extension(client_hello("a.test"), 0, server_names(b"b.test")))


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x16\x02\x01\0\1\1", b"\x16\x03\x01\0\0", b"\x16\x03\x01\xff\xff\1", b"\x16\x03\x01\0\4\2\0\0\0"),
        *(b"\x16\x03\x01\0\4\1\xff\xff\xff", records(b"\1\0\0\4" + bytes(4), 3)),
        records(b"\1\0\1\xfc" + bytes(20), 9)[:14] + b"\x15\x03\x01\0\1\0",
    ],
)
def test_a_hello_that_cannot_be(data: bytes) -> None:
    with pytest.raises(Malformed):
        sniff(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\n", Kind.HTTP),
        (b"GET http://a.test/ HTTP/1.0\n", Kind.HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Kind.HTTP2),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Kind.OTHER),
        (b"EHLO me\r\n", Kind.OTHER),
        (b"*1\r\n$4\r\nPING\r\n", Kind.OTHER),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", Kind.OTHER),
        (b"A" * 33 + b" ", Kind.OTHER),
        (b"GET " + b"a" * 17_000, Kind.OTHER),
    ],
)
def test_what_is_spoken(data: bytes, kind: Kind) -> None:
    assert sniff(data).kind is kind


@pytest.mark.parametrize("data", [b"", b"G", b"GET", b"GET /", b"PRI * HTTP/2.0\r\n\r\nS"])
def test_what_is_not_clear_yet(data: bytes) -> None:
    with pytest.raises(MoreNeeded):
        sniff(data)


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda tail: b"\x16\x03\x01" + tail)))
def test_any_bytes_get_an_answer(data: bytes) -> None:
    with contextlib.suppress(MoreNeeded, Malformed):
        assert isinstance(sniff(data), Hello)


HELLO = client_hello("allowed.test")


@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_a_hello_with_one_wrong_byte_gets_an_answer(at: int, value: int) -> None:
    with contextlib.suppress(MoreNeeded, Malformed):
        assert isinstance(sniff(HELLO[:at] + bytes([value]) + HELLO[at + 1 :]), Hello)
