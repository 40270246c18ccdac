"""What projects, and templates within them, say about what may leave."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.core.models import NetworkRules
from skerry.store.records import EgressPolicy
from skerry.store.tables import egress_policies

_OWN = ""
"""Stands in the column `template` of the project's own."""


def network_of(stored: Mapping[str, Any]) -> NetworkRules | None:
    """From a column of JSON; None for the empty object."""
    return NetworkRules(stored["mode"], tuple(stored["allow"]), tuple(stored["deny"])) if stored else None


def stored_network(rules: NetworkRules | None) -> dict[str, Any]:
    """For a column of JSON."""
    return {} if rules is None else {**asdict(rules), "allow": list(rules.allow), "deny": list(rules.deny)}


class EgressPolicies:
    """Of a project (`template` None) and of templates within it. What is not there says nothing."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def of_project(self, project_id: str) -> dict[str | None, EgressPolicy]:
        """By template; under None the project's own."""
        e = egress_policies.c
        query = select(e.template, e.mode, e.allow, e.deny, e.updated_at).where(e.project_id == project_id)
        return {
            template or None: EgressPolicy(
                project_id, template or None, NetworkRules(mode, tuple(allow), tuple(deny)), updated_at
            )
            for template, mode, allow, deny, updated_at in await self._db.execute(query.order_by(e.template))
        }

    async def put(self, policy: EgressPolicy) -> None:
        """In place of the one before."""
        await self.remove(policy.project_id, policy.template)
        row = {
            "project_id": policy.project_id,
            "template": policy.template or _OWN,
            "updated_at": policy.updated_at,
            **stored_network(policy.rules),
        }
        await self._db.execute(insert(egress_policies).values(row))

    async def remove(self, project_id: str, template: str | None) -> bool:
        """False if there was none."""
        e = egress_policies.c
        query = delete(egress_policies).where(e.project_id == project_id, e.template == (template or _OWN))
        return (await self._db.execute(query)).rowcount > 0
