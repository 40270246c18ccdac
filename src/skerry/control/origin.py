"""What a new sandbox is made of: a template, or a snapshot."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Final

from skerry.control.nodes import Nodes
from skerry.control.principal import Principal
from skerry.control.recorder import text
from skerry.core import ids
from skerry.core.errors import Conflict, NotFound, Problem
from skerry.core.limits import refuse
from skerry.core.models import SandboxSpec, Snapshot, SnapshotState
from skerry.node.contract import Node, NodeSandbox, TemplateInfo
from skerry.store import MadeOf, Tx

_DEFAULTS: Final = SandboxSpec()


@dataclass(frozen=True, slots=True)
class Origin:
    spec: SandboxSpec
    """As the node gets it, `env` and all."""
    node_id: str
    node: Node
    snapshot_id: str | None = None
    holds_secrets: bool = False
    """Its memory does, as the snapshot's."""

    async def create(self, sandbox_id: str) -> NodeSandbox:
        if self.snapshot_id is None:
            return await self.node.create(sandbox_id, self.spec)
        return await self.node.create(sandbox_id, self.spec, snapshot_id=self.snapshot_id)


def named_fields(spec: SandboxSpec, given: Collection[str] | None) -> frozenset[str]:
    """Which fields the caller named; where that is not known, those that are not the default."""
    if given is not None:
        return frozenset(given)
    return frozenset(f.name for f in fields(spec) if getattr(spec, f.name) != getattr(_DEFAULTS, f.name))


async def origin_of(tx: Tx, nodes: Nodes, principal: Principal, spec: SandboxSpec, given: Collection[str]) -> Origin:
    """A template before a snapshot of that name; no snapshot can be given a template's name.

    Raises NotFound `template_not_found` or `snapshot_not_found`, Conflict `snapshot_not_ready`, InvalidRequest for what
    does not fit the snapshot.
    """
    snapshot = await _snapshot_of(tx, nodes, principal, spec.template)
    if snapshot is None:
        node_id, node = nodes.place(spec)
        return Origin(_as_template_wants(spec, node.template(spec.template), given), node_id, node)
    require_ready(snapshot)
    refuse(_misfits(spec, snapshot, given))
    made = replace(
        spec,
        template=snapshot.template,
        cpu=snapshot.cpu,
        memory_mb=snapshot.memory_mb,
        disk_mb=spec.disk_mb if "disk_mb" in given else snapshot.disk_mb,
    )
    return Origin(made, snapshot.node_id, nodes.get(snapshot.node_id), snapshot.id, snapshot.holds_secrets)


def _as_template_wants(spec: SandboxSpec, template: TemplateInfo, given: Collection[str]) -> SandboxSpec:
    """With the template's own shape where the caller named none."""
    return replace(
        spec,
        cpu=spec.cpu if "cpu" in given or template.cpu is None else template.cpu,
        memory_mb=spec.memory_mb if "memory_mb" in given or template.memory_mb is None else template.memory_mb,
    )


async def _snapshot_of(tx: Tx, nodes: Nodes, principal: Principal, ref: str) -> Snapshot | None:
    if ids.is_id(ref, ids.SNAPSHOT):
        return await snapshot_of(tx, principal, ref)
    return None if nodes.has_template(ref) else await tx.snapshots.find_named(principal.project_id, ref)


async def made_of(tx: Tx, nodes: Nodes, principal: Principal, ref: str) -> MadeOf:
    """What the sandboxes were made of that a create of `ref` has made, whichever snapshot had the name then."""
    if ids.is_id(ref, ids.SNAPSHOT):
        return MadeOf(snapshot_ids=(ref,))
    if nodes.has_template(ref):
        return MadeOf(template=ref)
    return MadeOf(template=ref, snapshot_ids=await tx.snapshots.ids_named(principal.project_id, ref))


async def snapshot_of(tx: Tx, principal: Principal, ref: str, *, lock: bool = False) -> Snapshot:
    """By its id, or by its name in the caller's project. NotFound `snapshot_not_found`: the same words for what never
    was and for what is another's."""
    if ids.is_id(ref, ids.SNAPSHOT):
        found = await tx.snapshots.find(principal.tenant_id, ref, lock=lock)
        if found is not None and not principal.is_admin and found.project_id != principal.project_id:
            found = None
    else:
        found = await tx.snapshots.find_named(principal.project_id, ref)
        if found is not None and lock:
            found = await tx.snapshots.find(principal.tenant_id, found.id, lock=True)
    if found is None:
        raise NotFound(f"there is no snapshot {text(ref, 140)}", code="snapshot_not_found", snapshot=text(ref, 140))
    return found


def require_ready(snapshot: Snapshot) -> None:
    if snapshot.state is SnapshotState.CREATING:
        raise Conflict(
            f"snapshot {snapshot.id} is still being taken",
            code="snapshot_not_ready",
            retry="safe",
            retry_after=1,
            snapshot_id=snapshot.id,
            state=snapshot.state.value,
        )
    if snapshot.state is SnapshotState.FAILED:
        raise Conflict(
            f"snapshot {snapshot.id} failed: {snapshot.error}",
            code="snapshot_not_ready",
            snapshot_id=snapshot.id,
            state=snapshot.state.value,
        )


def _misfits(spec: SandboxSpec, snapshot: Snapshot, given: Collection[str]) -> list[Problem]:
    found = [
        Problem(field, "is the snapshot's own", asked, own)
        for field, asked, own in (
            ("cpu", spec.cpu, snapshot.cpu),
            ("memory_mb", spec.memory_mb, snapshot.memory_mb),
        )
        if field in given and asked != own
    ]
    if "disk_mb" in given and spec.disk_mb < snapshot.disk_mb:
        found.append(Problem("disk_mb", "is smaller than the snapshot's", spec.disk_mb, f"{snapshot.disk_mb}.."))
    return found
