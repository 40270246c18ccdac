"""Who is asking, and what they may do."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from skerry.core.errors import Forbidden
from skerry.core.models import Sandbox


class Scope(StrEnum):
    READ = "sandboxes:read"  # list, get, metrics, logs
    WRITE = "sandboxes:write"  # create, kill, timeouts, pause, resume, snapshots, forks
    USE = "sandboxes:use"  # commands, files, terminals
    SECRETS_READ = "secrets:read"  # their names and versions
    SECRETS_WRITE = "secrets:write"  # put and delete them
    SECRETS_USE = "secrets:use"  # bind them to sandboxes and commands
    EGRESS_READ = "egress:read"  # the project's policies
    EGRESS_WRITE = "egress:write"  # set them: what may leave any sandbox of the project
    KEYS = "keys:write"  # make, list and revoke keys
    ADMIN = "admin"  # everything of the tenant


ALL_SCOPES: Final = frozenset(scope.value for scope in Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: a key, and the project and tenant it belongs to; or who holds a token of one sandbox."""

    tenant_id: str
    project_id: str
    key_id: str
    scopes: frozenset[str]
    sandbox_id: str | None = None
    """It may see this one sandbox only."""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN.value in self.scopes

    def holds(self, scope: str) -> bool:
        return self.is_admin or scope in self.scopes

    def require(self, scope: Scope) -> None:
        """Raises Forbidden naming the scope that is missing."""
        if not self.holds(scope.value):
            raise Forbidden(f"this key lacks the scope {scope.value}", scope=scope.value)

    def sees(self, sandbox: Sandbox) -> bool:
        """Its own project's; an admin key sees the whole tenant's. What it cannot see is as if it were not there."""
        if self.sandbox_id not in {None, sandbox.id}:
            return False
        return sandbox.tenant_id == self.tenant_id and (self.is_admin or sandbox.project_id == self.project_id)
