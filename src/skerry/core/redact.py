"""Taking secret values out of bytes that stream by, in whatever pieces they come. Pure.

Each byte of a value becomes `*`, so that positions in a stream stay what they are; line breaks stay line breaks. Found
are the value itself, its base64 in each of the three alignments (standard and URL-safe, wrapped into lines or not), its
URL-escaped and its JSON-escaped forms.

Where something was found does not depend on how the stream was cut, as long as nothing is flushed before its end: what
may be the beginning of a value is held back until it is known. Whoever flushes early, so as not to delay it, shows at
most the first bytes of a value: what follows them is masked, be it a value in the end or not.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, quote_plus

from ahocorasick_rs import BytesAhoCorasick, Implementation

VALUE_BYTES_MIN: Final = 8
"""Shorter values would be found everywhere."""
VALUE_DISTINCT_MIN: Final = 4
"""So many different bytes a value must have: `00000000` would be found everywhere, too."""
_HEAD: Final = 8
"""So many first bytes of each form are looked for; where they are, the rest is compared."""
_DFA_FROM: Final = 64
"""From so many heads on, a whole automaton is faster than the library's own choice."""
_BREAKS: Final = b"\r\n"
_MASK: Final = bytes(byte if byte in _BREAKS else 0x2A for byte in range(256))
_URL_SAFE: Final = ("", "/", "!'()*", ";,/?:@&=+$!'()*#")
"""What `quote`, encodeURIComponent and encodeURI leave as it is."""


def redactable(value: bytes) -> bool:
    """Whether a value is long and varied enough to be looked for."""
    flat = value.translate(None, _BREAKS)
    return len(flat) >= VALUE_BYTES_MIN and len(set(flat)) >= VALUE_DISTINCT_MIN


class Redactor:
    """A set of values, compiled. Immutable; any number of streams may use it."""

    def __init__(self, values: Iterable[bytes]) -> None:
        """Raises ValueError for a value that is not `redactable`; never shows it."""
        plain: set[bytes] = set()
        wrapped: set[bytes] = set()
        for value in values:
            if not redactable(value):
                raise ValueError("a value is too short or too plain to be looked for")
            core = value.rstrip(_BREAKS)
            flat = core.translate(None, _BREAKS)
            if flat == core:
                plain.add(core)
            else:  # terminals write line breaks in their own way
                wrapped.add(flat)
            plain.update(_escaped(core))
            wrapped.update(_base64(core))
        self._plain = _Finder(plain)
        self._wrapped = _Finder(wrapped)
        self.longest = max(self._plain.longest, 2 * self._wrapped.longest)
        """The most bytes that a stream holds back."""

    def __bool__(self) -> bool:
        return self.longest > 0

    def stream(self) -> "RedactedStream":
        return RedactedStream(self)

    def redact(self, data: bytes) -> bytes:
        """All of it at once."""
        found, _, _ = self.look(data)
        return _masked(data, found) if found else data

    def cut(self, data: bytes) -> bytes:
        """All of it at once, where its end may not be the end of what was said: a value's beginning there goes too,
        unless it is shorter than what is looked for."""
        out, at = self.redact(data), self._beginning(data)
        return out if at == len(data) else out[:at] + data[at:].translate(_MASK)

    def _beginning(self, data: bytes) -> int:
        """From where on it is the beginning of a value; its length where none is, or too short a one to tell."""
        _, at = self._plain.find(data)
        if len(data) - at < _HEAD:
            at = len(data)
        flat = data.translate(None, _BREAKS)
        _, tail = self._wrapped.find(flat)
        return at if len(flat) - tail < _HEAD else min(at, _from_end(data, len(flat) - tail))

    def text(self, text: str) -> str:
        """A text that may have been cut; odd bytes may be carried in surrogate escapes."""
        raw = text.encode("utf-8", "surrogatepass" if _unpaired(text) else "surrogateescape")
        clean = self.cut(raw)
        return text if clean == raw else clean.decode("utf-8", "surrogateescape")

    def look(self, data: bytes) -> tuple[list[tuple[int, int]], int, int]:
        """Where values stand in it (in order, apart from each other); from where on it must be remembered, since what
        follows may make it one; and from where on it is to be held back for that."""
        found, keep = self._plain.find(data)
        hold = keep
        flat = data.translate(None, _BREAKS)
        wrapped, tail = self._wrapped.find(flat)
        if wrapped:
            where = _places(data)
            found += [(where[start], where[end - 1] + 1) for start, end in wrapped]
        if tail < len(flat):
            at = max(_from_end(data, len(flat) - tail), len(data) - 2 * self._wrapped.longest)
            keep = min(keep, at)
            # Few letters at the end of a line are rarely a value's: they are remembered, and do not wait.
            if len(flat) - tail >= _HEAD or data[-1] not in _BREAKS:
                hold = min(hold, at)
        return _merged(found), keep, hold


