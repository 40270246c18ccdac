"""Creating a sandbox so that nothing half-made is ever left, whoever goes away in the middle."""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from skerry.control.checks import check_spec
from skerry.control.delivery import Delivery
from skerry.control.egress import around, layers_of
from skerry.control.endings import Endings
from skerry.control.idempotency import check_key, request_hashes, require_same
from skerry.control.live import Live
from skerry.control.origin import Origin, named_fields, origin_of
from skerry.control.principal import Principal, Scope
from skerry.control.redaction import clean_error
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import Conflict, InternalError, LimitExceeded, SkerryError, Unavailable
from skerry.core.lifecycle import EndReason, Event, State, gone
from skerry.core.limits import refuse
from skerry.core.models import Sandbox, SandboxSpec
from skerry.core.network import INNER_MODES, check_within, checked
from skerry.store import Remembered, Tenant, Tx

POLL_S: Final = 0.25
"""How often another server's create under the same key is looked at."""


GIVE_UP_RETRY_S: Final = 2.0


class _TakenError(Exception):
    """Rolls the transaction back: the key belongs to another create."""

    def __init__(self, remembered: Remembered) -> None:
        super().__init__(remembered.subject)
        self.remembered = remembered


@dataclass(frozen=True, slots=True)
class _Request:
    principal: Principal
    spec: SandboxSpec
    sandbox_id: str
    key_hash: bytes | None
    body_hash: bytes
    given: frozenset[str]


