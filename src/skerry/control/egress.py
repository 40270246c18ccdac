"""What may leave sandboxes: the policies of projects and their templates, sandboxes' own rules, and how both come to
the nodes, for what runs and for what rests."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from skerry.control.access import Access
from skerry.control.checks import check_template
from skerry.control.config import ControlConfig
from skerry.control.live import Live
from skerry.control.principal import Principal, Scope
from skerry.control.service import Context, Service
from skerry.core.errors import NotFound, SkerryError
from skerry.core.lifecycle import FINAL, State, gone
from skerry.core.limits import refuse
from skerry.core.models import CuratedRule, EgressLayer, NetworkRules, Sandbox, SandboxSpec
from skerry.core.network import DEFAULT, INNER_MODES, PROJECT_MODES, check_within, checked, inner_layer, project_layer
from skerry.store import EgressPolicy, Tx

SPREAD_S: Final = 10.0
"""How long a change of a project's policy waits for its sandboxes to have it."""
RETRY_S: Final = 1.0
RULES_TOLD: Final = 64
"""So many rules of a list stand in the record of a change."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProjectEgress:
    """What is in force in a project."""

    project_id: str
    own: EgressPolicy | None
    """None: it has said nothing, and the default holds."""
    templates: Sequence[EgressPolicy]
    curated: Sequence[CuratedRule]
    notes: Sequence[str]
    """What could not be found out about the curated list."""

    @property
    def rules(self) -> NetworkRules:
        return DEFAULT if self.own is None else self.own.rules


@dataclass(frozen=True, slots=True)
class Spread:
    """How far a change has come."""

    cut: int
    """Connections that it forbids and that were ended."""
    pending: int
    """Sandboxes that do not have it yet, such as one that is just being paused. They get it."""


@dataclass(frozen=True, slots=True)
class SandboxNetwork:
    own: NetworkRules | None
    """None: whatever is allowed around it."""
    layers: Sequence[EgressLayer]
    """All that holds for it, its own included, from the outermost on."""


async def around(tx: Tx, config: ControlConfig, project_id: str, template: str | None) -> tuple[EgressLayer, ...]:
    """What holds for every sandbox of a project that goes back to this template; None: of the project alone."""
    found = await tx.egress.of_project(project_id)
    own, within = found.get(None), found.get(template) if template is not None else None
    outermost = project_layer(own.rules if own is not None else DEFAULT, config.curated.rules)
    return (outermost,) if within is None else (outermost, inner_layer("template", within.rules))


async def layers_of(tx: Tx, config: ControlConfig, project_id: str, spec: SandboxSpec) -> tuple[EgressLayer, ...]:
    """What holds for a sandbox of this spec."""
    outer = await around(tx, config, project_id, spec.template)
    return outer if spec.network is None else (*outer, inner_layer("sandbox", spec.network))


class Egress(Service):
    def __init__(self, context: Context, access: Access) -> None:
        super().__init__(context)
        self._access = access

    # ---------------------------------------------------------------------------------------------- projects, templates

    async def get(self, principal: Principal) -> ProjectEgress:
        """What is in force in the caller's project."""
        principal.require(Scope.EGRESS_READ)
        async with self._store.read() as tx:
            found = await tx.egress.of_project(principal.project_id)
        within = [policy for template, policy in found.items() if template is not None]
        curated = self._config.curated
        return ProjectEgress(principal.project_id, found.get(None), within, curated.rules, curated.notes)

    async def set(
        self, principal: Principal, rules: NetworkRules, *, template: str | None = None
    ) -> tuple[EgressPolicy, Spread]:
        """The project's policy from now on, or that of one of its templates, in its running and resting sandboxes too.

        Raises InvalidRequest that names each entry that is no rule, or (`beyond_policy`) that the project's own policy
        never lets a template's allow.
        """
        async with self._recorder.refusals(principal, "egress.set", None):
            principal.require(Scope.EGRESS_WRITE)
            refuse(list(check_template(template)))
            rules = checked(rules, INNER_MODES if template else PROJECT_MODES, tunnels=template is None)
            policy = EgressPolicy(principal.project_id, template, rules, self._config.clock())
            await self._sink.flush()
            async with self._store.write() as tx:
                # Two changes of a project at once: one after the other.
                await tx.tenants.get(principal.tenant_id, lock=True)
                if template is not None:
                    check_within(rules, await around(tx, self._config, principal.project_id, None))
                await tx.egress.put(policy)
                event = self._recorder.by(principal, "egress.set", None, template=template, **_told(rules))
                await self._sink.append_in(tx.audit, event)
        return policy, await self._spread(principal.project_id, template)

    async def reset(self, principal: Principal, *, template: str | None = None) -> Spread:
        """The project has the default again; of a template: it says nothing any more. NotFound `policy_not_found`."""
        async with self._recorder.refusals(principal, "egress.reset", None):
            principal.require(Scope.EGRESS_WRITE)
            await self._sink.flush()
            async with self._store.write() as tx:
                if not await tx.egress.remove(principal.project_id, template):
                    raise NotFound("there is no such policy", code="policy_not_found", template=template)
                event = self._recorder.by(principal, "egress.reset", None, template=template)
                await self._sink.append_in(tx.audit, event)
        return await self._spread(principal.project_id, template)

    async def _spread(self, project_id: str, template: str | None) -> Spread:
        """To all that it concerns. A create that has read the policy before is among them: it is known here since its
        record was written, and gets it once it is up."""
        tasks = [
            self._owned.spawn(self._push_at_last(live), f"egress {live.id}")
            for live in self._live
            if live.record.project_id == project_id and template in {None, live.record.spec.template}
        ]
        if not tasks:
            return Spread(0, 0)
        done, pending = await asyncio.wait(tasks, timeout=SPREAD_S)
        return Spread(sum(task.result() for task in done if not task.cancelled()), len(pending))

    # ------------------------------------------------------------------------------------------------------- sandboxes

    async def of_sandbox(self, principal: Principal, sandbox_id: str) -> SandboxNetwork:
        principal.require(Scope.READ)
        box = await self._access.record(principal, sandbox_id)
        async with self._store.read() as tx:
            return SandboxNetwork(box.spec.network, await layers_of(tx, self._config, box.project_id, box.spec))

    async def update(self, principal: Principal, sandbox_id: str, network: NetworkRules) -> tuple[Sandbox, int]:
        """A sandbox's own rules from now on, in place of those before. Returns how many connections were cut by it.

        Raises InvalidRequest (`beyond_policy` for what its project never allows), Gone, Conflict `sandbox_state`. On a
        node's error the rules are recorded and go on being brought to it.
        """
        async with self._recorder.refusals(principal, "sandbox.network_set", sandbox_id):
            live = await self._access.present(principal, sandbox_id, Scope.WRITE)
            wanted = checked(network, INNER_MODES)
            record = await self._owned.run(self._record(principal, live, wanted), f"set network {sandbox_id}")
        try:
            return record, await self._owned.run(self._push(live), f"egress {sandbox_id}")
        except SkerryError:
            self._owned.spawn(self._push_at_last(live), f"egress {sandbox_id}")
            raise

    async def _record(self, principal: Principal, live: Live, network: NetworkRules) -> Sandbox:
        async with live.lock:
            await self._sink.flush()
            async with self._store.write() as tx:
                row = await tx.sandboxes.get(live.id, lock=True)
                check_within(network, await around(tx, self._config, row.project_id, row.spec.template))
                changed = await tx.sandboxes.set_network(row, network)
                if changed is None or row.state in FINAL:
                    raise gone(live.id, row.end_reason)
                event = self._recorder.by(principal, "sandbox.network_set", live.id, **_told(network))
                await self._sink.append_in(tx.audit, event)
            self._live.update(live, changed)
            return changed

    # -------------------------------------------------------------------------------------------------------- to nodes

    async def learn(self, rules: Sequence[CuratedRule], notes: Sequence[str]) -> None:
        """Another curated list from now on, for what runs and rests too."""
        self._config.curated.rules, self._config.curated.notes = tuple(rules), tuple(notes)
        await self.at_start()

    async def at_start(self) -> None:
        """What the curated list has become since the last server, and what that did not bring to its node any more."""
        for live in self._live:
            self._owned.spawn(self._push_at_last(live), f"egress {live.id}")

    async def _push(self, live: Live) -> int:
        """Bring what holds now to its node; one at a time, so that the last to come has the newest."""
        async with live.egress:
            if live.ended is not None:
                return 0
            async with self._store.read() as tx:
                row = await tx.sandboxes.get(live.id)
                wanted = await layers_of(tx, self._config, row.project_id, row.spec)
            return await self._nodes.get(row.node_id).set_egress(live.id, wanted)

    async def _push_at_last(self, live: Live) -> int:
        """Until it has succeeded or the sandbox is over. One that is coming up is waited for."""
        await live.decided.wait()
        while live.ended is None and live.record.state is not State.CREATING:
            try:
                return await self._push(live)
            except SkerryError as error:
                if live.ended is None:
                    log.warning("a policy was not brought to a sandbox, will retry", sandbox=live.id, error=str(error))
                    await asyncio.sleep(RETRY_S)
        return 0


def _told(rules: NetworkRules) -> dict[str, Any]:
    return {"mode": rules.mode, "allow": list(rules.allow[:RULES_TOLD]), "deny": list(rules.deny[:RULES_TOLD])}
