"""The tokens of the next page: a position in the services' words, good for the list that gave it and for no other.

A list in another order or with another filter has another sequence; going on in it from there would leave things out
without a word.
"""

import hashlib
from typing import Final

from skerry.api.e2b.control.models import Query
from skerry.core.errors import InvalidRequest

NEXT: Final = "x-next-token"
_MAY_CHANGE: Final = {"next_token", "limit"}
_MARK_CHARS: Final = 8


def cursor_of(query: Query) -> str | None:
    """Where the list that `query` asks for goes on; None for its beginning. Raises InvalidRequest."""
    token: str | None = getattr(query, "next_token", None)
    if not token:
        return None
    if token[:_MARK_CHARS] != _mark(query):
        raise InvalidRequest.of("nextToken", "is not a token of this list", given=token)
    return token[_MARK_CHARS:]


def headers_of(query: Query, next_cursor: str | None) -> dict[str, str]:
    """What tells the client of the next page, if there is one."""
    return {} if next_cursor is None else {NEXT: _mark(query) + next_cursor}


def _mark(query: Query) -> str:
    asked = type(query).__name__ + query.model_dump_json(exclude=_MAY_CHANGE)
    return hashlib.sha256(asked.encode()).hexdigest()[:_MARK_CHARS]