class Creation(Service):
    def __init__(self, context: Context, endings: Endings, delivery: Delivery) -> None:
        super().__init__(context)
        self._endings = endings
        self._delivery = delivery
        self._starting: dict[str, asyncio.Task[Sandbox]] = {}

    @property
    def starting(self) -> int:
        """Creates under way."""
        return len(self._starting)

    async def create(
        self,
        principal: Principal,
        spec: SandboxSpec,
        idempotency_key: str | None,
        given: Collection[str] | None = None,
    ) -> Sandbox:
        """See `Sandboxes.create`."""
        async with self._recorder.refusals(principal, "sandbox.created", None):
            principal.require(Scope.WRITE)
            if spec.secrets:
                principal.require(Scope.SECRETS_USE)
            check_key(idempotency_key)
            async with self._store.read() as tx:
                tenant = await tx.tenants.get(principal.tenant_id)
            refuse(list(check_spec(spec, tenant.max_lifetime_ms)))
            if spec.network is not None:
                spec = replace(spec, network=checked(spec.network, INNER_MODES, "network."))
        key_hash, body_hash = request_hashes(principal.tenant_id, asdict(spec), idempotency_key)
        request = _Request(principal, spec, ids.new_id(ids.SANDBOX), key_hash, body_hash, named_fields(spec, given))
        task = self._owned.spawn(self._run(request), f"create {request.sandbox_id}")
        self._starting[request.sandbox_id] = task
        task.add_done_callback(lambda _: self._starting.pop(request.sandbox_id, None))
        try:
            return await self._owned.join(task)
        except asyncio.CancelledError:
            if key_hash is None:  # nobody can ever learn its id
                self._owned.spawn(self._abandon(request.sandbox_id, task), f"abandon {request.sandbox_id}")
            raise

    async def _abandon(self, sandbox_id: str, task: asyncio.Task[Sandbox]) -> None:
        while not task.done() and self._live.get(sandbox_id) is None:
            await asyncio.wait({task}, timeout=0.01)
        if self._live.get(sandbox_id) is not None:
            await self._endings.end(sandbox_id, Event.KILL, EndReason.KILLED, error=None)
            await self._endings.gone(sandbox_id)

    async def _run(self, request: _Request) -> Sandbox:
        async with self._recorder.refusals(request.principal, "sandbox.created", None):
            try:
                live, origin = await self._insert(request)
            except _TakenError as taken:
                return await self._same(taken.remembered, request)
        return await self._start(live, origin, request)

    # ------------------------------------------------------------------------------------------------- the record

    async def _insert(self, request: _Request) -> tuple[Live, Origin]:
        principal = request.principal
        await self._sink.flush()
        async with self._store.write() as tx:
            tenant = await tx.tenants.get(principal.tenant_id, lock=True)
            now = self._config.clock()
            if request.key_hash is not None:
                found = await tx.idempotency.find(tenant.id, request.key_hash, now)
                if found is not None:
                    raise _TakenError(found)
            origin = await origin_of(tx, self._nodes, principal, request.spec, request.given)
            await self.check_limit(tx, tenant)
            await self._delivery.check(tx, principal.project_id, origin.spec.secrets)
            if origin.holds_secrets:
                principal.require(Scope.SECRETS_USE)
            origin = await self._walled(tx, principal, origin)
            sandbox = new_record(request.sandbox_id, principal, origin, now)
            await tx.sandboxes.add(sandbox)
            if origin.snapshot_id is not None:
                await tx.secrets.copy_uses(origin.snapshot_id, sandbox.id)
            if request.key_hash is not None:
                other = await tx.idempotency.claim(tenant.id, request.key_hash, request.body_hash, sandbox.id, now)
                if other is not None:
                    raise _TakenError(other)
            await self._sink.append_in(
                tx.audit, self._recorder.by(principal, "sandbox.requested", sandbox.id, **said(origin))
            )
        return self._live.add(sandbox), origin

    async def _walled(self, tx: Tx, principal: Principal, origin: Origin) -> Origin:
        """With what may leave it. Raises InvalidRequest `beyond_policy`."""
        spec = origin.spec
        if spec.network is not None:
            check_within(spec.network, await around(tx, self._config, principal.project_id, spec.template), "network.")
        egress = await layers_of(tx, self._config, principal.project_id, spec)
        return replace(origin, spec=replace(spec, egress=egress))

    async def check_limit(self, tx: Tx, tenant: Tenant, wanted: int = 1) -> None:
        """Raises LimitExceeded `sandbox_limit` where so many more are too many. Paused ones count."""
        live = await tx.sandboxes.count_live(tenant.id)
        if live + wanted > tenant.max_sandboxes:
            raise LimitExceeded(
                f"the tenant has {live} sandboxes and may have {tenant.max_sandboxes} at a time: no room for {wanted}",
                code="sandbox_limit",
                limit=tenant.max_sandboxes,
                live=live,
                retry_after=5,
            )

    async def _same(self, remembered: Remembered, request: _Request) -> Sandbox:
        """The sandbox of an earlier create under the same key, once it is up or over."""
        require_same(remembered, request.body_hash)
        task = self._starting.get(remembered.subject)
        if task is not None:
            return await self._owned.join(task)
        try:
            async with asyncio.timeout(self._config.create_deadline_s + self._config.kill_deadline_s):
                return await self.settled(remembered.subject)
        except TimeoutError:
            raise Unavailable(
                "the sandbox of this idempotency key is still coming up", code="unavailable", retry_after=POLL_S
            ) from None

    async def settled(self, sandbox_id: str) -> Sandbox:
        """Another server's, once it is up or over."""
        while True:
            async with self._store.read() as tx:
                row = await tx.sandboxes.get(sandbox_id)
            if row.state is not State.CREATING:
                return row
            await asyncio.sleep(POLL_S)

    # ----------------------------------------------------------------------------------------------------- the VM

    async def _start(self, live: Live, origin: Origin, request: _Request) -> Sandbox:
        try:
            try:
                if origin.snapshot_id is not None:
                    await self._delivery.recall([live])
                async with asyncio.timeout(self._config.create_deadline_s):
                    vm = await origin.create(live.id)
            except TimeoutError:
                raise InternalError(
                    f"the VM did not come up within {self._config.create_deadline_s:g} s",
                    code="vm_start_failed",
                    step="deadline",
                ) from None
            return await self.started(live, vm.start_kind, request.principal)
        except SkerryError as error:
            raise await self.failed(live, error, request.principal) from error
        except asyncio.CancelledError:  # the server stops
            await self.failed(live, Unavailable("the server stopped while it was starting"), request.principal)
            raise
        except Exception as error:
            wrapped = InternalError(f"the node broke: {type(error).__name__}", code="vm_start_failed", step="node")
            raise await self.failed(live, wrapped, request.principal) from error

    async def started(self, live: Live, start_kind: str, principal: Principal) -> Sandbox:
        async with live.lock:
            await self._sink.flush()
            async with self._store.write() as tx:
                row = await tx.sandboxes.get(live.id, lock=True)
                if row.state is not State.CREATING:  # a kill came first; its reaper removes the VM
                    raise gone(live.id, row.end_reason)
                now = self._config.clock()
                row = await tx.sandboxes.apply(
                    row,
                    Event.STARTED,
                    at=now,
                    started_at=now,
                    expires_at=now + timedelta(milliseconds=row.spec.timeout_ms),
                    start_kind=start_kind,
                )
                if row is None:
                    raise Conflict("the sandbox changed meanwhile", code="sandbox_state", sandbox_id=live.id)
                event = self._recorder.by(principal, "sandbox.created", live.id, start_kind=start_kind)
                await self._sink.append_in(tx.audit, event)
            live.last_used = now
            self._live.update(live, row)
            return row

    async def failed(self, live: Live, error: SkerryError, principal: Principal) -> SkerryError:
        """Write the failure down and make sure that nothing is left. Returns what to raise."""
        error = clean_error(error, live.redactor)
        try:
            row, ended_here = await self._give_up(live.id, error, principal)
        except SkerryError:  # the database is away: the record has to wait for it, the caller does not
            self._owned.spawn(self._give_up_later(live, error, principal), f"give up {live.id}")
            return error
        if not ended_here:
            # Killed meanwhile. The VM may have come up after the kill had looked for it: look again.
            await self._endings.gone(live.id)
            self._endings.reap(row)
        await self._endings.gone(live.id)
        return error if ended_here else gone(live.id, row.end_reason)

    async def _give_up(self, sandbox_id: str, error: SkerryError, principal: Principal) -> tuple[Sandbox, bool]:
        return await self._endings.end(
            sandbox_id,
            Event.START_FAILED,
            EndReason.START_FAILED,
            actor=principal.key_id,
            error=error.message,
            only_if=lambda row: row.state is State.CREATING,
        )

    async def _give_up_later(self, live: Live, error: SkerryError, principal: Principal) -> None:
        self._endings.reap(live.record)
        while True:
            await asyncio.sleep(GIVE_UP_RETRY_S)
            with contextlib.suppress(SkerryError):
                await self._endings.end(
                    live.id,
                    Event.KILL,
                    EndReason.START_FAILED,
                    actor=principal.key_id,
                    error=error.message,
                )
                return


