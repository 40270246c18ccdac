"""What E2B's clients are answered: every field that their models need, in their spelling."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from skerry.api.e2b.control.names import build_id, of_snapshot
from skerry.api.wire import timestamp
from skerry.control import AuditEvent, Outcome, Services, Template
from skerry.core.lifecycle import State
from skerry.core.models import GuestMetrics, NetworkRules, Sandbox, Snapshot
from skerry.core.network import ALLOW, NOTHING

ENVD_VERSION: Final = "0.6.13"
"""What the in-VM interface is like: clients ask for no more than they believe it can."""

EVERYWHERE: Final = "0.0.0.0/0"
PAUSED: Final = (State.PAUSED, State.PAUSING, State.RESUMING)
RUNNING: Final = (State.RUNNING,)


def made_of(box: Sandbox) -> dict[str, str]:
    """Of a snapshot its id; a template's id is its name."""
    if box.snapshot_id is not None:
        return {"templateID": box.snapshot_id}
    return {"templateID": box.spec.template, "alias": box.spec.template}


def sandbox(services: Services, domain: str | None, box: Sandbox) -> dict[str, Any]:
    """The answer to a create or connect: what a client needs to get in."""
    return {
        **made_of(box),
        "sandboxID": box.id,
        "clientID": box.node_id,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": services.tokens.access(box.id),
        "trafficAccessToken": None if box.spec.public_ports else services.tokens.traffic(box.id),
        "domain": domain,
    }


def listed(box: Sandbox) -> dict[str, Any]:
    rests = box.state in PAUSED
    return {
        **made_of(box),
        "sandboxID": box.id,
        "clientID": box.node_id,
        "startedAt": timestamp(box.created_at),  # the time by which lists are in order
        "endAt": timestamp(box.paused_at if rests and box.paused_at is not None else box.expires_at),
        "cpuCount": box.spec.cpu,
        "memoryMB": box.spec.memory_mb,
        "diskSizeMB": box.spec.disk_mb,
        "metadata": dict(box.spec.metadata),
        "state": "paused" if rests else "running",
        "envdVersion": ENVD_VERSION,
    }


def detail(services: Services, domain: str | None, box: Sandbox) -> dict[str, Any]:
    more: dict[str, str] = {}
    network: dict[str, Any] = {"allowPublicTraffic": box.spec.public_ports}
    if box.spec.mask_request_host is not None:
        network["maskRequestHost"] = box.spec.mask_request_host
    network |= _way_out(box.spec.network)
    memory = services.sandboxes.keeps_memory(box) if box.state is State.PAUSED else None
    if memory is not None:
        more["pauseMode"] = "full" if memory else "filesystem"
    return {
        **listed(box),
        **more,
        "envdAccessToken": services.tokens.access(box.id),
        "allowInternetAccess": box.spec.network != NOTHING,
        "domain": domain,
        "network": network,
        "lifecycle": {
            "autoResume": box.spec.auto_resume,
            "onTimeout": "pause" if box.spec.auto_pause else "kill",
        },
    }


def _way_out(rules: NetworkRules | None) -> dict[str, list[str]]:
    if rules is None:
        return {}
    denied = [*rules.deny, *([EVERYWHERE] if rules.mode == ALLOW else [])]
    said = {"allowOut": list(rules.allow), "denyOut": denied}
    return {name: entries for name, entries in said.items() if entries}


def snapshot(kept: Snapshot) -> dict[str, Any]:
    names = of_snapshot(kept)
    return {"snapshotID": names[0] if names else kept.id, "names": names}


# --------------------------------------------------------------------------------------------------------- telemetry


def metric(point: GuestMetrics) -> dict[str, Any]:
    return {
        "timestamp": timestamp(datetime.fromtimestamp(point.at_ms / 1000, UTC)),
        "timestampUnix": point.at_ms // 1000,
        "cpuCount": point.cpu_count,
        "cpuUsedPct": point.cpu_used_pct,
        "memUsed": point.memory_used_bytes,
        "memTotal": point.memory_total_bytes,
        "memCache": point.memory_cache_bytes,
        "diskUsed": point.disk_used_bytes,
        "diskTotal": point.disk_total_bytes,
    }


LEVELS: Final = ("debug", "info", "warn", "error")
_LEVEL: Final = {Outcome.OK: "info", Outcome.REFUSED: "warn", Outcome.UNKNOWN: "warn", Outcome.FAILED: "error"}


def log_entry(event: AuditEvent) -> dict[str, Any]:
    """An event of the sandbox's record, as a line of its log."""
    said = {key: value if isinstance(value, str) else _short(value) for key, value in event.detail.items()}
    message = " ".join([event.action, event.outcome.value, *(f"{key}={value}" for key, value in said.items())])
    fields = {**said, "event": event.id, "action": event.action, "actor": event.actor, "outcome": event.outcome.value}
    return {
        "timestamp": timestamp(event.at),
        "message": message,
        "level": _LEVEL[event.outcome],
        "fields": fields,
    }


def _short(value: Any) -> str:
    from skerry.api.wire import dumps

    return dumps(value)


# --------------------------------------------------------------------------------------------------------- templates


def template(one: Template) -> dict[str, Any]:
    """A template of the server. It has one build: the one that is there."""
    made = timestamp(one.created_at)
    return {
        "templateID": one.name,
        "buildID": build_id(one.name),
        "cpuCount": one.cpu,
        "memoryMB": one.memory_mb,
        "diskSizeMB": one.disk_mb,
        "public": True,
        "isDefault": True,
        "aliases": [one.name],
        "names": [one.name],
        "createdAt": made,
        "updatedAt": made,
        "createdBy": None,
        "lastSpawnedAt": timestamp(one.last_used_at),
        "spawnCount": one.used,
        "buildCount": 1,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }


def with_builds(one: Template) -> dict[str, Any]:
    made = timestamp(one.created_at)
    return {
        **template(one),
        "builds": [
            {
                "buildID": build_id(one.name),
                "status": "ready",
                "createdAt": made,
                "updatedAt": made,
                "finishedAt": made,
                "cpuCount": one.cpu,
                "memoryMB": one.memory_mb,
                "diskSizeMB": one.disk_mb,
                "envdVersion": ENVD_VERSION,
            }
        ],
    }


def tag(name: str, build: str, created_at: datetime) -> dict[str, Any]:
    return {"tag": name, "buildID": build_id(build), "createdAt": timestamp(created_at)}


def tags_of(kept: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """The tags of one name, by the snapshots that bear it."""
    return [tag((one.name or "").partition(":")[2] or "default", one.id, one.created_at) for one in kept if one.name]
