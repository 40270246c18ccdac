"""The append-only table of audit records. There is no update and no delete here, on purpose."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.audit import AuditEvent, Outcome
from skerry.store.dialect import insert_or_ignore
from skerry.store.paging import Page, decode_cursor, encode_cursor
from skerry.store.tables import audit_events


def _event(row: RowMapping) -> AuditEvent:
    fields = {name: value for name, value in row.items() if name != "seq"}
    fields["outcome"] = Outcome(fields["outcome"])
    return AuditEvent(**fields)


class AuditEvents:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def append(self, events: Sequence[AuditEvent]) -> None:
        """In this order. An event that is there already (same id) is left as it is."""
        if not events:
            return
        rows = [
            {
                "id": e.id,
                "at": e.at,
                "tenant_id": e.tenant_id,
                "project_id": e.project_id,
                "actor": e.actor,
                "action": e.action,
                "subject": e.subject,
                "outcome": e.outcome.value,
                "detail": e.detail,
            }
            for e in events
        ]
        await self._db.execute(insert_or_ignore(self._db.dialect.name, audit_events, ["id"]), rows)

    async def of_subject(
        self,
        subject: str,
        *,
        limit: int,
        cursor: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        newest_first: bool = False,
        only: str | None = None,
        without: str | None = None,
        outcome: Outcome | None = None,
    ) -> Page[AuditEvent]:
        """Records of one sandbox, oldest first unless `newest_first`; both times belong to what is asked for. `only`
        and `without`: how actions begin that are asked for, and that are not."""
        e = audit_events.c
        query = select(audit_events).where(e.subject == subject)
        if since is not None:
            query = query.where(e.at >= since)
        if until is not None:
            query = query.where(e.at <= until)
        if only is not None:
            query = query.where(e.action.startswith(only, autoescape=True))
        if without is not None:
            query = query.where(~e.action.startswith(without, autoescape=True))
        if outcome is not None:
            query = query.where(e.outcome == outcome.value)
        if cursor is not None:
            (last,) = decode_cursor(cursor, int)
            query = query.where(e.seq < last if newest_first else e.seq > last)
        query = query.order_by(e.seq.desc() if newest_first else e.seq).limit(limit + 1)
        rows = (await self._db.execute(query)).mappings().all()
        shown = rows[:limit]
        more = encode_cursor(shown[-1]["seq"]) if len(rows) > limit else None
        return Page(tuple(_event(row) for row in shown), more)
