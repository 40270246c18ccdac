"""Redaction against a plain search over the whole text, however the text was cut."""

import base64
import itertools
import json
import random
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.core.redact import Redactor, redactable

VALUE = b"pg://app:hunt/er2 &co@db+1"
PEM = b"-----BEGIN KEY-----\nabcDEF+/0123456789\nzyx987==\n-----END KEY-----\n"

texts = st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\r\n"), min_size=8)
values = texts.map(str.encode).filter(redactable)
noise = st.binary(max_size=40)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def through(redactor: Redactor, parts: list[bytes]) -> bytes:
    stream = redactor.stream()
    return b"".join([*(stream.feed(part) for part in parts), stream.flush()])


def forms(value: bytes) -> list[bytes]:
    """What programs make of a value, written down anew."""
    text = value.decode()
    return [
        value,
        quote(value, safe="").encode(),
        quote(value).encode(),
        quote_plus(value).encode(),
        quote(value, safe="").lower().encode() if quote(value, safe="") == value.decode() else value,
        json.dumps(text)[1:-1].encode(),
        json.dumps(text, ensure_ascii=False)[1:-1].encode(),
        json.dumps(text)[1:-1].replace("/", "\\/").encode(),
    ]


@given(st.lists(values, min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_the_same_whatever_the_cuts(secrets: list[bytes], data: st.DataObject) -> None:
    redactor = Redactor(secrets)
    kinds = st.sampled_from([form for secret in secrets for form in forms(secret)])
    parts = data.draw(st.lists(st.one_of(noise, kinds, kinds.map(lambda form: form[: len(form) // 2])), max_size=12))
    text = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, 2**31), max_size=30))
    whole = redactor.redact(text)
    assert len(whole) == len(text)
    assert through(redactor, pieces(text, cuts)) == whole
    assert not any(form in whole for secret in secrets for form in forms(secret))


@given(values, noise, noise, st.lists(st.integers(0, 2**31), max_size=30))
@settings(max_examples=150, deadline=None)
def test_what_holds_no_value_passes_untouched(secret: bytes, before: bytes, after: bytes, cuts: list[int]) -> None:
    """Bytes that are no text, characters that were cut, beginnings of values: as they were."""
    text = before + secret[:-1] + after + "träumerei ".encode()[:-3]
    if any(form in text for form in [secret, *forms(secret)]):
        return
    redactor = Redactor([secret])
    if redactor.redact(text) == text:
        assert through(redactor, pieces(text, cuts)) == text
    # Where only the base64 of a value is looked for besides, nothing of its letters may stand there by chance.
    assert set(redactor.redact(text)) - set(text) <= {0x2A}


@given(values, noise, noise, st.integers(1, 76), st.booleans(), st.lists(st.integers(0, 2**31), max_size=20))
@settings(max_examples=200, deadline=None)
def test_base64_at_every_alignment_and_wrapped(
    secret: bytes, before: bytes, after: bytes, width: int, url: bool, cuts: list[int]
) -> None:
    """All letters that are the value's alone are masked, all others are there."""
    encode = base64.urlsafe_b64encode if url else base64.b64encode
    encoded = encode(before + secret + after)
    wrapped = b"\n".join(encoded[at : at + width] for at in range(0, len(encoded), width))
    first, last = -(-8 * len(before) // 6), 8 * len(before + secret) // 6
    redactor = Redactor([secret])
    shown = redactor.redact(wrapped).translate(None, b"\n")
    assert shown[first:last] == b"*" * (last - first)
    streamed = through(redactor, pieces(wrapped, cuts)).translate(None, b"\n")
    assert len(streamed) == len(encoded)
    # A few letters at the end of a line are not held back: they may show, and the rest is masked none the less.
    assert streamed[first + 7 : last] == b"*" * (last - first - 7)


@given(values, noise, noise, st.lists(st.integers(0, 2**31), max_size=20))
@settings(max_examples=100, deadline=None)
def test_an_early_flush_shows_a_few_first_bytes_at_most(
    secret: bytes, before: bytes, after: bytes, cuts: list[int]
) -> None:
    stream = Redactor([secret]).stream()
    out = b""
    for piece in pieces(before + secret + after, cuts):
        out += stream.feed(piece) + stream.flush(early=True)
        assert stream.held == 0
    assert len(out) == len(before + secret + after)
    place = (before + secret + after).find(secret)
    assert set(out[place + 7 : place + len(secret)]) <= {0x2A}


def test_a_value_written_byte_by_byte_is_masked_from_its_eighth_on() -> None:
    stream = Redactor([VALUE]).stream()
    out = b"".join(stream.feed(bytes([byte])) + stream.flush(early=True) for byte in VALUE + b" ok")
    assert out == VALUE[:7] + b"*" * (len(VALUE) - 7) + b" ok"


def test_what_turns_out_to_be_no_value_is_shown_again() -> None:
    stream = Redactor([VALUE]).stream()
    assert stream.feed(VALUE[:10]) + stream.flush(early=True) == b"*" * 10
    assert stream.feed(b"!fine") + stream.flush() == b"!fine"


def test_more_to_look_for_may_come_in_the_middle_of_a_value() -> None:
    stream = Redactor([VALUE]).stream()
    assert stream.feed(b"a " + VALUE[:10]) == b"a "
    stream.widen(Redactor([VALUE, b"another-Xq7-value"]))
    assert stream.feed(VALUE[10:] + b" another-Xq7-value.") == b"*" * len(VALUE) + b" " + b"*" * 17 + b"."


def test_a_text_that_was_cut_in_a_value_does_not_end_with_its_beginning() -> None:
    redactor = Redactor([VALUE])
    assert redactor.text("x " + VALUE[:12].decode()) == "x " + "*" * 12
    assert redactor.text("x " + VALUE[:7].decode()) == "x " + VALUE[:7].decode()


def test_line_breaks_are_the_terminals_own() -> None:
    """A key of several lines, as a file has it, as a terminal writes it, and without its last line break."""
    redactor = Redactor([PEM])
    for text in (PEM, PEM.replace(b"\n", b"\r\n"), PEM.rstrip(b"\n")):
        shown = redactor.redact(b"key:\n" + text + b"end")
        assert b"abcDEF" not in shown
        assert b"BEGIN" not in shown
        assert shown.startswith(b"key:\n")
        assert shown.endswith(b"end")
        assert shown.count(b"\n") == (b"key:\n" + text).count(b"\n")


def test_what_is_held_is_bounded_and_released_when_it_is_no_value() -> None:
    redactor = Redactor([VALUE])
    stream = redactor.stream()
    assert stream.feed(b"user " + VALUE[:10]) == b"user "
    assert stream.held == 10
    assert stream.feed(b"!") == VALUE[:10] + b"!"
    assert stream.held == 0
    for _ in range(1000):
        stream.feed(VALUE[:10] + b"\n" * 1000)
        assert stream.held <= redactor.longest


def test_positions_stay_what_they_are() -> None:
    shown = Redactor([VALUE]).redact(b"<" + VALUE + b">")
    assert shown == b"<" + b"*" * len(VALUE) + b">"


def test_overlapping_values_are_all_masked() -> None:
    redactor = Redactor([b"abcdefghij", b"fghijklmno"])
    assert redactor.redact(b"-abcdefghijklmno-") == b"-" + b"*" * 15 + b"-"
    assert through(redactor, [b"-abcdefghij", b"klm", b"no-"]) == b"-" + b"*" * 15 + b"-"


@pytest.mark.parametrize("value", [b"", b"short", b"aaaaaaaaaaaa", b"abc\n\n\n\n\n\n\n"])
def test_a_value_that_would_be_found_everywhere_is_refused(value: bytes) -> None:
    assert not redactable(value)
    with pytest.raises(ValueError, match="too short or too plain"):
        Redactor([value])


def test_texts_with_odd_characters() -> None:
    redactor = Redactor([VALUE])
    assert redactor.text("é" + VALUE.decode() + "\udcff") == "é" + "*" * len(VALUE) + "\udcff"
    assert redactor.text("\ud800 stays") == "\ud800 stays"


def test_a_text_made_of_beginnings_takes_time_by_its_length() -> None:
    """Whoever writes the first bytes of a long value over and over cannot make the server compare for ever."""
    secret = b"abcd" * 8191 + b"!!!!"
    stream = Redactor([secret]).stream()

    def seconds(size: int) -> float:
        text = b"abcd" * (size // 4)
        began = time.process_time()
        for at in range(0, size, 4096):
            stream.feed(text[at : at + 4096])
        return time.process_time() - began

    seconds(65_536)
    assert seconds(262_144) < 12 * seconds(65_536) + 0.5


def test_random_bytes_are_never_changed() -> None:
    rng = random.Random(7)
    redactor = Redactor([VALUE, PEM])
    data = rng.randbytes(1 << 20)
    assert redactor.redact(data) == data
