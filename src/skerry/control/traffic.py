"""The record of what sandboxes looked up and connected to, and what was refused: from the nodes into the audit log."""

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

import structlog

from skerry.audit import SYSTEM, AuditEvent, Outcome
from skerry.control.access import Access
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import text
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import SkerryError
from skerry.core.limits import check_range, refuse
from skerry.core.models import NetworkEvent
from skerry.node.contract import Node
from skerry.store import Page

ACTIONS: Final = {
    "look_up": "network.looked_up",
    "connection": "network.connected",
    "packet": "network.packet_refused",
}
PREFIX: Final = "network."
RESUBSCRIBE_S: Final = 1.0
OWNERS_MAX: Final = 10_000
EVENTS_MAX: Final = 1000
NAME_KEPT: Final = 255
RULE_KEPT: Final = 300

log = structlog.get_logger(__name__)


class Traffic(Service):
    def __init__(self, context: Context, access: Access) -> None:
        super().__init__(context)
        self._access = access
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Tenant and project of sandboxes that were lately heard of: the last words come when one is over."""

    async def follow(self, node_id: str, node: Node) -> None:
        """For ever: write down what the node tells. What it tells meanwhile waits there."""
        while True:
            try:
                async with node.network_events() as events:
                    async for event in events:
                        await self._note(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, without this nothing more would be written down
                log.warning("the record of a node's traffic broke off", node=node_id, error=str(error))
            await asyncio.sleep(RESUBSCRIBE_S)

    async def _note(self, event: NetworkEvent) -> None:
        owner = await self._owner(event.sandbox_id)
        if owner is not None:
            record = _record(event, *owner)
            await self._sink.append(replace(record, detail=self._recorder.clean(event.sandbox_id, record.detail)))

    async def _owner(self, sandbox_id: str) -> tuple[str, str] | None:
        found = self._owners.get(sandbox_id)
        if found is None:
            live = self._live.get(sandbox_id)
            if live is not None:
                row = live.record
            else:
                try:
                    async with self._store.read() as tx:
                        row = await tx.sandboxes.find(sandbox_id)
                except SkerryError as error:
                    log.warning("whose traffic it was could not be found", sandbox=sandbox_id, error=str(error))
                    return None
            if row is None:
                return None
            found = self._owners[sandbox_id] = (row.tenant_id, row.project_id)
            if len(self._owners) > OWNERS_MAX:
                self._owners.popitem(last=False)
        return found

    async def events(
        self,
        principal: Principal,
        sandbox_id: str,
        *,
        refused: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[AuditEvent]:
        """What a sandbox looked up and connected to, oldest first; of one that is over, too. `refused`: only what was
        not allowed."""
        principal.require(Scope.READ)
        refuse(check_range("limit", limit, 1, EVENTS_MAX))
        await self._access.record(principal, sandbox_id)
        await self._sink.flush()
        async with self._store.read() as tx:
            return await tx.audit.of_subject(
                sandbox_id,
                limit=limit,
                cursor=cursor,
                only=PREFIX,
                outcome=Outcome.REFUSED if refused else None,
            )


def _record(event: NetworkEvent, tenant_id: str, project_id: str) -> AuditEvent:
    passed = Outcome.OK if event.error is None else Outcome.FAILED
    outcome = passed if event.allowed else Outcome.REFUSED
    action = ACTIONS.get(event.kind, PREFIX + event.kind)
    return AuditEvent(
        ids.new_id(ids.EVENT), event.at, tenant_id, project_id, SYSTEM, action, event.sandbox_id, outcome, _told(event)
    )


def _told(event: NetworkEvent) -> dict[str, Any]:
    clean = replace(
        event,
        rule=text(event.rule, RULE_KEPT),
        name=None if event.name is None else text(event.name, NAME_KEPT),
        error=None if event.error is None else text(event.error, RULE_KEPT),
    )
    always: dict[str, Any] = {"allowed": clean.allowed, "rule": clean.rule, "count": clean.count}
    some = {
        field: getattr(clean, field)
        for field in ("name", "address", "port", "record", "protocol", "error")
        if getattr(clean, field) is not None
    }
    if event.kind == "connection":
        some |= {
            "sent_bytes": clean.sent_bytes,
            "received_bytes": clean.received_bytes,
            "duration_ms": clean.duration_ms,
        }
    return {**always, **some}
