"""Tenants, projects and API keys."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.errors import NotFound
from skerry.store.records import ApiKey, Project, Tenant
from skerry.store.tables import api_keys, projects, tenants


class Tenants:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def count(self) -> int:
        return (await self._db.execute(select(func.count()).select_from(tenants))).scalar_one()

    async def add(self, tenant: Tenant) -> None:
        await self._db.execute(
            insert(tenants).values(
                id=tenant.id,
                name=tenant.name,
                max_sandboxes=tenant.max_sandboxes,
                max_lifetime_ms=tenant.max_lifetime_ms,
                max_snapshots=tenant.max_snapshots,
                max_paused=tenant.max_paused,
                created_at=tenant.created_at,
            )
        )

    async def add_project(self, project: Project) -> None:
        await self._db.execute(
            insert(projects).values(
                id=project.id, tenant_id=project.tenant_id, name=project.name, created_at=project.created_at
            )
        )

    async def oldest_project(self) -> Project:
        """The one that came with the database. Raises NotFound `tenant_not_found` in an empty one."""
        query = select(projects).order_by(projects.c.created_at, projects.c.id).limit(1)
        row = (await self._db.execute(query)).mappings().one_or_none()
        if row is None:
            raise NotFound("there is no tenant yet", code="tenant_not_found")
        return Project(**row)

    async def get(self, tenant_id: str, *, lock: bool = False) -> Tenant:
        """`lock`: hold the row to the end of the transaction, so that what is counted under it stays true."""
        query = select(tenants).where(tenants.c.id == tenant_id)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().one_or_none()
        if row is None:
            raise NotFound("no such tenant", code="tenant_not_found")
        return Tenant(**row)

    async def named(self, ref: str) -> Tenant:
        """By its id or its name. Raises NotFound `tenant_not_found`."""
        query = select(tenants).where(or_(tenants.c.id == ref, tenants.c.name == ref))
        row = (await self._db.execute(query)).mappings().first()
        if row is None:
            raise NotFound("no such tenant", code="tenant_not_found")
        return Tenant(**row)

    async def set_limits(
        self,
        tenant_id: str,
        *,
        max_sandboxes: int | None = None,
        max_lifetime_ms: int | None = None,
        max_snapshots: int | None = None,
        max_paused: int | None = None,
    ) -> None:
        """What is None stays."""
        wanted = {
            "max_sandboxes": max_sandboxes,
            "max_lifetime_ms": max_lifetime_ms,
            "max_snapshots": max_snapshots,
            "max_paused": max_paused,
        }
        changes = {name: value for name, value in wanted.items() if value is not None}
        if changes:
            await self._db.execute(update(tenants).where(tenants.c.id == tenant_id).values(**changes))


def _key(row: RowMapping) -> ApiKey:
    fields: dict[str, Any] = {name: value for name, value in row.items() if name != "secret_hash"}
    fields["scopes"] = frozenset(fields["scopes"])
    return ApiKey(**fields)


class ApiKeys:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, key: ApiKey, secret_hash: bytes) -> None:
        await self._db.execute(
            insert(api_keys).values(
                id=key.id,
                tenant_id=key.tenant_id,
                project_id=key.project_id,
                name=key.name,
                prefix=key.prefix,
                secret_hash=secret_hash,
                scopes=sorted(key.scopes),
                created_at=key.created_at,
            )
        )

    async def by_hash(self, secret_hash: bytes) -> ApiKey | None:
        row = (await self._db.execute(select(api_keys).where(api_keys.c.secret_hash == secret_hash))).mappings().first()
        return _key(row) if row is not None else None

    async def list(self, tenant_id: str) -> list[ApiKey]:
        """All of a tenant, revoked ones included, oldest first."""
        query = select(api_keys).where(api_keys.c.tenant_id == tenant_id).order_by(api_keys.c.created_at, api_keys.c.id)
        return [_key(row) for row in (await self._db.execute(query)).mappings()]

    async def revoke(self, tenant_id: str, key_id: str, at: datetime) -> ApiKey:
        """Idempotent: the first time stays. Raises NotFound `key_not_found`."""
        mine = (api_keys.c.id == key_id) & (api_keys.c.tenant_id == tenant_id)
        await self._db.execute(update(api_keys).where(mine, api_keys.c.revoked_at.is_(None)).values(revoked_at=at))
        row = (await self._db.execute(select(api_keys).where(mine))).mappings().one_or_none()
        if row is None:
            raise NotFound("no such key", code="key_not_found")
        return _key(row)

    async def touch(self, key_ids: Iterable[str], at: datetime) -> None:
        """Note that these were used. Never sets the clock back."""
        await self._db.execute(
            update(api_keys)
            .where(api_keys.c.id.in_(sorted(key_ids)))
            .where(or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < at))
            .values(last_used_at=at)
        )