class RedactedStream:
    """One stream. What `feed` and `flush` give, joined, is as long as what was fed."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._context = b""
        """The end of what was fed, as it was, as far as it may be the beginning of a value."""
        self._given = 0
        """How much of that was given out already."""

    @property
    def held(self) -> int:
        """Bytes that were fed and not given out yet."""
        return len(self._context) - self._given

    def feed(self, data: bytes) -> bytes:
        """What of it can be given out now, with what was held back before."""
        whole = self._context + data if self._context else data
        found, keep, hold = self._redactor.look(whole)
        end = max(hold, self._given)
        end = next((stop for start, stop in found if start <= end < stop), end)
        out = (_masked(whole, found) if found else whole)[self._given : end]
        self._context, self._given = whole[keep:], end - keep
        return out

    def widen(self, redactor: Redactor) -> None:
        """Look for these from now on. They must be what was looked for until now, and more."""
        self._redactor = redactor

    def flush(self, *, early: bool = False) -> bytes:
        """All that was held back: at the end of a stream, or (`early`) because its time is up."""
        look = self._redactor.cut if early else self._redactor.redact
        out = look(self._context)[self._given :]
        self._given = len(self._context)
        return out


class _Finder:
    """Looks for some forms in one text."""

    def __init__(self, forms: Iterable[bytes]) -> None:
        by_head: dict[bytes, list[bytes]] = {}
        for form in sorted(forms):
            by_head.setdefault(form[:_HEAD], []).append(form)
        self._forms = list(by_head.values())
        self._beginnings = {head[:size] for head in by_head for size in range(1, _HEAD)}
        self.longest = max((len(form) for forms in self._forms for form in forms), default=0)
        implementation = Implementation.DFA if len(by_head) >= _DFA_FROM else None
        self._heads = BytesAhoCorasick(by_head, implementation=implementation)

    def find(self, data: bytes) -> tuple[list[tuple[int, int]], int]:
        """Where forms stand, and from where on the text may be the beginning of one; its length where none is."""
        size = len(data)
        tail = size
        found: list[tuple[int, int]] = []
        for head, start, _ in self._heads.find_matches_as_indexes(data, overlapping=True):
            for form in self._forms[head]:
                end = start + len(form)
                if end <= size:
                    if data.startswith(form, start):
                        found.append((start, end))
                elif start < tail and form.startswith(data[start:]):
                    tail = start
        if tail == size:
            tail -= next((n for n in range(min(_HEAD - 1, size), 0, -1) if data[-n:] in self._beginnings), 0)
        return found, tail


def _places(data: bytes) -> list[int]:
    """Where each byte of a text without its line breaks stands in the text itself."""
    return [place for place, byte in enumerate(data) if byte not in _BREAKS]


def _from_end(data: bytes, count: int) -> int:
    """Where the last `count` bytes that are no line breaks begin."""
    place = len(data)
    while count:
        place -= 1
        count -= data[place] not in _BREAKS
    return place


def _merged(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _masked(data: bytes, found: list[tuple[int, int]]) -> bytes:
    out = bytearray(data)
    for start, end in found:
        out[start:end] = data[start:end].translate(_MASK)
    return bytes(out)


def _unpaired(text: str) -> bool:
    """Whether it holds a surrogate that stands for no byte."""
    return any("\ud800" <= letter < "\udc80" or "\udcff" < letter <= "\udfff" for letter in text)


def _base64(value: bytes) -> Iterator[bytes]:
    """The letters that are the value's alone, wherever in a longer text it stands."""
    for lead in range(3):
        first, last = -(-8 * lead // 6), 8 * (lead + len(value)) // 6
        yield base64.b64encode(bytes(lead) + value)[first:last]
        yield base64.urlsafe_b64encode(bytes(lead) + value)[first:last]


def _escaped(value: bytes) -> Iterator[bytes]:
    for safe in _URL_SAFE:
        quoted = quote(value, safe=safe)
        yield from _either_case(quoted)
    yield from _either_case(quote_plus(value))
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return
    for ascii_only in (False, True):
        inner = json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode()
        yield inner
        yield inner.replace(b"/", b"\\/")


def _either_case(quoted: str) -> Iterator[bytes]:
    """`%2F` may be written `%2f`."""
    yield quoted.encode()
    parts = quoted.split("%")
    yield "%".join([parts[0], *(part[:2].lower() + part[2:] for part in parts[1:])]).encode()
