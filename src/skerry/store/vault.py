"""Tenants' keys and secrets, closed as the vault has closed them. Nothing here can open them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, Select, and_, delete, exists, func, insert, literal, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.lifecycle import LIVE
from skerry.core.models import Secret
from skerry.store.dialect import insert_or_ignore
from skerry.store.tables import sandboxes, secret_uses, secret_versions, secrets, snapshots, tenant_keys

_LIVE: Final = sorted(state.value for state in LIVE)


@dataclass(frozen=True, slots=True)
class TenantKey:
    tenant_id: str
    root_key_id: str
    wrapped: bytes | None
    """None: it was destroyed."""
    created_at: datetime
    destroyed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """One version of a secret, closed, with what it is bound to."""

    tenant_id: str
    project_id: str
    secret_id: str
    name: str
    version: int
    sealed: bytes


class TenantKeys:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self) -> None:
        """Until the end of the transaction no key is made or wrapped anew by another. (On SQLite no other writes.)"""
        if self._db.dialect.name == "postgresql":
            await self._db.execute(text("LOCK TABLE tenant_keys IN SHARE ROW EXCLUSIVE MODE"))

    async def add(self, key: TenantKey) -> None:
        values = {name: getattr(key, name) for name in ("tenant_id", "root_key_id", "wrapped", "created_at")}
        await self._db.execute(insert(tenant_keys).values(values))

    async def find(self, tenant_id: str) -> TenantKey | None:
        query = select(tenant_keys).where(tenant_keys.c.tenant_id == tenant_id)
        row = (await self._db.execute(query)).mappings().one_or_none()
        return None if row is None else TenantKey(**row)

    async def all(self) -> list[TenantKey]:
        """Of every tenant, destroyed ones too."""
        query = select(tenant_keys).order_by(tenant_keys.c.tenant_id)
        return [TenantKey(**row) for row in (await self._db.execute(query)).mappings()]

    async def rewrap(self, tenant_id: str, root_key_id: str, wrapped: bytes) -> None:
        await self._db.execute(
            update(tenant_keys)
            .where(tenant_keys.c.tenant_id == tenant_id)
            .values(root_key_id=root_key_id, wrapped=wrapped)
        )

    async def destroy(self, tenant_id: str, at: datetime) -> None:
        """Idempotent: the first time stays. A tenant that had no key never gets one."""
        row = {"tenant_id": tenant_id, "root_key_id": "", "wrapped": None, "created_at": at, "destroyed_at": at}
        await self._db.execute(insert_or_ignore(self._db.dialect.name, tenant_keys, ["tenant_id"]).values(row))
        mine = (tenant_keys.c.tenant_id == tenant_id) & tenant_keys.c.destroyed_at.is_(None)
        await self._db.execute(update(tenant_keys).where(mine).values(wrapped=None, destroyed_at=at))


def _secret(row: RowMapping) -> Secret:
    return Secret(**{name: value for name, value in row.items() if name != "deleted_at"})


class Secrets:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def find(self, project_id: str, name: str, *, lock: bool = False) -> Secret | None:
        """One that is not deleted. `lock`: nobody else changes it before this transaction ends."""
        query = select(secrets).where(
            secrets.c.project_id == project_id, secrets.c.name == name, secrets.c.deleted_at.is_(None)
        )
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().one_or_none()
        return None if row is None else _secret(row)

    async def of_project(self, project_id: str) -> list[Secret]:
        """By name."""
        query = select(secrets).where(secrets.c.project_id == project_id, secrets.c.deleted_at.is_(None))
        return [_secret(row) for row in (await self._db.execute(query.order_by(secrets.c.name))).mappings()]

    async def count(self, project_id: str) -> int:
        query = select(func.count()).where(secrets.c.project_id == project_id, secrets.c.deleted_at.is_(None))
        return (await self._db.execute(query)).scalar_one()

    async def add(self, secret: Secret) -> None:
        names = ("id", "tenant_id", "project_id", "name", "version", "created_at", "updated_at")
        await self._db.execute(insert(secrets).values({name: getattr(secret, name) for name in names}))

    async def set_version(self, secret_id: str, version: int, at: datetime) -> None:
        await self._db.execute(update(secrets).where(secrets.c.id == secret_id).values(version=version, updated_at=at))

    async def add_version(self, secret_id: str, version: int, sealed: bytes, at: datetime) -> None:
        row = {"secret_id": secret_id, "version": version, "sealed": sealed, "created_at": at}
        await self._db.execute(insert(secret_versions).values(row))

    async def versions(self, secret_id: str) -> list[tuple[int, datetime]]:
        """Those that are kept, the newest first."""
        v = secret_versions.c
        query = select(v.version, v.created_at).where(v.secret_id == secret_id).order_by(v.version.desc())
        return [(version, at) for version, at in await self._db.execute(query)]

    async def sealed(self, project_id: str, name: str, version: int | None) -> Sealed | None:
        """A version of a secret that is not deleted; None: the newest."""
        wanted = secrets.c.version if version is None else version
        query = self._sealed().where(
            secrets.c.project_id == project_id,
            secrets.c.name == name,
            secrets.c.deleted_at.is_(None),
            secret_versions.c.version == wanted,
        )
        row = (await self._db.execute(query)).mappings().one_or_none()
        return None if row is None else Sealed(**row)

    @staticmethod
    def _sealed() -> Select[*tuple[Any, ...]]:
        s, v = secrets.c, secret_versions.c
        return select(s.tenant_id, s.project_id, s.id.label("secret_id"), s.name, v.version, v.sealed).join_from(
            secrets, secret_versions, v.secret_id == s.id
        )

    async def delete(self, secret_id: str, at: datetime) -> None:
        """From now on it is nobody's to have. `purge` takes away what no one still has to look for."""
        await self._db.execute(update(secrets).where(secrets.c.id == secret_id).values(deleted_at=at))

    # ----------------------------------------------------------------------------------------------------------- uses

    async def use(self, holder_id: str, versions: Iterable[tuple[str, int]]) -> None:
        """Note that a sandbox was given these (secret's id, version)."""
        rows = [{"holder_id": holder_id, "secret_id": secret, "version": n} for secret, n in versions]
        if rows:
            await self._db.execute(insert_or_ignore(self._db.dialect.name, secret_uses), rows)

    async def copy_uses(self, source_id: str, holder_id: str) -> None:
        """What is in the memory of the one is in the memory of the other."""
        u = secret_uses.c
        await self.use(
            holder_id,
            [
                (secret, version)
                for secret, version in await self._db.execute(
                    select(u.secret_id, u.version).where(u.holder_id == source_id)
                )
            ],
        )

    async def given(self, holder_id: str) -> bool:
        """Whether it was given any."""
        query = select(exists(select(literal(1)).where(secret_uses.c.holder_id == holder_id)))
        return bool((await self._db.execute(query)).scalar_one())

    async def used(self, holder_ids: Sequence[str]) -> list[tuple[str, Sealed]]:
        """What these were given, deleted secrets too: holder and version."""
        u, v = secret_uses.c, secret_versions.c
        query = (
            self._sealed()
            .add_columns(u.holder_id)
            .join(secret_uses, and_(u.secret_id == v.secret_id, u.version == v.version))
            .where(u.holder_id.in_(holder_ids))
        )
        found = (await self._db.execute(query)).mappings()
        return [(row["holder_id"], Sealed(**{k: x for k, x in row.items() if k != "holder_id"})) for row in found]

    async def purge(self, keep: int) -> None:
        """Forget uses of what is over; then versions that nobody uses, of deleted secrets all, of others those before
        the `keep` newest; then deleted secrets without any."""
        u, v, s = secret_uses.c, secret_versions.c, secrets.c
        held = or_(
            exists(select(literal(1)).where(sandboxes.c.id == u.holder_id, sandboxes.c.state.in_(_LIVE))),
            exists(select(literal(1)).where(snapshots.c.id == u.holder_id)),
        )
        await self._db.execute(delete(secret_uses).where(~held))
        used = exists(select(literal(1)).where(u.secret_id == v.secret_id, u.version == v.version))
        old = exists(
            select(literal(1)).where(s.id == v.secret_id, or_(s.deleted_at.is_not(None), v.version <= s.version - keep))
        )
        await self._db.execute(delete(secret_versions).where(old, ~used))
        empty = ~exists(select(literal(1)).where(v.secret_id == s.id))
        await self._db.execute(delete(secrets).where(s.deleted_at.is_not(None), empty))

    async def forget_tenant(self, tenant_id: str) -> int:
        """Take away all that is closed with the tenant's key. How many values that were."""
        own = select(secrets.c.id).where(secrets.c.tenant_id == tenant_id)
        await self._db.execute(delete(secret_uses).where(secret_uses.c.secret_id.in_(own)))
        gone = await self._db.execute(delete(secret_versions).where(secret_versions.c.secret_id.in_(own)))
        await self._db.execute(delete(secrets).where(secrets.c.tenant_id == tenant_id))
        return gone.rowcount

    async def count_sealed(self, tenant_id: str) -> int:
        """Values of the tenant's that are kept, of deleted secrets too."""
        own = select(secrets.c.id).where(secrets.c.tenant_id == tenant_id)
        query = select(func.count()).where(secret_versions.c.secret_id.in_(own))
        return (await self._db.execute(query)).scalar_one()
