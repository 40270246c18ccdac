"""What was made under which idempotency key: a sandbox, a snapshot, or the copies of a fork."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import RowMapping, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.store.dialect import insert_or_ignore
from skerry.store.records import Remembered
from skerry.store.tables import idempotency

IDEMPOTENCY_KEPT: Final = timedelta(hours=24)


def _remembered(row: RowMapping) -> Remembered:
    return Remembered(row["subject"], tuple(row["made"]), bytes(row["body_hash"]), row["created_at"])


class Idempotency:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def claim(
        self,
        tenant_id: str,
        key_hash: bytes,
        body_hash: bytes,
        subject: str,
        at: datetime,
        *,
        made: Sequence[str] = (),
    ) -> Remembered | None:
        """Take the key for an act that `subject` names: None. Or what has it already, if that is not too old.

        `made`: the ids of what it makes, where they are not `subject` itself."""
        mine = (idempotency.c.tenant_id == tenant_id) & (idempotency.c.key_hash == key_hash)
        await self._db.execute(delete(idempotency).where(mine, idempotency.c.created_at <= at - IDEMPOTENCY_KEPT))
        statement = insert_or_ignore(self._db.dialect.name, idempotency, ["tenant_id", "key_hash"])
        values = {
            "tenant_id": tenant_id,
            "key_hash": key_hash,
            "body_hash": body_hash,
            "subject": subject,
            "made": list(made) or [subject],
            "created_at": at,
        }
        inserted = await self._db.execute(statement.values(values).returning(idempotency.c.subject))
        if inserted.first() is not None:
            return None
        return _remembered((await self._db.execute(select(idempotency).where(mine))).mappings().one())

    async def find(self, tenant_id: str, key_hash: bytes, at: datetime) -> Remembered | None:
        query = select(idempotency).where(
            idempotency.c.tenant_id == tenant_id,
            idempotency.c.key_hash == key_hash,
            idempotency.c.created_at > at - IDEMPOTENCY_KEPT,
        )
        row = (await self._db.execute(query)).mappings().one_or_none()
        return _remembered(row) if row is not None else None

    async def release(self, subject: str) -> None:
        """Forget the key of what came to nothing, so that the same request may be tried again."""
        await self._db.execute(delete(idempotency).where(idempotency.c.subject == subject))

    async def purge(self, at: datetime) -> int:
        """Drop what is too old. Returns how many."""
        done = await self._db.execute(delete(idempotency).where(idempotency.c.created_at <= at - IDEMPOTENCY_KEPT))
        return done.rowcount
