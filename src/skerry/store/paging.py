"""Keyset pagination: a page ends at a row, not at a count, so rows that come and go shift nothing."""

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from skerry.core.errors import InvalidRequest

T = TypeVar("T")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None
    """None: this was the last page."""


def encode_cursor(*position: int | str) -> str:
    """An opaque text for a position. It holds nothing that the page did not show."""
    text = json.dumps(position, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type) -> list[int | str]:
    """The position. Raises InvalidRequest for whatever `encode_cursor` would not have made."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        position = json.loads(raw)
    except (ValueError, binascii.Error, RecursionError):
        position = None
    if (
        isinstance(position, list)
        and [type(p) for p in position] == list(kinds)
        and all(not isinstance(p, int) or 0 <= p < 2**62 for p in position)
    ):
        return position
    raise InvalidRequest.of("cursor", "is not a cursor of this list", given=cursor, allowed="a next_cursor as given")


def micros(at: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    return (at - EPOCH) // timedelta(microseconds=1)


def from_micros(value: int) -> datetime:
    """Raises InvalidRequest for what no calendar holds: it can only come from a made-up cursor."""
    try:
        return EPOCH + timedelta(microseconds=value)
    except OverflowError:
        raise InvalidRequest.of("cursor", "is not a cursor of this list", allowed="a next_cursor as given") from None
