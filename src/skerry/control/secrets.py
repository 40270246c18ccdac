"""Secrets of a project: put, listed, deleted. No way leads from here to a value: `delivery` alone opens them."""

from datetime import datetime
from typing import Final

from skerry.control.principal import Principal, Scope
from skerry.control.recorder import text
from skerry.control.service import Context
from skerry.control.vault import VERSIONS_KEPT, Vault
from skerry.core import ids
from skerry.core.errors import LimitExceeded, NotFound, Problem
from skerry.core.limits import refuse
from skerry.core.models import Secret
from skerry.core.redact import VALUE_BYTES_MIN, VALUE_DISTINCT_MIN, redactable
from skerry.core.secrets import SECRET_NAME, VALUE_BYTES_MAX
from skerry.store import Sealed, Tx

SECRETS_MAX: Final = 1000
"""In a project."""


class Secrets:
    """Each is known by its name in the caller's project."""

    def __init__(self, context: Context, vault: Vault) -> None:
        self._store = context.store
        self._sink = context.sink
        self._recorder = context.recorder
        self._clock = context.config.clock
        self._vault = vault

    async def put(self, principal: Principal, name: str, value: str) -> Secret:
        """A new secret, or a new version of it: what starts from now on gets this one, unless it names another.

        Raises InvalidRequest (which never repeats the value), LimitExceeded `secret_limit`, Conflict
        `tenant_key_destroyed`.
        """
        async with self._recorder.refusals(principal, "secret.put", None):
            principal.require(Scope.SECRETS_WRITE)
            refuse([*_check_name(name), *_check_value(value)])
            await self._sink.flush()
            async with self._store.write() as tx:
                secret = await self._put(tx, principal, name, value.encode())
                event = self._recorder.by(principal, "secret.put", secret.id, name=secret.name, version=secret.version)
                await self._sink.append_in(tx.audit, event)
        return secret

    async def _put(self, tx: Tx, principal: Principal, name: str, value: bytes) -> Secret:
        now = self._clock()
        # All puts of a tenant one after the other: of two at once, one is the newer.
        await tx.tenants.get(principal.tenant_id, lock=True)
        found = await tx.secrets.find(principal.project_id, name, lock=True)
        version = 1 if found is None else found.version + 1
        if found is None:
            if await tx.secrets.count(principal.project_id) >= SECRETS_MAX:
                raise LimitExceeded(
                    f"a project has at most {SECRETS_MAX} secrets", code="secret_limit", limit=SECRETS_MAX
                )
            secret = Secret(ids.new_id(ids.SECRET), principal.tenant_id, principal.project_id, name, version, now, now)
            await tx.secrets.add(secret)
        else:
            secret = Secret(found.id, found.tenant_id, found.project_id, name, version, found.created_at, now)
            await tx.secrets.set_version(found.id, version, now)
        where = Sealed(secret.tenant_id, secret.project_id, secret.id, name, version, b"")
        await tx.secrets.add_version(secret.id, version, await self._vault.seal(tx, where, value), now)
        await tx.secrets.purge(VERSIONS_KEPT)
        return secret

    async def get(self, principal: Principal, name: str) -> tuple[Secret, list[tuple[int, datetime]]]:
        """What is known of it, and the versions that are kept, the newest first. NotFound `secret_not_found`."""
        principal.require(Scope.SECRETS_READ)
        async with self._store.read() as tx:
            found = await self._found(tx, principal, name)
            return found, await tx.secrets.versions(found.id)

    async def list(self, principal: Principal) -> list[Secret]:
        """By name."""
        principal.require(Scope.SECRETS_READ)
        async with self._store.read() as tx:
            return await tx.secrets.of_project(principal.project_id)

    async def delete(self, principal: Principal, name: str) -> None:
        """No command gets it any more. What a sandbox was given stays closed in the database for as long as that
        lives, so that it goes on being taken out of its output. NotFound `secret_not_found`."""
        async with self._recorder.refusals(principal, "secret.deleted", None):
            principal.require(Scope.SECRETS_WRITE)
            await self._sink.flush()
            async with self._store.write() as tx:
                found = await self._found(tx, principal, name, lock=True)
                await tx.secrets.delete(found.id, self._clock())
                await tx.secrets.purge(VERSIONS_KEPT)
                event = self._recorder.by(principal, "secret.deleted", found.id, name=found.name)
                await self._sink.append_in(tx.audit, event)
        await self._store.scrub()

    @staticmethod
    async def _found(tx: Tx, principal: Principal, name: str, *, lock: bool = False) -> Secret:
        found = await tx.secrets.find(principal.project_id, name, lock=lock) if SECRET_NAME.fullmatch(name) else None
        if found is None:
            raise secret_not_found(name)
        return found


def secret_not_found(name: str) -> NotFound:
    return NotFound(f"there is no secret {text(name, 140)}", code="secret_not_found", secret=text(name, 140))


def _check_name(name: str) -> list[Problem]:
    fits = SECRET_NAME.fullmatch(name) is not None
    return [] if fits else [Problem("name", "is not a secret's name", text(name, 140), SECRET_NAME.pattern)]


def _check_value(value: str) -> list[Problem]:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        return [Problem("value", "is not Unicode text", None, "Unicode text without NUL")]
    if b"\0" in raw:
        return [
            Problem("value", "holds a NUL character, which no environment can carry", None, "Unicode text without NUL")
        ]
    if len(raw) > VALUE_BYTES_MAX:
        return [Problem("value", "is too long", f"{len(raw)} bytes", f"{VALUE_BYTES_MAX} bytes")]
    if not redactable(raw):
        allowed = f"at least {VALUE_BYTES_MIN} bytes, {VALUE_DISTINCT_MIN} of them different"
        return [Problem("value", "is too short or too plain to be taken out of output", None, allowed)]
    return []
