"""The codec: any split of the stream gives the same frames, and nonsense gives a typed error."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.guest import protocol
from skerry.guest.protocol import Decoder, ProtocolError

KINDS = st.sampled_from(sorted(protocol.FROM_GUEST))
FRAMES = st.lists(st.tuples(KINDS, st.binary(max_size=600)), max_size=12)


def decode(data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    decoder = Decoder(protocol.FROM_GUEST)
    frames = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        decoder.feed(data[start:end])
        while (frame := decoder.next()) is not None:
            frames.append(frame)
    return frames


@given(FRAMES, st.lists(st.integers(min_value=0), max_size=30))
def test_every_split_gives_the_same_frames(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(protocol.frame(kind, payload) for kind, payload in frames)
    assert decode(data, cuts) == frames


@given(st.binary(max_size=2000), st.lists(st.integers(min_value=0), max_size=10))
def test_garbage_gives_frames_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    try:
        frames = decode(data, cuts)
    except ProtocolError:
        return
    assert all(kind in protocol.FROM_GUEST and len(payload) <= protocol.MAX_PAYLOAD for kind, payload in frames)


@given(st.integers(min_value=protocol.MAX_PAYLOAD + 1, max_value=2**32 - 1), st.integers(0, 255))
def test_a_long_frame_is_refused_by_its_header(length: int, kind: int) -> None:
    decoder = Decoder(protocol.FROM_GUEST)
    decoder.feed(protocol.HEADER.pack(length, kind))
    with pytest.raises(ProtocolError):
        decoder.next()


@given(st.integers(0, 255).filter(lambda k: k not in protocol.FROM_HOST))
def test_a_kind_of_the_other_direction_is_refused(kind: int) -> None:
    decoder = Decoder(protocol.FROM_HOST)
    decoder.feed(protocol.HEADER.pack(0, kind))
    with pytest.raises(ProtocolError):
        decoder.next()


# Python's names for bytes that are not UTF-8 are the low surrogates from DC80 on.
TEXT = st.text(st.characters(codec="utf-8") | st.integers(0xDC80, 0xDCFF).map(chr))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_json_round_trips_lone_surrogates_included(value: object) -> None:
    assert protocol.load(protocol.dump(value)) == value


@given(st.binary(max_size=300))
def test_what_is_not_json_is_a_protocol_error(data: bytes) -> None:
    try:
        protocol.load(data)
    except ProtocolError:
        return
    json.loads(data)


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b'{"a":' * 50_000, b"NaN", b"-Infinity", b"9" * 10_000, b"", b"\xff", b"{} {}"]
)
def test_hostile_json_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.load(data)


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"x"'])
def test_what_is_no_object_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.load_object(data)


def test_a_long_request_is_cut_into_parts() -> None:
    request = {"argv": ["x" * 1_000_000]}
    decoder = Decoder(protocol.FROM_HOST)
    decoder.feed(protocol.request_frames({"v": 1}, request))
    frames = []
    while (frame := decoder.next()) is not None:
        frames.append(frame)
    kinds = [kind for kind, _ in frames]
    assert kinds == [protocol.HELLO, *[protocol.PART] * 3, protocol.REQUEST]
    assert json.loads(b"".join(payload for _, payload in frames[1:])) == request
    assert decoder.buffered == 0
    with pytest.raises(ProtocolError):
        protocol.request_frames({}, {"argv": ["x" * protocol.MAX_REQUEST]})


def test_what_follows_the_frames_can_be_taken_raw() -> None:
    decoder = Decoder(protocol.FROM_GUEST)
    decoder.feed(protocol.frame(protocol.OK, b"{}") + b"raw")
    assert decoder.next() == (protocol.OK, b"{}")
    assert decoder.take_rest() == b"raw"
    assert decoder.take_rest() == b""
