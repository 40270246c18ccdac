"""Sandboxes.

Environment values are not stored: the guest has them, and nothing else needs them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, and_, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.errors import NotFound
from skerry.core.lifecycle import FINAL, LIVE, EndReason, Event, State, transition
from skerry.core.models import Bindings, NetworkRules, Sandbox, SandboxSpec
from skerry.store.dialect import json_has
from skerry.store.egress import network_of, stored_network
from skerry.store.paging import Page, decode_cursor, encode_cursor, from_micros, micros
from skerry.store.records import MadeOf
from skerry.store.tables import sandboxes

_LIVE: Final = sorted(s.value for s in LIVE)
_RESTING: Final = (State.PAUSED.value, State.PAUSING.value, State.RESUMING.value)


def not_found(sandbox_id: str) -> NotFound:
    """The same words for what never was and for what is another's."""
    return NotFound(f"there is no sandbox {sandbox_id}", code="sandbox_not_found", sandbox_id=sandbox_id)


def _sandbox(row: RowMapping) -> Sandbox:
    return Sandbox(
        id=row["id"],
        tenant_id=row["tenant_id"],
        project_id=row["project_id"],
        spec=SandboxSpec(
            template=row["template"],
            cpu=row["cpu"],
            memory_mb=row["memory_mb"],
            disk_mb=row["disk_mb"],
            timeout_ms=row["timeout_ms"],
            idle_timeout_ms=row["idle_timeout_ms"],
            auto_pause=row["auto_pause"],
            auto_pause_memory=row["auto_pause_memory"],
            auto_resume=row["auto_resume"],
            public_ports=row["public_ports"],
            mask_request_host=row["mask_request_host"],
            metadata=dict(row["metadata"]),
            secrets=Bindings(dict(row["secret_env"]), dict(row["secret_files"])),
            network=network_of(row["network"]),
        ),
        state=State(row["state"]),
        node_id=row["node_id"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        expires_at=row["expires_at"],
        ended_at=row["ended_at"],
        end_reason=EndReason(row["end_reason"]) if row["end_reason"] else None,
        error=row["error"],
        start_kind=row["start_kind"],
        paused_at=row["paused_at"],
        remaining_ms=row["remaining_ms"],
        rested_ms=row["rested_ms"],
        snapshot_id=row["snapshot_id"],
    )


class Sandboxes:
    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, sandbox: Sandbox) -> None:
        spec = sandbox.spec
        await self._db.execute(
            insert(sandboxes).values(
                id=sandbox.id,
                tenant_id=sandbox.tenant_id,
                project_id=sandbox.project_id,
                template=spec.template,
                cpu=spec.cpu,
                memory_mb=spec.memory_mb,
                disk_mb=spec.disk_mb,
                timeout_ms=spec.timeout_ms,
                idle_timeout_ms=spec.idle_timeout_ms,
                metadata=dict(spec.metadata),
                state=sandbox.state.value,
                node_id=sandbox.node_id,
                created_at=sandbox.created_at,
                started_at=sandbox.started_at,
                expires_at=sandbox.expires_at,
                ended_at=sandbox.ended_at,
                end_reason=sandbox.end_reason.value if sandbox.end_reason else None,
                error=sandbox.error,
                start_kind=sandbox.start_kind,
                auto_pause=spec.auto_pause,
                auto_pause_memory=spec.auto_pause_memory,
                auto_resume=spec.auto_resume,
                public_ports=spec.public_ports,
                mask_request_host=spec.mask_request_host,
                paused_at=sandbox.paused_at,
                remaining_ms=sandbox.remaining_ms,
                rested_ms=sandbox.rested_ms,
                snapshot_id=sandbox.snapshot_id,
                secret_env=dict(spec.secrets.env),
                secret_files=dict(spec.secrets.files),
                network=stored_network(spec.network),
            )
        )

    async def find(self, sandbox_id: str, *, lock: bool = False) -> Sandbox | None:
        """`lock`: nobody else changes it before this transaction ends."""
        query = select(sandboxes).where(sandboxes.c.id == sandbox_id)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().one_or_none()
        return _sandbox(row) if row is not None else None

    async def get(self, sandbox_id: str, *, lock: bool = False) -> Sandbox:
        """Raises NotFound `sandbox_not_found`."""
        found = await self.find(sandbox_id, lock=lock)
        if found is None:
            raise not_found(sandbox_id)
        return found

    async def apply(
        self,
        sandbox: Sandbox,
        event: Event,
        *,
        at: datetime,
        reason: EndReason | None = None,
        error: str | None = None,
        **changes: Any,
    ) -> Sandbox | None:
        """Change the state as `core.lifecycle` says, if it is still `sandbox.state`; None if it is not.

        `changes`: `started_at`, `expires_at`, `start_kind`, `paused_at`, `remaining_ms`, `rested_ms`.
        A final state gets `ended_at`, `reason` and `error`.
        Raises Conflict where the event is not legal in that state.
        """
        state = transition(sandbox.state, event)
        if state in FINAL:
            changes |= {"ended_at": at, "end_reason": reason, "error": error}
        values = {**changes, "state": state}
        done = await self._db.execute(
            update(sandboxes)
            .where(sandboxes.c.id == sandbox.id, sandboxes.c.state == sandbox.state.value)
            .values({k: v.value if isinstance(v, (State, EndReason)) else v for k, v in values.items()})
        )
        return replace(sandbox, **values) if done.rowcount == 1 else None

    async def set_expiry(self, sandbox: Sandbox, *, timeout_ms: int, expires_at: datetime) -> Sandbox | None:
        """Move the deadline, if the sandbox is still in `sandbox.state`; None if it is not."""
        done = await self._db.execute(
            update(sandboxes)
            .where(sandboxes.c.id == sandbox.id, sandboxes.c.state == sandbox.state.value)
            .values(timeout_ms=timeout_ms, expires_at=expires_at)
        )
        if done.rowcount != 1:
            return None
        return replace(sandbox, spec=replace(sandbox.spec, timeout_ms=timeout_ms), expires_at=expires_at)

    async def set_remaining(self, sandbox: Sandbox, *, timeout_ms: int, remaining_ms: int) -> Sandbox | None:
        """What a paused sandbox will have left, if it is still in `sandbox.state`; None if it is not."""
        done = await self._db.execute(
            update(sandboxes)
            .where(sandboxes.c.id == sandbox.id, sandboxes.c.state == sandbox.state.value)
            .values(timeout_ms=timeout_ms, remaining_ms=remaining_ms)
        )
        if done.rowcount != 1:
            return None
        return replace(sandbox, spec=replace(sandbox.spec, timeout_ms=timeout_ms), remaining_ms=remaining_ms)

    async def set_network(self, sandbox: Sandbox, network: NetworkRules | None) -> Sandbox | None:
        """Its own say about what may leave it, if it is not over; None if it is."""
        done = await self._db.execute(
            update(sandboxes)
            .where(sandboxes.c.id == sandbox.id, sandboxes.c.state.in_(_LIVE))
            .values(network=stored_network(network))
        )
        return replace(sandbox, spec=replace(sandbox.spec, network=network)) if done.rowcount == 1 else None

    async def count_live(self, tenant_id: str) -> int:
        query = select(func.count()).where(sandboxes.c.state.in_(_LIVE), sandboxes.c.tenant_id == tenant_id)
        return (await self._db.execute(query)).scalar_one()

    async def count_resting(self, tenant_id: str) -> int:
        """Those that are paused, or on the way to it or from it."""
        query = select(func.count()).where(sandboxes.c.state.in_(_RESTING), sandboxes.c.tenant_id == tenant_id)
        return (await self._db.execute(query)).scalar_one()

    async def uses(self, tenant_id: str, *, project_id: str | None = None) -> dict[str, tuple[int, datetime | None]]:
        """Of each template: how many sandboxes were ever made of it itself, and when the last one was."""
        s = sandboxes.c
        query = select(s.template, func.count(), func.max(s.created_at)).where(
            s.tenant_id == tenant_id, s.snapshot_id.is_(None)
        )
        if project_id is not None:
            query = query.where(s.project_id == project_id)
        rows = await self._db.execute(query.group_by(s.template))
        return {template: (count, last) for template, count, last in rows}

    async def live(self) -> list[Sandbox]:
        """Every sandbox of every tenant that is not over."""
        rows = (await self._db.execute(select(sandboxes).where(sandboxes.c.state.in_(_LIVE)))).mappings()
        return [_sandbox(row) for row in rows]

    async def page(
        self,
        tenant_id: str,
        *,
        project_id: str | None = None,
        states: Collection[State] = (),
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        made_of: MadeOf | None = None,
        created_after: datetime | None = None,
        oldest_first: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Sandbox]:
        """Newest first, unless `oldest_first`. Empty filters do not filter. `template`: what it goes back
        to; `made_of`: that one thing itself. Raises InvalidRequest for a cursor that is none."""
        s = sandboxes.c
        query = select(sandboxes).where(s.tenant_id == tenant_id)
        if project_id is not None:
            query = query.where(s.project_id == project_id)
        if states:
            query = query.where(s.state.in_(sorted(state.value for state in states)))
        if template is not None:
            query = query.where(s.template == template)
        if made_of is not None:
            query = query.where(
                s.snapshot_id.in_(made_of.snapshot_ids)
                if made_of.snapshot_ids
                else and_(s.template == made_of.template, s.snapshot_id.is_(None))
            )
        if created_after is not None:
            query = query.where(s.created_at > created_after)
        if metadata:
            query = query.where(json_has(self._db.dialect.name, s.metadata, dict(metadata)))
        if cursor is not None:
            position = decode_cursor(cursor, int, str)
            at, last = from_micros(int(position[0])), str(position[1])
            beyond, further = (s.created_at > at, s.id > last) if oldest_first else (s.created_at < at, s.id < last)
            query = query.where(or_(beyond, and_(s.created_at == at, further)))
        order = (s.created_at, s.id) if oldest_first else (s.created_at.desc(), s.id.desc())
        query = query.order_by(*order).limit(limit + 1)
        rows = (await self._db.execute(query)).mappings().all()
        items = tuple(_sandbox(row) for row in rows[:limit])
        more = encode_cursor(micros(items[-1].created_at), items[-1].id) if len(rows) > limit else None
        return Page(items, more)
