"""What the store gives back, beside `core.models.Sandbox`."""

from dataclasses import dataclass
from datetime import datetime

from skerry.core import limits
from skerry.core.models import NetworkRules

MAX_SANDBOXES_DEFAULT = 100
MAX_SNAPSHOTS_DEFAULT = 100
MAX_PAUSED_DEFAULT = 100
MAX_LIFETIME_MS_DEFAULT = limits.TIMEOUT_MS_MAX * 6
"""24 hours: a sandbox that is extended again and again ends here."""


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str
    name: str
    max_sandboxes: int
    """Live ones at a time."""
    max_lifetime_ms: int
    """From a sandbox's start, however often its timeout is extended."""
    created_at: datetime
    max_snapshots: int = MAX_SNAPSHOTS_DEFAULT
    """Kept at a time, those that are just being taken included."""
    max_paused: int = MAX_PAUSED_DEFAULT
    """Sandboxes at rest at a time."""


@dataclass(frozen=True, slots=True)
class Project:
    id: str
    tenant_id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it may be shown: never its secret."""

    id: str
    tenant_id: str
    project_id: str
    name: str
    prefix: str
    """The first characters of the secret, to tell keys apart."""
    scopes: frozenset[str]
    created_at: datetime
    last_used_at: datetime | None
    """Coarse: within a minute or so."""
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What a project says about what may leave its sandboxes, or one of its templates."""

    project_id: str
    template: str | None
    """None: the project's own."""
    rules: NetworkRules
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class MadeOf:
    """What sandboxes were made of: any of these snapshots, or where there are none, a template itself."""

    template: str | None = None
    snapshot_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remembered:
    """What was asked for under an idempotency key."""

    subject: str
    """The id of the act: that of the sandbox or snapshot it makes, or a fork's own."""
    made: tuple[str, ...]
    """The ids of all that it makes."""
    body_hash: bytes
    created_at: datetime
