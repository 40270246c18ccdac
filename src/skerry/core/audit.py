"""What an audit record says. Shared by those who write records (services) and those who keep them (store, audit)."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

SYSTEM: str = "system"
"""The actor of what Skerry does by itself: expiry, idle kills, reconciliation."""


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # not allowed, or wrong as asked: nothing was done
    FAILED = "failed"  # it was tried and it failed
    UNKNOWN = "unknown"  # it was dispatched and no answer came


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One act. Never holds a secret, an environment value, file contents or output."""

    id: str
    at: datetime
    """Aware, UTC: when the act was recorded."""
    tenant_id: str
    project_id: str | None
    actor: str
    """The id of the API key, or `system`."""
    action: str
    """`noun.verb` in the past tense: "sandbox.created", "command.started", "file.written"."""
    subject: str | None
    """The sandbox it was done to; None for acts on the tenant (its keys)."""
    outcome: Outcome
    detail: dict[str, Any] = field(default_factory=dict)
    """Small JSON: argv and paths (clipped), names of variables, sizes, exit codes, reasons."""
