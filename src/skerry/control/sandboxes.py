"""Sandboxes, as the faces see them."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from skerry.audit import AuditEvent
from skerry.control.access import Access
from skerry.control.changes import latest_end
from skerry.control.checks import check_metadata, check_page, check_template, check_timeout
from skerry.control.creation import Creation
from skerry.control.endings import Endings
from skerry.control.origin import made_of
from skerry.control.passages import IN_PASSAGE, Passages
from skerry.control.principal import Principal, Scope
from skerry.control.service import Context, Service
from skerry.control.traffic import EVENTS_MAX
from skerry.control.traffic import PREFIX as TRAFFIC
from skerry.core.errors import Conflict
from skerry.core.lifecycle import FINAL, EndReason, Event, State, gone
from skerry.core.limits import check_range, refuse
from skerry.core.models import GuestMetrics, Sandbox, SandboxSpec
from skerry.store import Page, Tenant, Tx

CONSOLE_MAX = 65_536


class Sandboxes(Service):
    def __init__(
        self, context: Context, access: Access, creation: Creation, endings: Endings, passages: Passages
    ) -> None:
        super().__init__(context)
        self._access = access
        self._creation = creation
        self._endings = endings
        self._passages = passages

    async def create(
        self,
        principal: Principal,
        spec: SandboxSpec,
        *,
        idempotency_key: str | None = None,
        given: Collection[str] | None = None,
    ) -> Sandbox:
        """A new sandbox, running. `spec.template` may be a snapshot's id or name.

        `given`: which fields of `spec` the caller named; None: those that are not the default. Of a snapshot, CPU and
        memory are its own and its disk is the least; a field that was given and does not fit is refused.
        Raises InvalidRequest (all problems at once), NotFound `template_not_found` or `snapshot_not_found`, Conflict
        `snapshot_not_ready`, LimitExceeded `sandbox_limit`,
        InternalError `vm_start_failed`, Unavailable `node_full`, Gone where it was killed while it came up.
        With an idempotency key: the same key and spec give the same sandbox for 24 hours, whatever became of it
        (except that a create that failed may be tried again); another spec is Conflict `idempotency_mismatch`.
        A cancelled call without a key leaves nothing; with a key the create goes on.
        """
        return await self._creation.create(principal, spec, idempotency_key, given)

    async def get(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """The record, over or not. NotFound `sandbox_not_found`."""
        principal.require(Scope.READ)
        return await self._access.record(principal, sandbox_id)

    async def list(
        self,
        principal: Principal,
        *,
        states: Collection[State] = (),
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        origin: str | None = None,
        created_after: datetime | None = None,
        oldest_first: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Sandbox]:
        """Newest first, unless `oldest_first`. Empty filters do not filter; several entries of metadata must all match.

        `template`: what it goes back to, be it through snapshots; `origin`: the template or snapshot (its id or name)
        that it was made of itself.
        """
        principal.require(Scope.READ)
        refuse(
            [
                *check_page(limit),
                *check_metadata("metadata", metadata or {}),
                *check_template(template),
                *check_template(origin, "origin"),
            ]
        )
        async with self._store.read() as tx:
            made = await made_of(tx, self._nodes, principal, origin) if origin is not None else None
            return await tx.sandboxes.page(
                principal.tenant_id,
                project_id=None if principal.is_admin else principal.project_id,
                states=states,
                metadata=metadata,
                template=template,
                made_of=made,
                created_after=created_after,
                oldest_first=oldest_first,
                limit=limit,
                cursor=cursor,
            )

    # ---------------------------------------------------------------------------------------------------- deadlines

    async def set_timeout(self, principal: Principal, sandbox_id: str, timeout_ms: int) -> Sandbox:
        """The new end is now + `timeout_ms`, sooner or later than the old one; never beyond the tenant's longest life.

        The record that comes back shows the end that is enforced. Of a paused one: what it will have left.
        """
        return await self._move_end(principal, sandbox_id, timeout_ms, "timeout_ms", shorten=True)

    async def extend_timeout(self, principal: Principal, sandbox_id: str, timeout_ms: int) -> Sandbox:
        """As `set_timeout`, but never shortens. Once it returned, the old end does not count any more."""
        return await self._move_end(principal, sandbox_id, timeout_ms, "extend_timeout_ms", shorten=False)

    async def _move_end(
        self, principal: Principal, sandbox_id: str, timeout_ms: int, field: str, *, shorten: bool
    ) -> Sandbox:
        async with self._recorder.refusals(principal, "sandbox.timeout_set", sandbox_id):
            principal.require(Scope.WRITE)
            await self._access.record(principal, sandbox_id)
            work = self._move_end_owned(principal, sandbox_id, timeout_ms, field, shorten=shorten)
            return await self._owned.run(work, f"set timeout {sandbox_id}")

    async def _move_end_owned(
        self, principal: Principal, sandbox_id: str, timeout_ms: int, field: str, *, shorten: bool
    ) -> Sandbox:
        live = self._live.get(sandbox_id)
        if live is None:
            return await self._move_end_stored(principal, sandbox_id, timeout_ms, field, shorten=shorten)
        await self._passages.settled(live)
        async with live.lock:
            row = await self._move_end_stored(principal, sandbox_id, timeout_ms, field, shorten=shorten)
            live.last_used = self._config.clock()
            self._live.update(live, row)
        return row

    async def _move_end_stored(
        self, principal: Principal, sandbox_id: str, timeout_ms: int, field: str, *, shorten: bool
    ) -> Sandbox:
        await self._sink.flush()
        async with self._store.write() as tx:
            row = await tx.sandboxes.get(sandbox_id, lock=True)
            if row.state in FINAL:
                raise gone(sandbox_id, row.end_reason)
            tenant = await tx.tenants.get(row.tenant_id)
            refuse(list(check_timeout(field, timeout_ms, tenant.max_lifetime_ms)))
            if row.state in IN_PASSAGE:
                raise _in_passage(row)
            now = self._config.clock()
            if row.state is State.PAUSED:
                left = timeout_ms if shorten else max(timeout_ms, row.remaining_ms or 0)
                moved = await tx.sandboxes.set_remaining(row, timeout_ms=timeout_ms, remaining_ms=left)
                return await self._moved(tx, principal, moved, sandbox_id, remaining_ms=left)
            if row.expires_at <= now and not _will_rest(row, tenant):
                raise gone(sandbox_id, _why_expired(row, tenant))  # its end has come, whoever is first to say so
            wanted = min(now + timedelta(milliseconds=timeout_ms), latest_end(row, tenant))
            if not shorten and wanted <= row.expires_at:
                return row
            moved = await tx.sandboxes.set_expiry(row, timeout_ms=timeout_ms, expires_at=wanted)
            return await self._moved(tx, principal, moved, sandbox_id, expires_at=wanted.isoformat())

    async def _moved(
        self, tx: Tx, principal: Principal, moved: Sandbox | None, sandbox_id: str, **detail: Any
    ) -> Sandbox:
        if moved is None:
            raise Conflict("the sandbox changed meanwhile", code="sandbox_state", sandbox_id=sandbox_id)
        event = self._recorder.by(
            principal, "sandbox.timeout_set", sandbox_id, timeout_ms=moved.spec.timeout_ms, **detail
        )
        await self._sink.append_in(tx.audit, event)
        return moved

    # --------------------------------------------------------------------------------------------------- rest and back

    async def pause(self, principal: Principal, sandbox_id: str, *, memory: bool = True) -> Sandbox:
        """Keep it on disk and free its CPU and memory. Returns when it rests; of one that rests: unchanged.

        `memory` False keeps the disk alone: a resume boots. Raises Gone, Conflict `sandbox_state`, LimitExceeded
        `paused_limit`, and what `contract.Node.pause` does: then it runs on.
        """
        return (await self.rest(principal, sandbox_id, memory=memory))[0]

    async def rest(self, principal: Principal, sandbox_id: str, *, memory: bool = True) -> tuple[Sandbox, bool]:
        """As `pause`, and whether it was this call that put it to rest."""
        async with self._recorder.refusals(principal, "sandbox.paused", sandbox_id):
            live = await self._access.present(principal, sandbox_id, Scope.WRITE)
        return await self._passages.pause(live, memory=memory, actor=principal.key_id)

    async def resume(
        self, principal: Principal, sandbox_id: str, *, timeout_ms: int | None = None, memory: bool = True
    ) -> Sandbox:
        """Let it go on. Its end is then `timeout_ms` (its own timeout, if None) from now or what it had left, whichever
        is later; of a running one the end is only ever moved back. `memory` False drops the memory that was kept and
        boots from the disk: Conflict `sandbox_state` where it runs.

        All who ask at once get the one VM. Raises Gone, Conflict `sandbox_state`, and what `contract.Node.resume` does:
        then it stays paused.
        """
        return (await self.wake(principal, sandbox_id, timeout_ms=timeout_ms, memory=memory))[0]

    async def wake(
        self,
        principal: Principal,
        sandbox_id: str,
        *,
        timeout_ms: int | None = None,
        memory: bool = True,
        keep_left: bool = True,
    ) -> tuple[Sandbox, bool]:
        """As `resume`, and whether it rested until now. `keep_left` False: of one that rested the end is `timeout_ms`
        from now even if it had more left."""
        async with self._recorder.refusals(principal, "sandbox.resumed", sandbox_id):
            live = await self._access.present(principal, sandbox_id, Scope.WRITE)
            if timeout_ms is not None:
                async with self._store.read() as tx:
                    tenant = await tx.tenants.get(live.record.tenant_id)
                refuse(list(check_timeout("timeout_ms", timeout_ms, tenant.max_lifetime_ms)))
        ran = live.record.state is State.RUNNING
        record, first = await self._passages.resume(
            live, timeout_ms=timeout_ms, memory=memory, keep_left=keep_left, actor=principal.key_id
        )
        if timeout_ms is not None and (not first or ran):
            record = await self.extend_timeout(principal, sandbox_id, timeout_ms)
        return record, not ran

    # ---------------------------------------------------------------------------------------------------------- end

    async def kill(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """End it, whatever it is doing. Idempotent: one that is over comes back unchanged.

        Returns when nothing is left of its VM (or, past the deadline, while the reaper goes on trying).
        """
        async with self._recorder.refusals(principal, "sandbox.killed", sandbox_id):
            principal.require(Scope.WRITE)
            await self._access.record(principal, sandbox_id)
            record, _ = await self._endings.end(sandbox_id, Event.KILL, EndReason.KILLED, actor=principal.key_id)
        await self._endings.gone(sandbox_id)
        return record

    async def expire(self, sandbox_id: str) -> bool:
        """End it if its timeout is reached by now, or pause it if that is what it is to be.

        Judged on the stored row: a racing extension that returned wins.
        """
        async with self._store.read() as tx:
            row = await tx.sandboxes.get(sandbox_id)
            tenant = await tx.tenants.get(row.tenant_id)

        def due(row: Sandbox) -> bool:
            return row.state in {State.CREATING, State.RUNNING} and row.expires_at <= self._config.clock()

        live = self._live.get(sandbox_id)
        if live is not None and row.state is State.RUNNING and _will_rest(row, tenant):
            memory = row.spec.auto_pause_memory
            return (await self._passages.pause(live, memory=memory, why="timeout", only_if=due))[1]
        _, ended = await self._endings.end(sandbox_id, Event.KILL, _why_expired(row, tenant), only_if=due)
        return ended

    # --------------------------------------------------------------------------------------------------------- look

    def keeps_memory(self, box: Sandbox) -> bool | None:
        """Of one that rests: whether its memory is kept. None where its node does not say."""
        node = self._nodes.find(box.node_id)
        at_rest = node.paused() if node is not None else ()
        return next((one.memory for one in at_rest if one.id == box.id), None)

    async def events(
        self,
        principal: Principal,
        sandbox_id: str,
        *,
        limit: int = 100,
        cursor: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        newest_first: bool = False,
    ) -> Page[AuditEvent]:
        """What was done to it and in it, oldest first unless `newest_first`; of one that is over too. Both times belong
        to what is asked for. What it looked up and connected to is `Traffic`'s to tell."""
        principal.require(Scope.READ)
        refuse(check_range("limit", limit, 1, EVENTS_MAX))
        await self._access.record(principal, sandbox_id)
        await self._sink.flush()
        async with self._store.read() as tx:
            return await tx.audit.of_subject(
                sandbox_id,
                limit=limit,
                cursor=cursor,
                since=since,
                until=until,
                newest_first=newest_first,
                without=TRAFFIC,
            )

    async def console(self, principal: Principal, sandbox_id: str, *, limit: int = 65_536) -> bytes:
        """The end of its serial console, while it runs."""
        refuse(check_range("limit", limit, 1, CONSOLE_MAX))
        live = await self._access.running(principal, sandbox_id, Scope.READ)
        async with self._access.answered(live):
            found = await self._nodes.get(live.record.node_id).console(sandbox_id, limit=limit)
        return found if live.redactor is None else live.redactor.cut(found)

    async def metrics(self, principal: Principal, sandbox_id: str) -> GuestMetrics:
        """CPU, memory and disk as the guest sees them. Looking does not count as activity."""
        scope = Scope.READ if principal.sandbox_id is None else Scope.USE  # who holds its token may look at it
        live = await self._access.running(principal, sandbox_id, scope)
        async with self._access.answered(live):
            return await self._nodes.get(live.record.node_id).guest(sandbox_id).metrics()


def _will_rest(sandbox: Sandbox, tenant: Tenant) -> bool:
    """Whether its timeout pauses it. The longest life that its tenant allows ends it all the same."""
    return sandbox.spec.auto_pause and sandbox.expires_at < latest_end(sandbox, tenant)


def _in_passage(row: Sandbox) -> Conflict:
    return Conflict(
        f"sandbox {row.id} is {row.state.value}",
        code="sandbox_state",
        retry="safe",
        retry_after=1,
        sandbox_id=row.id,
        state=row.state.value,
    )


def _why_expired(sandbox: Sandbox, tenant: Tenant) -> EndReason:
    return EndReason.MAX_LIFETIME if sandbox.expires_at >= latest_end(sandbox, tenant) else EndReason.EXPIRED
