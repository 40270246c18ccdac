"""Forking: running copies of a running sandbox."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import structlog

from skerry.control.access import Access
from skerry.control.checks import check_env, check_metadata, check_timeout
from skerry.control.creation import POLL_S, Creation, new_record, said
from skerry.control.delivery import Delivery
from skerry.control.egress import layers_of
from skerry.control.endings import Endings
from skerry.control.idempotency import check_key, request_hashes, require_same
from skerry.control.live import Live
from skerry.control.origin import Origin
from skerry.control.passages import Passages, busy_error, ended_or
from skerry.control.principal import Principal, Scope
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import Conflict, InternalError, SkerryError, Unavailable
from skerry.core.lifecycle import EndReason, Event, State
from skerry.core.limits import FORK_MAX, check_range, refuse
from skerry.core.models import NO_SECRETS, Bindings, Sandbox, SandboxSpec
from skerry.core.secrets import check_bindings, laid_over
from skerry.node.contract import NodeSandbox
from skerry.store import Remembered

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One fork: its own id, its copies', what they are to be, and its idempotency key and request, hashed."""

    id: str
    copies: list[str]
    spec: SandboxSpec
    key_hash: bytes | None
    body_hash: bytes


class Forks(Service):
    def __init__(
        self, context: Context, access: Access, creation: Creation, endings: Endings, passages: Passages,
        delivery: Delivery,
    ) -> None:  # fmt: skip
        super().__init__(context)
        self._access = access
        self._delivery = delivery
        self._creation = creation
        self._endings = endings
        self._passages = passages
        self._forking: dict[str, asyncio.Task[Sequence[Sandbox | SkerryError]]] = {}

    async def fork(
        self,
        principal: Principal,
        sandbox_id: str,
        count: int = 1,
        *,
        timeout_ms: int | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Bindings = NO_SECRETS,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Sequence[Sandbox | SkerryError]:
        """`count` running copies, each with an identity of its own; the original goes on. One result for each copy.

        What is None is the original's; `env` and `secrets` are laid over the original's. Of a sandbox that was given
        secrets, or has some bound, it takes the scope `secrets:use`. Raises, with nothing
        started, InvalidRequest, Gone, Conflict, LimitExceeded `sandbox_limit` where not all of them would have room,
        and what `contract.Node.fork` raises where no copy could be tried. A cancelled call without a key leaves no
        copy. With an idempotency key: the same key and request give the same copies for 24 hours, whatever became of
        them (a fork that was refused, or of which no copy could be tried, may be tried again); another request is
        Conflict `idempotency_mismatch`.
        """
        body = {
            "act": "fork", "sandbox_id": sandbox_id, "count": count, "timeout_ms": timeout_ms,
            "env": dict(env or {}), "metadata": None if metadata is None else dict(metadata),
        }  # fmt: skip
        if secrets:
            body["secrets"] = asdict(secrets)
        async with self._recorder.refusals(principal, "sandbox.forked", sandbox_id):
            principal.require(Scope.WRITE)
            check_key(idempotency_key)
            await self._access.record(principal, sandbox_id)
            hashes = request_hashes(principal.tenant_id, body, idempotency_key)
            if (earlier := await self._earlier(principal, *hashes)) is not None:  # the original may be over by now
                return earlier
            live = await self._access.running(principal, sandbox_id, Scope.WRITE)
            async with self._store.read() as tx:
                tenant = await tx.tenants.get(live.record.tenant_id)
            problems = [
                *check_range("count", count, 1, FORK_MAX),
                *check_env("env", env or {}),
                *check_bindings(secrets, env or {}),
                *check_metadata("metadata", metadata or {}),
            ]
            if timeout_ms is not None:
                problems += check_timeout("timeout_ms", timeout_ms, tenant.max_lifetime_ms)
            refuse(problems)
            spec = _copied(live.record.spec, timeout_ms, env, secrets, metadata)
            if spec.secrets:
                principal.require(Scope.SECRETS_USE)
        asked = _Asked(ids.new_id(ids.FORK), [ids.new_id(ids.SANDBOX) for _ in range(count)], spec, *hashes)
        task = self._owned.spawn(self._fork(principal, live, asked), f"fork {sandbox_id}")
        self._forking[asked.id] = task
        task.add_done_callback(lambda _: self._forking.pop(asked.id, None))
        try:
            return await self._owned.join(task)
        except asyncio.CancelledError:
            if not task.done() and idempotency_key is None:  # nobody will ever learn their ids
                self._owned.spawn(self._abandon(task, asked.copies), f"abandon copies of {sandbox_id}")
            raise

    async def _earlier(
        self, principal: Principal, key_hash: bytes | None, body_hash: bytes
    ) -> Sequence[Sandbox | SkerryError] | None:
        """What a fork under this key has made, once it is through."""
        if key_hash is None:
            return None
        async with self._store.read() as tx:
            remembered = await tx.idempotency.find(principal.tenant_id, key_hash, self._config.clock())
        return None if remembered is None else await self._same(remembered, body_hash)

    async def _same(self, remembered: Remembered, body_hash: bytes) -> Sequence[Sandbox | SkerryError]:
        require_same(remembered, body_hash)
        task = self._forking.get(remembered.subject)
        if task is not None:
            return await self._owned.join(task)
        try:
            async with asyncio.timeout(self._config.create_deadline_s + self._config.kill_deadline_s):
                return [_outcome(await self._creation.settled(copy)) for copy in remembered.made]
        except TimeoutError:
            raise Unavailable("the copies of this idempotency key are still coming up", retry_after=POLL_S) from None

    async def _abandon(self, task: "asyncio.Task[Sequence[Sandbox | SkerryError]]", copies: Sequence[str]) -> None:
        await asyncio.wait({task})
        for sandbox_id in copies:
            if self._live.get(sandbox_id) is not None:
                await self._endings.end(sandbox_id, Event.KILL, EndReason.KILLED)

    async def _fork(self, principal: Principal, original: Live, asked: "_Asked") -> Sequence[Sandbox | SkerryError]:
        async with self._passages.turn(original):
            async with self._recorder.refusals(principal, "sandbox.forked", original.id):
                earlier = await self._earlier(principal, asked.key_hash, asked.body_hash)
                if earlier is not None:  # forked while this one waited for its turn
                    return earlier
                lives, asked = await self._insert(principal, original, asked)
            try:
                found = await self._tried(original, asked)
                await self._inherit(original, lives)
            except SkerryError as error:
                await asyncio.gather(*(self._creation.failed(live, error, principal) for live in lives))
                await self._release(asked)
                raise ended_or(original, error) from error
            except asyncio.CancelledError:  # the server stops
                stopped = Unavailable("the server stopped while it was starting")
                await asyncio.gather(*(self._creation.failed(live, stopped, principal) for live in lives))
                await self._release(asked)
                raise
        return await asyncio.gather(*(self._result(live, found.get(live.id), principal) for live in lives))

    async def _release(self, asked: "_Asked") -> None:
        if asked.key_hash is not None:
            async with self._store.write() as tx:
                await tx.idempotency.release(asked.id)

    async def _insert(self, principal: Principal, original: Live, asked: "_Asked") -> tuple[list[Live], "_Asked"]:
        record = original.record
        if record.state is not State.RUNNING:
            raise busy_error(original)
        asked = replace(asked, spec=replace(asked.spec, network=record.spec.network))  # as it is by now
        copies = asked.copies
        origin = Origin(asked.spec, record.node_id, self._nodes.get(record.node_id), record.snapshot_id)
        await self._sink.flush()
        async with self._store.write() as tx:
            tenant = await tx.tenants.get(record.tenant_id, lock=True)
            await self._creation.check_limit(tx, tenant, len(copies))
            await self._delivery.check(tx, record.project_id, asked.spec.secrets)
            if original.secrets:
                principal.require(Scope.SECRETS_USE)
            now = self._config.clock()
            rows = [
                replace(new_record(sandbox_id, principal, origin, now), project_id=record.project_id)
                for sandbox_id in copies
            ]
            for row in rows:
                await tx.sandboxes.add(row)
                await tx.secrets.copy_uses(original.id, row.id)
                event = self._recorder.by(
                    principal, "sandbox.requested", row.id, forked_from=original.id, **said(origin)
                )
                await self._sink.append_in(tx.audit, event)
            if asked.key_hash is not None:
                other = await tx.idempotency.claim(
                    principal.tenant_id, asked.key_hash, asked.body_hash, asked.id, now, made=copies
                )
                if other is not None:  # an act of another sandbox, or of another server
                    require_same(other, asked.body_hash)
                    raise Conflict("the same request is under way", code="sandbox_state", retry="safe", retry_after=1)
            event = self._recorder.by(principal, "sandbox.forked", original.id, copies=list(copies))
            await self._sink.append_in(tx.audit, event)
            egress = await layers_of(tx, self._config, record.project_id, asked.spec)
        return [self._live.add(row) for row in rows], replace(asked, spec=replace(asked.spec, egress=egress))

    async def _inherit(self, original: Live, copies: Sequence[Live]) -> None:
        """Take what the original was given out of what its copies say: what it was given while they were made, too."""
        if len(original.secrets) == len(copies[0].secrets):
            return
        async with self._store.write() as tx:
            for live in copies:
                await tx.secrets.use(live.id, original.secrets)
                live.learn(original.secrets)

    async def _tried(self, original: Live, asked: "_Asked") -> Mapping[str, NodeSandbox | SkerryError]:
        node = self._nodes.get(original.record.node_id)
        deadline = self._config.create_deadline_s
        try:
            async with asyncio.timeout(deadline):
                return await node.fork(original.id, dict.fromkeys(asked.copies, asked.spec))
        except TimeoutError:
            raise InternalError(
                f"the copies did not come up within {deadline:g} s", code="passage_failed", step="deadline"
            ) from None
        except SkerryError as error:
            raise await self._access.explain(original, error) from error
        except Exception as error:
            log.exception("the node broke", sandbox=original.id, act="fork")
            raise InternalError(
                f"the node broke: {type(error).__name__}", code="passage_failed", step="node"
            ) from error

    async def _result(
        self, live: Live, found: NodeSandbox | SkerryError | None, principal: Principal
    ) -> Sandbox | SkerryError:
        if found is None:
            found = InternalError("the node said nothing of this copy", code="vm_start_failed", step="fork")
        if isinstance(found, SkerryError):
            return await self._creation.failed(live, found, principal)
        try:
            return await self._creation.started(live, found.start_kind, principal)
        except SkerryError as error:
            return await self._creation.failed(live, error, principal)


def _outcome(copy: Sandbox) -> Sandbox | SkerryError:
    """A copy of an earlier fork, as that fork's own answer had it."""
    if copy.state is State.ERROR and copy.end_reason is EndReason.START_FAILED:
        return InternalError(copy.error or "it did not come up", code="vm_start_failed", sandbox_id=copy.id)
    return copy


def _copied(
    spec: SandboxSpec,
    timeout_ms: int | None,
    env: Mapping[str, str] | None,
    secrets: Bindings,
    metadata: Mapping[str, str] | None,
) -> SandboxSpec:
    return replace(
        spec,
        timeout_ms=spec.timeout_ms if timeout_ms is None else timeout_ms,
        env=dict(env or {}),
        secrets=laid_over(spec.secrets, secrets, env or ()),
        metadata=dict(spec.metadata if metadata is None else metadata),
    )
