"""API keys.

A key's text is `skerry` and 40 characters of a 32-letter alphabet: `skerry[0-9a-hjkmnp-tv-z]{40}`, 200 random bits.
The fixed beginning is there for secret scanners. The store keeps its SHA-256 only. A slow password hash would add
nothing: it defends guessable secrets against someone who holds the hashes, and 200 random bits cannot be guessed; a
plain hash can be looked up by index, on every request.
"""

import hashlib
import secrets
import time
from collections.abc import Collection
from typing import Final

from skerry.audit import SYSTEM, AuditSink, Outcome
from skerry.control.config import ControlConfig
from skerry.control.principal import ALL_SCOPES, Principal, Scope
from skerry.control.recorder import Recorder, text
from skerry.core import ids
from skerry.core.api_keys import native_spelling
from skerry.core.errors import Forbidden, Problem, Unauthenticated
from skerry.core.limits import refuse
from skerry.store import ApiKey, Project, Store, Tenant

SECRET_PREFIX: Final = "skerry"  # noqa: S105 - the fixed beginning of every secret, not one
SECRET_RANDOM: Final = 40
SECRET_PATTERN: Final = SECRET_PREFIX + "[0-9a-hjkmnp-tv-z]{40}"
SHOWN: Final = len(SECRET_PREFIX) + 6
CACHE_S: Final = 10.0
CACHE_MAX: Final = 4096
REFUSAL_S: Final = 60.0
NAME_MAX: Final = 128
DEFAULT: Final = "default"


def new_secret() -> str:
    return SECRET_PREFIX + "".join(secrets.choice(ids.ALPHABET) for _ in range(SECRET_RANDOM))