def new_record(sandbox_id: str, principal: Principal, origin: Origin, now: datetime) -> Sandbox:
    return Sandbox(
        id=sandbox_id,
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        spec=replace(origin.spec, env={}, egress=()),
        state=State.CREATING,
        node_id=origin.node_id,
        created_at=now,
        started_at=None,
        expires_at=now + timedelta(milliseconds=origin.spec.timeout_ms),
        ended_at=None,
        end_reason=None,
        error=None,
        start_kind=None,
        snapshot_id=origin.snapshot_id,
    )


def said(origin: Origin) -> dict[str, Any]:
    """What is kept of a request for a sandbox: of variables the names only."""
    spec = origin.spec
    return {
        "template": spec.template,
        "snapshot_id": origin.snapshot_id,
        "cpu": spec.cpu,
        "memory_mb": spec.memory_mb,
        "disk_mb": spec.disk_mb,
        "timeout_ms": spec.timeout_ms,
        "idle_timeout_ms": spec.idle_timeout_ms,
        "auto_pause": spec.auto_pause,
        "auto_pause_memory": spec.auto_pause_memory,
        "auto_resume": spec.auto_resume,
        "public_ports": spec.public_ports,
        "network": None if spec.network is None else asdict(spec.network),
        "env_names": sorted(spec.env)[:64],
        **({"secrets": {**spec.secrets.env, **spec.secrets.files}} if spec.secrets else {}),
    }
