"""What sandboxes can be made of beside snapshots: the templates that the nodes have."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from skerry.control.config import ControlConfig
from skerry.control.nodes import Nodes
from skerry.control.principal import Principal, Scope
from skerry.core.errors import NotFound
from skerry.core.models import SandboxSpec
from skerry.store import Store

SHAPE = SandboxSpec()


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    cpu: int
    memory_mb: int
    disk_mb: int
    """What a sandbox of it gets that asks for nothing else."""
    created_at: datetime
    """When a node first kept an image of it; where none has one yet, when this server started."""
    used: int
    """How many sandboxes of the caller's project (for an admin key: tenant) were made of it."""
    last_used_at: datetime | None


class Templates:
    def __init__(self, store: Store, nodes: Nodes, config: ControlConfig) -> None:
        self._store = store
        self._nodes = nodes
        self._began = config.clock()

    async def list(self, principal: Principal) -> Sequence[Template]:
        """By name."""
        principal.require(Scope.READ)
        async with self._store.read() as tx:
            uses = await tx.sandboxes.uses(
                principal.tenant_id, project_id=None if principal.is_admin else principal.project_id
            )
        since = self._since()
        found: list[Template] = []
        for name in self._nodes.templates():
            used, last = uses.get(name, (0, None))
            created = since.get(name, self._began)
            found.append(Template(name, SHAPE.cpu, SHAPE.memory_mb, SHAPE.disk_mb, created, used, last))
        return found

    async def get(self, principal: Principal, name: str) -> Template:
        """Raises NotFound `template_not_found`."""
        for template in await self.list(principal):
            if template.name == name:
                return template
        raise NotFound(f"there is no template {name!r}", code="template_not_found", template=name)

    def _since(self) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        for image in self._nodes.images():
            if image.kind == "template" and image.created_at:
                made = datetime.fromisoformat(image.created_at).astimezone(UTC)
                found[image.template] = min(made, found.get(image.template, made))
        return found