def secret_hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class Keys:
    def __init__(self, store: Store, sink: AuditSink, recorder: Recorder, config: ControlConfig) -> None:
        self._store = store
        self._sink = sink
        self._recorder = recorder
        self._config = config
        self._cache: dict[bytes, tuple[float, Principal]] = {}
        self._used: set[str] = set()
        self._refused: dict[str, float] = {}
        self._revocations = 0

    async def authenticate(self, secret: str | None) -> Principal:
        """Who holds this key. Raises Unauthenticated `key_missing`, `key_unknown` or `key_revoked` (which only someone
        who holds the whole key gets to see).

        An answer is kept for `CACHE_S`; a revocation through this process counts at once.
        """
        if not secret:
            raise Unauthenticated("no API key was given", code="key_missing")
        hashed = secret_hash(native_spelling(secret))
        found = self._cache.get(hashed)
        if found is not None and found[0] > time.monotonic():
            principal = found[1]
        else:
            self._cache.pop(hashed, None)
            principal = await self._look_up(hashed)
        self._used.add(principal.key_id)
        return principal

    async def _look_up(self, hashed: bytes) -> Principal:
        began = time.monotonic()
        revocations = self._revocations
        async with self._store.read() as tx:
            key = await tx.keys.by_hash(hashed)
        if key is None:
            raise Unauthenticated("there is no such API key", code="key_unknown")
        if key.revoked_at is not None:
            await self._note_refusal(key)
            raise Unauthenticated("this API key was revoked", code="key_revoked")
        principal = Principal(key.tenant_id, key.project_id, key.id, key.scopes)
        # A revocation that came while we read must not be outlived by what we read.
        if revocations == self._revocations:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[hashed] = (began + CACHE_S, principal)
        return principal

    async def _note_refusal(self, key: ApiKey) -> None:
        """Once in a while for each key: whoever holds a revoked one must not be able to fill the record."""
        now = time.monotonic()
        if now - self._refused.get(key.id, -REFUSAL_S) >= REFUSAL_S:
            self._refused[key.id] = now
            holder = Principal(key.tenant_id, key.project_id, key.id, key.scopes)
            await self._recorder.write(self._recorder.by(holder, "key.used", None, Outcome.REFUSED, code="key_revoked"))

    async def create(self, principal: Principal, name: str, scopes: Collection[str]) -> tuple[ApiKey, str]:
        """A new key of the principal's project, and its text, which is shown this once.

        Nobody can make a key that may do more than their own: Forbidden.
        """
        async with self._recorder.refusals(principal, "key.created", None):
            principal.require(Scope.KEYS)
            refuse(_problems(name, scopes))
            beyond = sorted(scope for scope in scopes if not principal.holds(scope))
            if beyond:
                raise Forbidden(f"this key cannot give what it does not have: {', '.join(beyond)}", scope=beyond[0])
        secret = new_secret()
        key = self._new(principal.tenant_id, principal.project_id, name, frozenset(scopes), secret)
        await self._sink.flush()
        async with self._store.write() as tx:
            await tx.keys.add(key, secret_hash(secret))
            event = self._recorder.by(
                principal, "key.created", None, key_id=key.id, name=text(name), scopes=sorted(key.scopes)
            )
            await self._sink.append_in(tx.audit, event)
        return key, secret

    def _new(self, tenant_id: str, project_id: str, name: str, scopes: frozenset[str], secret: str) -> ApiKey:
        now = self._config.clock()
        return ApiKey(ids.new_id(ids.API_KEY), tenant_id, project_id, name, secret[:SHOWN], scopes, now, None, None)

    async def list(self, principal: Principal) -> list[ApiKey]:
        """The tenant's for an admin key, else those of the principal's project; revoked ones too; oldest first."""
        principal.require(Scope.KEYS)
        async with self._store.read() as tx:
            found = await tx.keys.list(principal.tenant_id)
        return [key for key in found if principal.is_admin or key.project_id == principal.project_id]

    async def revoke(self, principal: Principal, key_id: str) -> ApiKey:
        """From now on it is refused. Idempotent. NotFound `key_not_found`; Forbidden for a key that may do more."""
        async with self._recorder.refusals(principal, "key.revoked", None):
            principal.require(Scope.KEYS)
            await self._sink.flush()
            async with self._store.write() as tx:
                key = await tx.keys.revoke(principal.tenant_id, key_id, self._config.clock())
                if not principal.is_admin and not key.scopes <= principal.scopes:
                    raise Forbidden("this key cannot revoke one that may do more")
                await self._sink.append_in(tx.audit, self._recorder.by(principal, "key.revoked", None, key_id=key.id))
            self._revocations += 1
            self._cache = {h: entry for h, entry in self._cache.items() if entry[1].key_id != key_id}
        return key

    async def bootstrap(self) -> str | None:
        """In an empty database: make tenant and project `default` and a first admin key, and return its text.

        None where there is a tenant already.
        """
        async with self._store.write() as tx:
            if await tx.tenants.count():
                return None
            now = self._config.clock()
            tenant = Tenant(
                ids.new_id(ids.TENANT),
                DEFAULT,
                self._config.max_sandboxes,
                self._config.max_lifetime_ms,
                now,
                self._config.max_snapshots,
                self._config.max_paused,
            )
            project = Project(ids.new_id(ids.PROJECT), tenant.id, DEFAULT, now)
            await tx.tenants.add(tenant)
            await tx.tenants.add_project(project)
            secret = new_secret()
            key = self._new(tenant.id, project.id, "first admin key", frozenset({Scope.ADMIN.value}), secret)
            await tx.keys.add(key, secret_hash(secret))
            owner = Principal(tenant.id, project.id, "system", key.scopes)
            event = self._recorder.by(owner, "key.created", None, key_id=key.id, name=key.name, scopes=["admin"])
            await self._sink.append_in(tx.audit, event)
            return secret

    async def first_key(self) -> tuple[str, bool]:
        """A new admin key's text, and whether it is the first one: it is in an empty database, as `bootstrap` says.

        Else it is a further key of the oldest project, for an operator who has lost the first.
        """
        secret = await self.bootstrap()
        if secret is not None:
            return secret, True
        async with self._store.read() as tx:
            project = await tx.tenants.oldest_project()
        operator = Principal(project.tenant_id, project.id, SYSTEM, frozenset({Scope.ADMIN.value}))
        _, secret = await self.create(operator, "operator's key", [Scope.ADMIN.value])
        return secret, False

    async def note_uses(self) -> None:
        """Write down which keys were used since the last time. Called about once a minute and at the end."""
        used, self._used = self._used, set()
        if used:
            async with self._store.write() as tx:
                await tx.keys.touch(used, self._config.clock())


def _problems(name: str, scopes: Collection[str]) -> list[Problem]:
    found: list[Problem] = []
    if not 0 < len(name) <= NAME_MAX or not name.isprintable():
        found.append(Problem("name", "must be printable and not too long", name, f"1..{NAME_MAX} characters"))
    if not scopes:
        found.append(Problem("scopes", "must name at least one", [], ", ".join(sorted(ALL_SCOPES))))
    found += [
        Problem("scopes", "is not a scope", scope, ", ".join(sorted(ALL_SCOPES)))
        for scope in sorted(set(scopes) - ALL_SCOPES)
    ]
    return found
