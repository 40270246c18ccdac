"""The tenants' keys: made under the root key, opened in memory for a moment, wrapped anew, destroyed."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from skerry.core.errors import Conflict, InternalError
from skerry.store import Sealed, Store, TenantKey, Tx
from skerry.vault import Key, RootKeys, Unreadable, new_key, rootkey, seal, unseal

VERSIONS_KEPT: Final = 10
"""So many of a secret's versions can still be asked for."""


class Vault:
    def __init__(self, store: Store, roots: RootKeys, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._roots = roots
        self._clock = clock

    async def check(self) -> None:
        """Raises InternalError `root_key_wrong` unless every tenant's key opens. Changes nothing."""
        async with self._store.read() as tx:
            for row in await tx.tenant_keys.all():
                if row.wrapped is not None:
                    self._opened(row)

    async def seal(self, tx: Tx, where: Sealed, value: bytes) -> bytes:
        """`value`, closed with its tenant's key, which is made if there is none. Raises as `open` does."""
        row = await tx.tenant_keys.find(where.tenant_id)
        if row is None:
            await tx.tenant_keys.lock()
            root, key = self._roots.current(), new_key()
            wrapped = seal(root, key.secret, *_tenant_bound(where.tenant_id))
            await tx.tenant_keys.add(TenantKey(where.tenant_id, root.id, wrapped, self._clock()))
        else:
            key = self._opened(row)
        return seal(key, value, *_bound(where))

    async def open(self, tx: Tx, where: Sealed) -> bytes:
        """The value. Raises Conflict `tenant_key_destroyed`, InternalError `root_key_wrong` or `secret_damaged`."""
        row = await tx.tenant_keys.find(where.tenant_id)
        if row is None:
            raise _damaged(where)
        try:
            return unseal(self._opened(row), where.sealed, *_bound(where))
        except Unreadable:
            raise _damaged(where) from None

    def _opened(self, row: TenantKey) -> Key:
        return opened(self._roots, row)


def opened(roots: RootKeys, row: TenantKey) -> Key:
    """A tenant's key. Raises Conflict `tenant_key_destroyed`, InternalError `root_key_wrong`."""
    if row.wrapped is None:
        raise Conflict("the tenant was erased: its key is destroyed", code="tenant_key_destroyed")
    root = roots.find(row.root_key_id)
    if root is None:
        raise InternalError(
            f"the root key is another than the one ({row.root_key_id}) that the tenants' keys are wrapped with",
            code="root_key_wrong",
            wanted=row.root_key_id,
        )
    try:
        return Key(unseal(root, row.wrapped, *_tenant_bound(row.tenant_id)))
    except Unreadable:
        raise InternalError(
            f"the key of tenant {row.tenant_id} does not open with the root key: the database is damaged",
            code="root_key_wrong",
            tenant_id=row.tenant_id,
        ) from None


def _tenant_bound(tenant_id: str) -> tuple[str, ...]:
    return ("tenant-key", tenant_id)


def _bound(where: Sealed) -> tuple[str, ...]:
    return ("secret", where.tenant_id, where.project_id, where.secret_id, where.name, str(where.version))


def _damaged(where: Sealed) -> InternalError:
    return InternalError(f"version {where.version} of the secret {where.name} does not open", code="secret_damaged")


# ------------------------------------------------------------------------------------------------------- the root key


async def root_keys(store: Store, path: Path) -> tuple[RootKeys, bool]:
    """The root key in this file, which is made where nothing is closed with another one yet; and whether it was made.

    Raises what `rootkey.read` does; `root_key_missing` where there are keys of tenants that need it.
    """
    async with store.read() as tx:
        needed = {row.root_key_id for row in await tx.tenant_keys.all() if row.wrapped is not None}
    if rootkey.there(path):
        return RootKeys.open(path), False
    if needed:
        raise InternalError(
            f"there is no root key at {path}, and the database holds tenants' keys that open with "
            f"{', '.join(sorted(needed))} alone: put it back, or name where it is (root_key_file)",
            code="root_key_missing",
            path=str(path),
        )
    made = rootkey.create(path)
    return RootKeys.open(path), made


@dataclass(frozen=True, slots=True)
class Rotation:
    key_id: str
    """The root key that is current now."""
    tenants: int
    """Keys that were wrapped anew."""
    finished: bool
    """It was an earlier rotation, which had been cut off."""


async def rotate(store: Store, path: Path) -> Rotation:
    """A new root key: written beside the old one, then all tenants' keys wrapped with it in one transaction, then the
    old one forgotten. Cut off anywhere, everything opens, and the next call finishes it. Servers may run meanwhile.

    Raises what `rootkey.read` and `opened` do, Conflict `rotation_under_way`.
    """
    with rootkey.rotating(path):
        keys = rootkey.read(path)
        finished = len(keys) > 1
        if not finished:
            keys = (new_key(), *keys)
            rootkey.write(path, keys)
        tenants = await _rewrap(store, RootKeys.open(path), keys[0])
        rootkey.write(path, keys[:1])
    return Rotation(keys[0].id, tenants, finished)


async def _rewrap(store: Store, roots: RootKeys, current: Key) -> int:
    count = 0
    async with store.write() as tx:
        await tx.tenant_keys.lock()
        for row in await tx.tenant_keys.all():
            if row.wrapped is None or row.root_key_id == current.id:
                continue
            wrapped = seal(current, opened(roots, row).secret, *_tenant_bound(row.tenant_id))
            await tx.tenant_keys.rewrap(row.tenant_id, current.id, wrapped)
            count += 1
    await store.scrub()
    return count


async def erase(store: Store, tenant: str) -> tuple[str, int]:
    """Destroy a tenant's key (by its id or name) and all that was closed with it: its id, and how many values that
    were. Nothing brings them back; running it again changes nothing.

    The key was in the database alone, wrapped. SQLite overwrites what is deleted; what backups, or PostgreSQL's log and
    dead rows, still hold of it opens with the root key until that is rotated. Raises NotFound `tenant_not_found`,
    InternalError `tenant_not_erased` where something is still there.
    """
    async with store.write() as tx:
        found = await tx.tenants.named(tenant)
        gone = await tx.secrets.forget_tenant(found.id)
        await tx.tenant_keys.destroy(found.id, datetime.now(UTC))
    await store.scrub()
    async with store.read() as tx:
        row = await tx.tenant_keys.find(found.id)
        left = await tx.secrets.count_sealed(found.id)
    if row is None or row.wrapped is not None or left:
        raise InternalError(f"{left} sealed values of tenant {found.id} are still there", code="tenant_not_erased")
    return found.id, gone
