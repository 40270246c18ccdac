"""Snapshots. They live longer than the sandboxes they were taken of."""

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Final

from sqlalchemy import RowMapping, Select, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.models import Snapshot, SnapshotState
from skerry.store.paging import Page, decode_cursor, encode_cursor, from_micros, micros
from skerry.store.tables import snapshots

_FAILED: Final = SnapshotState.FAILED.value
_READY: Final = SnapshotState.READY.value


def _snapshot(row: RowMapping) -> Snapshot:
    return Snapshot(**{**row, "state": SnapshotState(row["state"])})


class Snapshots:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, snapshot: Snapshot) -> None:
        await self._db.execute(insert(snapshots).values({**asdict(snapshot), "state": snapshot.state.value}))

    async def count_kept(self, tenant_id: str) -> int:
        """Those that have not failed."""
        query = select(func.count()).where(snapshots.c.tenant_id == tenant_id, snapshots.c.state != _FAILED)
        return (await self._db.execute(query)).scalar_one()

    async def find(self, tenant_id: str, snapshot_id: str, *, lock: bool = False) -> Snapshot | None:
        """`lock`: nobody else changes it before this transaction ends."""
        query = select(snapshots).where(snapshots.c.tenant_id == tenant_id, snapshots.c.id == snapshot_id)
        return await self._one(query.with_for_update() if lock else query)

    async def find_named(self, project_id: str, name: str) -> Snapshot | None:
        """What the name stands for: the newest that is ready, or where none is yet, the newest that is being taken."""
        s = snapshots.c
        query = (
            select(snapshots)
            .where(s.project_id == project_id, s.name == name, s.state != _FAILED)
            .order_by((s.state == _READY).desc(), s.created_at.desc(), s.id.desc())
            .limit(1)
        )
        return await self._one(query)

    async def all_named(self, project_id: str, name: str) -> list[Snapshot]:
        """Whatever became of them, locked to the end of the transaction."""
        query = select(snapshots).where(snapshots.c.project_id == project_id, snapshots.c.name == name)
        return [_snapshot(row) for row in (await self._db.execute(query.with_for_update())).mappings()]

    async def ids_named(self, project_id: str, name: str) -> tuple[str, ...]:
        """All that were ever given the name and are kept."""
        s = snapshots.c
        query = select(s.id).where(s.project_id == project_id, s.name == name, s.state != _FAILED)
        return tuple((await self._db.execute(query)).scalars())

    async def _one(self, query: Select[tuple[object, ...]]) -> Snapshot | None:
        row = (await self._db.execute(query)).mappings().one_or_none()
        return _snapshot(row) if row is not None else None

    async def settle(
        self,
        snapshot: Snapshot,
        state: SnapshotState,
        *,
        error: str | None = None,
        size_bytes: int | None = None,
        stood_still_ms: float | None = None,
        holds_secrets: bool = False,
    ) -> Snapshot | None:
        """Whether it was taken or failed, if it is still in `snapshot.state`; None if it is not."""
        changes = {
            "error": error, "size_bytes": size_bytes, "stood_still_ms": stood_still_ms, "holds_secrets": holds_secrets,
        }  # fmt: skip
        done = await self._db.execute(
            update(snapshots)
            .where(snapshots.c.id == snapshot.id, snapshots.c.state == snapshot.state.value)
            .values(state=state.value, **changes)
        )
        return replace(snapshot, state=state, **changes) if done.rowcount == 1 else None

    async def remove(self, snapshot_id: str) -> bool:
        done = await self._db.execute(delete(snapshots).where(snapshots.c.id == snapshot_id))
        return done.rowcount == 1

    async def everything(self) -> list[Snapshot]:
        """Of every tenant."""
        return [_snapshot(row) for row in (await self._db.execute(select(snapshots))).mappings()]

    async def page(
        self,
        tenant_id: str,
        *,
        project_id: str | None = None,
        name: str | None = None,
        any_tag: bool = False,
        sandbox_id: str | None = None,
        states: Collection[SnapshotState] = (),
        newest_of_name: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Snapshot]:
        """Newest first. Empty filters do not filter. `any_tag`: whatever tag follows the name; `newest_of_name`:
        of a name only what it stands for. Raises InvalidRequest for a cursor that is none."""
        s = snapshots.c
        query = select(snapshots).where(s.tenant_id == tenant_id)
        if name is not None and any_tag:
            query = query.where(or_(s.name == name, s.name.startswith(f"{name}:", autoescape=True)))
            name = None
        if states:
            query = query.where(s.state.in_(sorted(state.value for state in states)))
        if newest_of_name:
            newer = snapshots.alias().c
            later = or_(newer.created_at > s.created_at, and_(newer.created_at == s.created_at, newer.id > s.id))
            same = (newer.project_id == s.project_id, newer.name == s.name, newer.state == _READY)
            query = query.where(~exists().where(*same, later))
        for column, wanted in ((s.project_id, project_id), (s.name, name), (s.sandbox_id, sandbox_id)):
            if wanted is not None:
                query = query.where(column == wanted)
        if cursor is not None:
            position = decode_cursor(cursor, int, str)
            at, last = from_micros(int(position[0])), str(position[1])
            query = query.where(or_(s.created_at < at, and_(s.created_at == at, s.id < last)))
        query = query.order_by(s.created_at.desc(), s.id.desc()).limit(limit + 1)
        rows = (await self._db.execute(query)).mappings().all()
        items = tuple(_snapshot(row) for row in rows[:limit])
        more = encode_cursor(micros(items[-1].created_at), items[-1].id) if len(rows) > limit else None
        return Page(items, more)
