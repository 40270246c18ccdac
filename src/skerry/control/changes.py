"""What the steps of a passage change in a record, and which steps a record has missed. Pure."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from skerry.core.lifecycle import Event, State
from skerry.core.models import Sandbox
from skerry.store import Tenant

Changes = Callable[[Sandbox, Tenant, datetime], dict[str, Any]]


def latest_end(sandbox: Sandbox, tenant: Tenant) -> datetime:
    """The longest that this sandbox may live. Time at rest does not count."""
    lived_from = (sandbox.started_at or sandbox.created_at) + timedelta(milliseconds=sandbox.rested_ms)
    return lived_from + timedelta(milliseconds=tenant.max_lifetime_ms)


def _ms(span: timedelta) -> int:
    return max(0, round(span.total_seconds() * 1000))


def after_pause(row: Sandbox, _tenant: Tenant, now: datetime) -> dict[str, Any]:
    return {"remaining_ms": _ms(row.expires_at - (row.paused_at or now))}


def after_failed_pause(_row: Sandbox, _tenant: Tenant, _now: datetime) -> dict[str, Any]:
    return {"paused_at": None, "remaining_ms": None}


def after_resume(timeout_ms: int | None, *, keep_left: bool = True) -> Changes:
    def changes(row: Sandbox, tenant: Tenant, now: datetime) -> dict[str, Any]:
        """Its own timeout anew where nothing was asked for."""
        rested_ms = row.rested_ms + _ms(now - (row.paused_at or now))
        wanted = row.spec.timeout_ms if timeout_ms is None else timeout_ms
        grant = max(row.remaining_ms or 0, wanted) if keep_left else wanted
        latest = latest_end(row, tenant) + timedelta(milliseconds=rested_ms - row.rested_ms)
        return {
            "expires_at": min(now + timedelta(milliseconds=grant), latest),
            "paused_at": None,
            "remaining_ms": None,
            "rested_ms": rested_ms,
        }

    return changes


def no_changes(_row: Sandbox, _tenant: Tenant, _now: datetime) -> dict[str, Any]:
    return {}


def rests_now(_row: Sandbox, _tenant: Tenant, now: datetime) -> dict[str, Any]:
    return {"paused_at": now}


MISSING: Final[dict[tuple[State, State | None], list[tuple[Event, Changes]]]] = {
    (State.RUNNING, State.PAUSED): [(Event.PAUSE, rests_now), (Event.PAUSE_DONE, after_pause)],
    (State.PAUSING, State.PAUSED): [(Event.PAUSE_DONE, after_pause)],
    (State.PAUSING, State.RUNNING): [(Event.PAUSE_FAILED, after_failed_pause)],
    (State.PAUSED, State.RUNNING): [(Event.RESUME, no_changes), (Event.RESUME_DONE, after_resume(None))],
    (State.RESUMING, State.RUNNING): [(Event.RESUME_DONE, after_resume(None))],
    (State.RESUMING, State.PAUSED): [(Event.RESUME_FAILED, no_changes)],
    (State.RESUMING, None): [(Event.RESUME_FAILED, no_changes)],
}
"""What the record says, what the node says → what happened between the two."""
