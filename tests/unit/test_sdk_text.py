"""Bytes to text and lines, wherever they are cut."""

import base64
import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry import InternalError
from skerry.sdk.models import Exited, Gap, Output, Started
from skerry.sdk.text import LINE_MAX, Capture, Ndjson, TextStream, decode
from skerry.sdk.transcript import Transcript

# Text with characters of every length, cut and damaged: what makes decoders differ.
DAMAGED = st.lists(
    st.one_of(
        st.text().map(lambda t: t.encode("utf-8", "replace")),
        st.binary(max_size=6),
        st.sampled_from([b"\xe2", b"\xe2\x89", b"\xf0\x9f\x98", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5", b"\x80"]),
    ),
    max_size=12,
).map(b"".join)


@st.composite
def pieces(draw: Callable[..., bytes], data: st.SearchStrategy[bytes] = DAMAGED) -> tuple[bytes, list[bytes]]:
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))  # pyright: ignore[reportArgumentType]
    edges = [0, *cuts, len(whole)]
    return whole, [whole[a:b] for a, b in itertools.pairwise(edges)]


@given(pieces())
def test_text_does_not_depend_on_where_it_was_cut(cut: tuple[bytes, list[bytes]]) -> None:
    whole, parts = cut
    stream = TextStream()
    assert "".join(stream.feed(part) for part in parts) + stream.flush() == whole.decode("utf-8", "replace")


@given(pieces(), st.integers(0, 30))
def test_a_capture_keeps_the_first_bytes_and_tells_all(cut: tuple[bytes, list[bytes]], limit: int) -> None:
    whole, parts = cut
    capture = Capture(limit)
    text = ""
    for part in parts:
        data, new = capture.feed(capture.offset, part)
        assert data == part
        text += new
    assert text + capture.flush() == decode(whole)
    assert capture.data == whole[:limit]
    assert capture.truncated == (len(whole) > limit)
    assert capture.offset == len(whole)


@given(pieces(), st.integers(0, 20))
def test_what_is_sent_twice_is_taken_once(cut: tuple[bytes, list[bytes]], back: int) -> None:
    whole, parts = cut
    capture = Capture(1 << 20)
    at = 0
    for part in parts:
        start = max(0, at - back)
        assert capture.feed(start, whole[start : at + len(part)])[0] == part
        at += len(part)
    assert capture.data == whole


def test_a_gap_ends_a_character_and_marks_the_loss() -> None:
    capture = Capture(100)
    assert capture.feed(0, b"a\xe2\x89")[1] == "a"
    assert capture.gap(10) == "�"
    assert capture.feed(10, b"\xa4b")[1] == "�b"
    assert capture.truncated
    assert capture.offset == 12


def test_text_that_was_cut_by_the_limit_ends_with_a_whole_character() -> None:
    capture = Capture(4)
    capture.feed(0, "aé≤".encode())
    assert decode(capture.data, whole=False) == "aé"


@given(
    st.lists(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none())), max_size=6),
    st.lists(st.integers(0, 400), max_size=10),
    st.booleans(),
)
def test_lines_do_not_depend_on_where_the_stream_was_cut(
    objects: list[dict], cuts: list[int], ascii_only: bool
) -> None:
    whole = b"".join(json.dumps(o, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"\n" for o in objects)
    edges = [0, *sorted(min(c, len(whole)) for c in cuts), len(whole)]
    lines = Ndjson()
    found = [o for a, b in itertools.pairwise(edges) for o in lines.feed(whole[a:b])]
    assert [json.dumps(o) for o in found] == [json.dumps(o) for o in objects]
    assert not lines.partial


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"1\n", b'{"a": \n'])
def test_a_line_that_is_no_object_is_an_error(line: bytes) -> None:
    with pytest.raises(InternalError) as caught:
        list(Ndjson().feed(line))
    assert caught.value.code == "bad_answer"


def test_an_endless_line_is_an_error() -> None:
    lines = Ndjson()
    list(lines.feed(b"x" * LINE_MAX))
    assert lines.partial
    with pytest.raises(InternalError):
        list(lines.feed(b"x"))


def output(stream: str, offset: int, data: bytes) -> dict:
    return {"type": stream, "offset": offset, "data": base64.b64encode(data).decode()}


def test_a_transcript_of_a_run() -> None:
    seen = Transcript()
    started = {"type": "started", "process_id": "pr1", "pid": 7}
    assert seen.take(started) == [Started("pr1", 7)]
    assert seen.take(started) == [], "a stream that is taken up again starts anew, the process does not"
    assert seen.take(output("stdout", 0, b"a\xe2")) == [Output("stdout", 0, b"a\xe2", "a")]
    assert seen.take(output("stderr", 0, b"err")) == [Output("stderr", 0, b"err", "err")]
    assert seen.take({"type": "gap", "stream": "stdout", "offset": 2, "missed": 5}) == [
        Output("stdout", 2, b"", "�"),
        Gap("stdout", 2, 5),
    ]
    assert seen.take(output("stdout", 7, b"z\xe2")) == [Output("stdout", 7, b"z\xe2", "z")]
    assert seen.take({"type": "something newer"}) == []
    *rest, last = seen.take(
        {"type": "exit", "reason": "signal", "exit_code": None, "signal": "SIGTERM", "duration_ms": 1500}
    )
    assert rest == [Output("stdout", 9, b"", "�")]
    assert isinstance(last, Exited)
    result = seen.outcome()
    assert (result.exit_code, result.signal, result.code, result.duration) == (None, "SIGTERM", 143, 1.5)
    assert (result.stdout_bytes, result.stdout_truncated, result.stderr_truncated) == (b"a\xe2z\xe2", True, False)
    assert not result.ok


@pytest.mark.parametrize(
    "event",
    [
        {"type": "stdout", "offset": 0, "data": "*"},
        {"type": "stdout", "offset": 0},
        {"type": "stdout", "offset": None, "data": ""},
        {"type": "gap", "stream": "nowhere", "offset": 0, "missed": 1},
        {"type": "started"},
        {"type": "exit", "reason": "exit"},
        {},
    ],
)
def test_an_event_of_the_wrong_form_is_an_error(event: dict) -> None:
    with pytest.raises(InternalError) as caught:
        Transcript().take(event)
    assert caught.value.code == "bad_answer"


def test_an_exit_without_a_code_is_never_zero() -> None:
    seen = Transcript()
    seen.take({"type": "exit", "reason": "signal", "exit_code": None, "signal": "SIGNEW", "duration_ms": 0})
    assert seen.outcome().code == 255
    nothing = Transcript()
    nothing.take({"type": "exit", "reason": "exit", "exit_code": None, "signal": None, "duration_ms": 0})
    with pytest.raises(InternalError):
        _ = nothing.outcome().code


def test_an_outcome_without_an_exit_is_an_error() -> None:
    with pytest.raises(InternalError):
        Transcript("pr1").outcome()
