"""What an operator may set about the services."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from skerry.core.models import CuratedRule
from skerry.vault import RootKeys


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Curated:
    """What projects allow as long as they have not said otherwise. Changes when more is found out."""

    rules: tuple[CuratedRule, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be found out, one line each."""


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Durations are seconds."""

    create_deadline_s: float = 180.0
    """A VM that has not come up by then is given up."""
    kill_deadline_s: float = 30.0
    """How long a kill waits for its node; after that the reaper goes on by itself."""
    guest_deadline_s: float = 60.0
    """For one question to a guest that is not a stream."""
    stop_grace_s: float = 10.0
    """How long a stopping server waits for creates under way."""
    pause_deadline_s: float = 300.0
    """A pause that has not come to its end by then has failed, and the sandbox runs on."""
    resume_deadline_s: float = 180.0
    snapshot_deadline_s: float = 600.0
    passage_wait_s: float = 60.0
    """How long a request waits for a pause or a resume that is under way."""
    pause_retry_s: float = 30.0
    """How long after a pause that failed at a deadline the next is tried."""
    busy_check_s: float = 15.0
    """How often a guest without requests is asked whether a command still runs. An idle kill comes at most this late
    after the end of a command that nobody watched."""
    sample_s: float = 5.0
    """How often a guest is asked how it is doing, while there is something to see."""
    max_sandboxes: int = 100
    """Limits of the tenant that `bootstrap` makes."""
    max_lifetime_ms: int = 86_400_000
    max_snapshots: int = 100
    max_paused: int = 100
    token_key: bytes | None = field(default=None, repr=False)
    """At least 32 random bytes that the sandboxes' tokens are made of. None: new ones, good until this server ends."""
    root_keys: RootKeys | None = field(default=None, repr=False)
    """What the tenants' keys are wrapped with. None: a new one, good until this server ends."""
    curated: Curated = field(default_factory=Curated)
    port_url: str = "http://{port}-{id}.localhost"
    """How a sandbox's ports are reached by name."""
    clock: Callable[[], datetime] = utc_now
    """Now, aware and UTC."""
