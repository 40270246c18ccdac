"""Snapshots: kept states of sandboxes, which outlive them."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import structlog

from skerry.audit import SYSTEM, Outcome
from skerry.control.access import Access
from skerry.control.checks import check_page, check_snapshot_name
from skerry.control.idempotency import check_key, request_hashes, require_same
from skerry.control.live import Live
from skerry.control.origin import require_ready, snapshot_of
from skerry.control.passages import Passages, busy_error, ended_or
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import text
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import Conflict, InternalError, InvalidRequest, LimitExceeded, SkerryError
from skerry.core.lifecycle import State
from skerry.core.limits import refuse
from skerry.core.models import Snapshot, SnapshotState
from skerry.node.contract import NodeSnapshot
from skerry.store import Page, Tenant, Tx

RETRY_S: Final = 2.0
RETRY_MAX_S: Final = 30.0
POLL_S: Final = 0.25
"""How often a snapshot that another request takes under the same key is looked at."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Claim:
    """An idempotency key and its request, hashed. No key: None."""

    key_hash: bytes | None
    body_hash: bytes


def _holds_secrets(sandbox_id: str) -> Conflict:
    return Conflict(
        f"sandbox {sandbox_id} was given secrets, which its memory may hold: keep its disk alone (memory=false), "
        'or say that they may be kept (secrets="keep")',
        code="secrets_in_memory",
        sandbox_id=sandbox_id,
    )


async def _check_limit(tx: Tx, tenant: Tenant) -> None:
    """Raises LimitExceeded `snapshot_limit`."""
    kept = await tx.snapshots.count_kept(tenant.id)
    if kept >= tenant.max_snapshots:
        raise LimitExceeded(
            f"the tenant keeps {kept} snapshots and may keep {tenant.max_snapshots}: delete one first",
            code="snapshot_limit",
            limit=tenant.max_snapshots,
            kept=kept,
        )


