"""Step tokens: stand-ins for a credential that live for a minute, and what each may be traded for. Pure.

A grant says what its holder may do; its token is what the holder shows. A renewal gives another token for the same
grant. The one before is good for a few seconds more, so that what is under way is not cut off; one that was not renewed
in time can still be renewed for as long, but not traded. A use outside the scope revokes the grant, whoever made it.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from skerry.core.errors import Problem
from skerry.core.limits import check_range

TTL: Final = timedelta(seconds=60)
GRACE: Final = timedelta(seconds=10)
BUDGET_MAX: Final = 10_000
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
HOST: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
REPOSITORY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
PATH_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+){1,32}/?|/")
PATH_MAX: Final = 8192
_API_ROOTS: Final = ("", "/api/v3", "/api/v1")
"""Where the repositories of the common hosts' interfaces are, below `/repos/`."""
_ODD: Final = re.compile(r"[%\\;\x00-\x1f\x7f]|//|(^|/)\.{1,2}(/|\Z)")
"""What servers read in different ways: a path that has any of it when it is unescaped is outside every scope."""
_VISIBLE: Final = re.compile(r"/[\x21-\x7e]*")
_PREFIX: Final = "skst_"
_TOKEN: Final = re.compile(rf"{_PREFIX}[A-Za-z0-9_-]{{43}}")


class Refusal(StrEnum):
    """Why a token is not traded."""

    UNKNOWN = "unknown"  # no grant has it, or no longer
    EXPIRED = "expired"
    REVOKED = "revoked"
    HOST = "host"
    METHOD = "method"
    PATH = "path"
    REPOSITORY = "repository"
    BUDGET = "budget"

    @property
    def revokes(self) -> bool:
        """It was a use outside the scope."""
        return self in {Refusal.HOST, Refusal.METHOD, Refusal.PATH, Refusal.REPOSITORY, Refusal.BUDGET}


@dataclass(frozen=True, slots=True)
class StepScope:
    """What a token may be used for; all of it must fit."""

    host: str
    methods: frozenset[str]
    path_prefix: str = "/"
    """Whole segments: `/a` is `/a` and what is below `/a/`."""
    repository: str | None = None
    """`owner/name`: over git's HTTP (`/owner/name`, with `.git` or without), below `/repos/owner/name` of an API."""
    budget: int = 100
    """So many requests."""


@dataclass(frozen=True, slots=True)
class Use:
    """A request that shows a token: its path is without the query."""

    host: str
    method: str
    path: str


@dataclass(frozen=True, slots=True)
class Grant:
    id: str
    scope: StepScope
    secret: str
    """The reference of the credential that it stands for."""
    step: str | None
    """What its maker calls the step."""
    actor: str
    minted_at: datetime
    expires_at: datetime
    current: bytes
    """A digest of the token; the token itself is kept nowhere."""
    left: int
    """Of the budget."""
    previous: bytes | None = None
    previous_until: datetime | None = None
    revoked: Refusal | None = None


def new_token() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    return _TOKEN.fullmatch(text) is not None


def digest(token: str) -> bytes:
    """A token has 256 random bits: nothing slower is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def check_scope(scope: StepScope) -> Iterator[Problem]:
    if not HOST.fullmatch(scope.host):
        yield Problem("host", "is not a host's name in lower case", scope.host, HOST.pattern)
    if not scope.methods or not scope.methods <= METHODS:
        yield Problem("methods", "must be some of these", sorted(scope.methods), ", ".join(sorted(METHODS)))
    if not PATH_PREFIX.fullmatch(scope.path_prefix) or _ODD.search(scope.path_prefix):
        yield Problem("path_prefix", "is not a plain path", scope.path_prefix, PATH_PREFIX.pattern)
    if scope.repository is not None and not REPOSITORY.fullmatch(scope.repository):
        yield Problem("repository", "must be owner/name", scope.repository, REPOSITORY.pattern)
    yield from check_range("budget", scope.budget, 1, BUDGET_MAX)


def outside(scope: StepScope, use: Use) -> Refusal | None:
    """What of a use does not fit the scope."""
    if use.host.lower().rstrip(".") != scope.host:
        return Refusal.HOST
    if use.method not in scope.methods:
        return Refusal.METHOD
    if not _plain(use.path) or not _below(use.path, scope.path_prefix):
        return Refusal.PATH
    if scope.repository is not None and not any(_below(use.path, root) for root in _roots(scope.repository)):
        return Refusal.REPOSITORY
    return None


def judge(grant: Grant, token: str, use: Use, now: datetime) -> tuple[Grant, Refusal | None]:
    """The grant after this use of its token, and why it is refused, if it is. A token that is not the grant's says
    nothing about the grant."""
    good_until = _good_until(grant, digest(token))
    if good_until is None:
        return grant, Refusal.UNKNOWN
    if grant.revoked is not None:
        return grant, Refusal.REVOKED
    if now >= good_until:
        return grant, Refusal.EXPIRED
    refusal = outside(grant.scope, use) or (Refusal.BUDGET if grant.left == 0 else None)
    if refusal is not None:
        return replace(grant, revoked=refusal), refusal
    return replace(grant, left=grant.left - 1), None


def renewed(grant: Grant, token: str, new: str, now: datetime) -> tuple[Grant, Refusal | None]:
    """The grant with another token, good for a minute from now. Only its current token renews it: who shows the one
    before has lost the race, and is told `unknown`."""
    if not hmac.compare_digest(digest(token), grant.current):
        return grant, Refusal.UNKNOWN
    if grant.revoked is not None:
        return grant, Refusal.REVOKED
    if forgotten(grant, now):
        return grant, Refusal.EXPIRED
    until = min(grant.expires_at, now + GRACE)
    made = replace(grant, current=digest(new), previous=grant.current, previous_until=until, expires_at=now + TTL)
    return made, None


def owns(grant: Grant, token: str) -> bool:
    """Whether it is the grant's token, or was until the last renewal."""
    return _good_until(grant, digest(token)) is not None


def forgotten(grant: Grant, now: datetime) -> bool:
    """Nothing brings it back."""
    return now >= grant.expires_at + GRACE


def _good_until(grant: Grant, shown: bytes) -> datetime | None:
    if hmac.compare_digest(shown, grant.current):
        return grant.expires_at
    if grant.previous is not None and hmac.compare_digest(shown, grant.previous):
        return grant.previous_until
    return None


def _plain(path: str) -> bool:
    if len(path) > PATH_MAX or not _VISIBLE.fullmatch(path):
        return False
    return not _ODD.search(unquote(path, errors="surrogateescape"))


def _below(path: str, root: str) -> bool:
    root = root.rstrip("/")
    return path == root or path.startswith(f"{root}/")


def _roots(repository: str) -> Iterator[str]:
    yield f"/{repository}"
    yield f"/{repository}.git"
    for api in _API_ROOTS:
        yield f"{api}/repos/{repository}"