class Snapshots(Service):
    """`ref` is a snapshot's id, or its name in the caller's project."""

    def __init__(self, context: Context, access: Access, passages: Passages) -> None:
        super().__init__(context)
        self._access = access
        self._passages = passages

    async def take(
        self,
        principal: Principal,
        sandbox_id: str,
        name: str | None = None,
        *,
        memory: bool = True,
        keep_secrets: bool = False,
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """Keep the state of a sandbox, which goes on. `memory` False: its disk alone. A name that is used again stands
        for the new one from when that is ready; what had it before is found by its id.

        A memory that may hold secrets is kept only where `keep_secrets` says so, which takes the scope `secrets:use`:
        else it is Conflict `secrets_in_memory`.

        Raises InvalidRequest, Gone, Conflict `sandbox_state`, LimitExceeded `snapshot_limit`, and what
        `contract.Node.snapshot` does: the record then stays, and says `failed`. Carried out to the end even if the
        caller is cancelled. With an idempotency key: the same key and request give the same snapshot for 24 hours,
        unless it failed; another request is Conflict `idempotency_mismatch`.
        """
        async with self._recorder.refusals(principal, "snapshot.created", sandbox_id):
            principal.require(Scope.WRITE)
            if keep_secrets:
                principal.require(Scope.SECRETS_USE)
            check_key(idempotency_key)
            refuse(list(check_snapshot_name(name)))
            if name is not None and self._nodes.has_template(name):
                raise InvalidRequest.of("name", "is a template's name", allowed="another name", given=name)
            body = {"act": "snapshot", "sandbox_id": sandbox_id, "name": name, "memory": memory}
            if keep_secrets:
                body["secrets"] = "keep"
            claim = _Claim(*request_hashes(principal.tenant_id, body, idempotency_key))
            if (earlier := await self._earlier(principal, claim)) is not None:  # its sandbox may be over by now
                return earlier
            live = await self._access.present(principal, sandbox_id, Scope.WRITE)
        taking = self._take(principal, live, name, claim, memory=memory, keep_secrets=keep_secrets)
        return await self._owned.run(taking, f"snapshot {sandbox_id}")

    async def _earlier(self, principal: Principal, claim: "_Claim") -> Snapshot | None:
        """What this key has made, once it is there. One that is being taken is waited for."""
        if claim.key_hash is None:
            return None
        waited = 0.0
        while True:
            async with self._store.read() as tx:
                remembered = await tx.idempotency.find(principal.tenant_id, claim.key_hash, self._config.clock())
                if remembered is None:
                    return None
                require_same(remembered, claim.body_hash)
                found = await snapshot_of(tx, principal, remembered.subject)
            if found.state is SnapshotState.READY:
                return found
            if waited >= self._config.passage_wait_s:
                require_ready(found)
            await asyncio.sleep(POLL_S)
            waited += POLL_S

    async def _take(
        self, principal: Principal, live: Live, name: str | None, claim: "_Claim", *, memory: bool, keep_secrets: bool
    ) -> Snapshot:
        async with self._passages.turn(live):
            async with self._recorder.refusals(principal, "snapshot.created", live.id):
                if (earlier := await self._earlier(principal, claim)) is not None:  # taken while this one waited
                    return earlier
                if memory and live.secrets and not keep_secrets:
                    raise _holds_secrets(live.id)
                snapshot = await self._begin(principal, live, name, claim, memory=memory, keep_secrets=keep_secrets)
            try:
                taken = await self._tried(live, snapshot)
                if memory and live.secrets and not keep_secrets:  # they were handed over meanwhile
                    raise _holds_secrets(live.id)
            except SkerryError as error:
                await self._settled(snapshot, principal.key_id, None, error)
                raise ended_or(live, error) from error
            return await self._settled(snapshot, principal.key_id, taken, None)

    async def _begin(
        self, principal: Principal, live: Live, name: str | None, claim: "_Claim", *, memory: bool, keep_secrets: bool
    ) -> Snapshot:
        record = live.record
        if record.state not in {State.RUNNING, State.PAUSED}:
            raise busy_error(live)
        snapshot = Snapshot(
            id=ids.new_id(ids.SNAPSHOT),
            tenant_id=record.tenant_id,
            project_id=record.project_id,
            name=name,
            sandbox_id=record.id,
            template=record.spec.template,
            memory=memory,
            cpu=record.spec.cpu,
            memory_mb=record.spec.memory_mb,
            disk_mb=record.spec.disk_mb,
            state=SnapshotState.CREATING,
            error=None,
            size_bytes=None,
            stood_still_ms=None,
            node_id=record.node_id,
            created_at=self._config.clock(),
            holds_secrets=memory and keep_secrets,
        )
        await self._sink.flush()
        async with self._store.write() as tx:
            await _check_limit(tx, await tx.tenants.get(snapshot.tenant_id, lock=True))
            await tx.snapshots.add(snapshot)
            if claim.key_hash is not None:
                taken = await tx.idempotency.claim(
                    principal.tenant_id, claim.key_hash, claim.body_hash, snapshot.id, snapshot.created_at
                )
                if taken is not None:
                    require_same(taken, claim.body_hash)
                    raise Conflict(
                        "the same request is under way", code="snapshot_not_ready", retry="safe", retry_after=1
                    )
            event = self._recorder.by(
                principal, "snapshot.requested", record.id, snapshot_id=snapshot.id, name=name, memory=memory
            )
            await self._sink.append_in(tx.audit, event)
        return snapshot

    async def _tried(self, live: Live, snapshot: Snapshot) -> NodeSnapshot:
        node = self._nodes.get(snapshot.node_id)
        deadline = self._config.snapshot_deadline_s
        try:
            async with asyncio.timeout(deadline):
                return await node.snapshot(live.id, snapshot.id, memory=snapshot.memory)
        except TimeoutError:
            raise InternalError(
                f"the snapshot was not taken within {deadline:g} s", code="passage_failed", step="deadline"
            ) from None
        except SkerryError as error:
            raise await self._access.explain(live, error) from error
        except Exception as error:
            log.exception("the node broke", sandbox=live.id, act="snapshot")
            raise InternalError(
                f"the node broke: {type(error).__name__}", code="passage_failed", step="node"
            ) from error

    async def _settled(
        self, snapshot: Snapshot, actor: str, taken: NodeSnapshot | None, error: SkerryError | None
    ) -> Snapshot:
        """Write down what came of it. If the database is away, go on trying behind the caller's back."""
        try:
            return await self._settle(snapshot, actor, taken, error)
        except SkerryError:
            self._owned.spawn(self._settle_later(snapshot, actor, taken, error), f"settle {snapshot.id}")
            raise

    async def _settle(
        self, snapshot: Snapshot, actor: str, taken: NodeSnapshot | None, error: SkerryError | None
    ) -> Snapshot:
        await self._sink.flush()
        async with self._store.write() as tx:
            if taken is not None:
                await tx.secrets.copy_uses(snapshot.sandbox_id, snapshot.id)
                settled = await tx.snapshots.settle(
                    snapshot,
                    SnapshotState.READY,
                    size_bytes=taken.size_bytes,
                    stood_still_ms=taken.timings_ms.get("stood_still"),
                    holds_secrets=snapshot.memory and await tx.secrets.given(snapshot.id),
                )
            else:
                said = text(error.message) if error is not None else "it was not taken"
                settled = await tx.snapshots.settle(snapshot, SnapshotState.FAILED, error=said)
                await tx.idempotency.release(snapshot.id)
            if settled is None:
                raise Conflict("the snapshot changed meanwhile", code="snapshot_not_ready", snapshot_id=snapshot.id)
            ok = taken is not None
            row = await tx.sandboxes.get(snapshot.sandbox_id)
            detail = {} if ok or error is None else {"code": error.code, "error": text(error.message)}
            event = self._recorder.on(
                row,
                "snapshot.created" if ok else "snapshot.failed",
                Outcome.OK if ok else Outcome.FAILED,
                actor=actor,
                snapshot_id=snapshot.id,
                **detail,
            )
            await self._sink.append_in(tx.audit, event)
        if taken is None:
            self._owned.spawn(self._drop(snapshot.id, snapshot.node_id), f"drop {snapshot.id}")
        return settled

    async def _settle_later(
        self, snapshot: Snapshot, actor: str, taken: NodeSnapshot | None, error: SkerryError | None
    ) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._settle(snapshot, actor, taken, error)
            except Conflict:
                return
            except SkerryError as failure:
                log.warning("could not settle a snapshot, will retry", snapshot=snapshot.id, error=str(failure))
            else:
                return

    # --------------------------------------------------------------------------------------------------------- look

    async def get(self, principal: Principal, ref: str) -> Snapshot:
        """Whatever became of it. NotFound `snapshot_not_found`."""
        principal.require(Scope.READ)
        async with self._store.read() as tx:
            return await snapshot_of(tx, principal, ref)

    async def list(
        self,
        principal: Principal,
        *,
        name: str | None = None,
        any_tag: bool = False,
        sandbox_id: str | None = None,
        states: Collection[SnapshotState] = (),
        newest_of_name: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Snapshot]:
        """Newest first. Empty filters do not filter. `any_tag`: whatever tag follows the name; `newest_of_name`:
        of a name only what it stands for."""
        principal.require(Scope.READ)
        refuse([*check_page(limit)])
        async with self._store.read() as tx:
            return await tx.snapshots.page(
                principal.tenant_id,
                project_id=None if principal.is_admin else principal.project_id,
                name=name,
                any_tag=any_tag,
                sandbox_id=sandbox_id,
                states=states,
                newest_of_name=newest_of_name,
                limit=limit,
                cursor=cursor,
            )

    # -------------------------------------------------------------------------------------------------------- delete

    async def delete(self, principal: Principal, ref: str) -> None:
        """Forget it; by a name, all that were taken under it. Sandboxes made of it live on. NotFound
        `snapshot_not_found`; Conflict `snapshot_not_ready` while one is being taken."""
        async with self._recorder.refusals(principal, "snapshot.deleted", None):
            principal.require(Scope.WRITE)
            await self._sink.flush()
            async with self._store.write() as tx:
                found = [await snapshot_of(tx, principal, ref, lock=True)]
                if not ids.is_id(ref, ids.SNAPSHOT):
                    found = await tx.snapshots.all_named(principal.project_id, ref)
                for snapshot in found:
                    await self._remove(tx, principal, snapshot)
        drops = [self._owned.spawn(self._drop(each.id, each.node_id), f"drop {each.id}") for each in found]
        await asyncio.wait(drops, timeout=self._config.kill_deadline_s)

    async def _remove(self, tx: Tx, principal: Principal, snapshot: Snapshot) -> None:
        if snapshot.state is SnapshotState.CREATING:
            require_ready(snapshot)
        await tx.snapshots.remove(snapshot.id)
        event = self._recorder.by(
            principal, "snapshot.deleted", snapshot.sandbox_id, snapshot_id=snapshot.id, name=snapshot.name
        )
        await self._sink.append_in(tx.audit, event)

    async def _drop(self, snapshot_id: str, node_id: str) -> None:
        """Have the node forget it, trying again until it has."""
        delay = RETRY_S
        node = self._nodes.find(node_id)
        while node is not None:
            try:
                async with asyncio.timeout(self._config.kill_deadline_s):
                    await node.delete_snapshot(snapshot_id)
            except (SkerryError, TimeoutError) as error:
                log.warning(
                    "could not drop a snapshot, will retry", snapshot=snapshot_id, error=str(error) or "timeout"
                )
            else:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_MAX_S)

    # ------------------------------------------------------------------------------------------------------ at start

    async def at_start(self) -> None:
        """Those that were being taken when the server stopped are there or have failed, as their nodes say; what has
        no record is dropped."""
        there = {snapshot_id: node_id for node_id, node in self._nodes.items() for snapshot_id in node.snapshots()}
        async with self._store.read() as tx:
            rows = await tx.snapshots.everything()
        for row in rows:
            if row.state is SnapshotState.CREATING:
                taken = self._kept(row) if row.id in there else None
                error: SkerryError = InternalError("the server stopped while it was being taken", code="passage_failed")
                if taken is not None and row.memory and not row.holds_secrets and await self._given(row.sandbox_id):
                    taken, error = None, _holds_secrets(row.sandbox_id)
                await self._settle(row, SYSTEM, taken, None if taken is not None else error)
        known = {row.id for row in rows if row.state is not SnapshotState.FAILED}
        for snapshot_id in there.keys() - known:
            log.warning("dropping a snapshot without a record", snapshot=snapshot_id)
            self._owned.spawn(self._drop(snapshot_id, there[snapshot_id]), f"drop {snapshot_id}")

    async def _given(self, sandbox_id: str) -> bool:
        async with self._store.read() as tx:
            return await tx.secrets.given(sandbox_id)

    def _kept(self, row: Snapshot) -> NodeSnapshot:
        images = self._nodes.get(row.node_id).images()
        size = sum(image.size_bytes for image in images if image.image_id == row.id)
        return NodeSnapshot(row.id, row.memory, size, {})
