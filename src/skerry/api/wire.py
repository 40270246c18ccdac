"""What goes over the wire: JSON texts and the shape each noun has in them.

JSON is always written in ASCII, so that a file name that is not UTF-8 travels as lone surrogates (`\\udcXX`).
"""

import base64
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from skerry.control import (
    TRAFFIC_ACTIONS,
    ApiKey,
    EgressPolicy,
    ImageInfo,
    PoolStatus,
    ProjectEgress,
    SandboxNetwork,
    Spread,
)
from skerry.core.audit import AuditEvent
from skerry.core.models import (
    Exited,
    ExitStatus,
    FileInfo,
    Gap,
    GuestMetrics,
    NetworkRules,
    Output,
    ProcessEvent,
    ProcessInfo,
    Sandbox,
    Secret,
    Snapshot,
    Stream,
    WatchEvent,
)
from skerry.core.network import DEFAULT
from skerry.core.step_tokens import Grant

_encoder = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact ASCII JSON."""
    return _encoder.encode(value)


class Json(Response):
    """A JSON answer. Not Starlette's JSONResponse, which writes UTF-8 and fails on lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content).encode("ascii")


def timestamp(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC with microseconds."""
    if moment is None:
        return None
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def sandbox(box: Sandbox) -> dict[str, Any]:
    """A sandbox as its owner sees it. Its environment is never given back."""
    spec = box.spec
    return {
        "id": box.id,
        "template": spec.template,
        "state": box.state.value,
        "cpu": spec.cpu,
        "memory_mb": spec.memory_mb,
        "disk_mb": spec.disk_mb,
        "metadata": dict(spec.metadata),
        "created_at": timestamp(box.created_at),
        "started_at": timestamp(box.started_at),
        "expires_at": timestamp(box.expires_at),
        "ended_at": timestamp(box.ended_at),
        "end_reason": box.end_reason.value if box.end_reason else None,
        "error": box.error,
        "timeout_ms": spec.timeout_ms,
        "idle_timeout_ms": spec.idle_timeout_ms,
        "auto_pause": spec.auto_pause,
        "auto_pause_memory": spec.auto_pause_memory,
        "auto_resume": spec.auto_resume,
        "public_ports": spec.public_ports,
        "mask_request_host": spec.mask_request_host,
        "network": network(spec.network),
        "paused_at": timestamp(box.paused_at),
        "snapshot_id": box.snapshot_id,
        "start_kind": box.start_kind,
        "node_id": box.node_id,
    }


def snapshot(found: Snapshot) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "sandbox_id": found.sandbox_id,
        "template": found.template,
        "memory": found.memory,
        "cpu": found.cpu,
        "memory_mb": found.memory_mb,
        "disk_mb": found.disk_mb,
        "state": found.state.value,
        "error": found.error,
        "size_bytes": found.size_bytes,
        "stood_still_ms": found.stood_still_ms,
        "created_at": timestamp(found.created_at),
        "node_id": found.node_id,
        "holds_secrets": found.holds_secrets,
    }


def network(rules: NetworkRules | None) -> dict[str, Any] | None:
    return None if rules is None else {"mode": rules.mode, "allow": list(rules.allow), "deny": list(rules.deny)}


def egress_policy(policy: EgressPolicy | None) -> dict[str, Any]:
    """None: the default, which nobody has set."""
    if policy is None:
        return {"template": None, **(network(DEFAULT) or {}), "updated_at": None}
    rules = network(policy.rules) or {}
    return {"template": policy.template, **rules, "updated_at": timestamp(policy.updated_at)}


def spread(done: Spread) -> dict[str, Any]:
    return {"connections_cut": done.cut, "pending": done.pending}


def egress(found: ProjectEgress) -> dict[str, Any]:
    return {
        "project_id": found.project_id,
        "policy": egress_policy(found.own),
        "templates": [egress_policy(policy) for policy in found.templates],
        "curated": [asdict(rule) for rule in found.curated],
        "notes": list(found.notes),
    }


def network_in_force(found: SandboxNetwork) -> dict[str, Any]:
    layers = [
        {"origin": layer.origin, "mode": layer.mode, "allow": list(layer.allow), "deny": list(layer.deny)}
        for layer in found.layers
    ]
    return {"network": network(found.own), "layers": layers}


KINDS = {action: kind for kind, action in TRAFFIC_ACTIONS.items()}
_NO_TRAFFIC: dict[str, Any] = {
    **dict.fromkeys(("name", "address", "port", "record", "protocol", "error")),
    **dict.fromkeys(("sent_bytes", "received_bytes", "duration_ms"), 0),
}


def network_event(event: AuditEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "at": timestamp(event.at),
        "kind": KINDS[event.action],
        **_NO_TRAFFIC,
        **event.detail,
    }


def secret(found: Secret) -> dict[str, Any]:
    """What is known of a secret."""
    return {
        "id": found.id,
        "name": found.name,
        "version": found.version,
        "created_at": timestamp(found.created_at),
        "updated_at": timestamp(found.updated_at),
    }


def step_token(found: Grant) -> dict[str, Any]:
    """A grant as its maker sees it: never the token."""
    return {
        "id": found.id,
        "secret": found.secret,
        "step": found.step,
        "host": found.scope.host,
        "methods": sorted(found.scope.methods),
        "path_prefix": found.scope.path_prefix,
        "repository": found.scope.repository,
        "budget": found.scope.budget,
        "left": found.left,
        "minted_at": timestamp(found.minted_at),
        "expires_at": timestamp(found.expires_at),
        "revoked": found.revoked.value if found.revoked else None,
    }


def pool(found: PoolStatus) -> dict[str, Any]:
    return asdict(found)


def image(found: ImageInfo) -> dict[str, Any]:
    return {**asdict(found), "used_by": list(found.used_by)}


def exit_status(status: ExitStatus) -> dict[str, Any]:
    return {
        "reason": status.reason.value,
        "exit_code": status.exit_code,
        "signal": status.signal,
        "duration_ms": status.duration_ms,
    }


def process(info: ProcessInfo) -> dict[str, Any]:
    return {
        "process_id": info.process_id,
        "pid": info.pid,
        "argv": list(info.argv),
        "cwd": info.cwd,
        "user": info.user,
        "tag": info.tag,
        "pty": info.pty,
        "stdin": info.stdin,
        "background": info.background,
        "state": info.state.value,
        "started_at_ms": info.started_at_ms,
        "exit": exit_status(info.exit) if info.exit else None,
    }


def started(info: ProcessInfo) -> dict[str, Any]:
    """The first line of a process's stream."""
    return {
        "type": "started",
        "process_id": info.process_id,
        "pid": info.pid,
        "argv": list(info.argv),
        "cwd": info.cwd,
        "user": info.user,
        "started_at_ms": info.started_at_ms,
    }


def stream_name(stream: Stream) -> str:
    """What a terminal writes is its standard output."""
    return "stderr" if stream is Stream.STDERR else "stdout"


def process_event(event: ProcessEvent) -> tuple[str, str]:
    """The type of an event and its JSON text. Output is written by hand: it is most of what a stream carries."""
    if isinstance(event, Output):
        name = stream_name(event.stream)
        data = base64.b64encode(event.data).decode("ascii")
        return name, f'{{"type":"{name}","offset":{event.offset},"data":"{data}"}}'
    if isinstance(event, Gap):
        name = stream_name(event.stream)
        return "gap", dumps({"type": "gap", "stream": name, "offset": event.offset, "missed": event.missed})
    return "exit", dumps({"type": "exit", **exit_status(event.status)})


def is_last(event: ProcessEvent) -> bool:
    return isinstance(event, Exited)


def octal(mode: int) -> str:
    return f"{mode:04o}"


def entry(info: FileInfo) -> dict[str, Any]:
    return {
        "path": info.path,
        "name": info.name,
        "kind": info.kind.value,
        "size": info.size,
        "mode": octal(info.mode),
        "uid": info.uid,
        "gid": info.gid,
        "owner": info.owner,
        "group": info.group,
        "mtime_ns": info.mtime_ns,
        "target": info.target,
        "error": info.error,
    }


def watch_event(event: WatchEvent) -> dict[str, Any]:
    return {
        "type": event.kind.value,
        "path": event.path,
        "is_dir": event.is_dir,
        "cookie": event.cookie,
        "offset": event.offset,
    }


def metrics(found: GuestMetrics) -> dict[str, Any]:
    return {name: getattr(found, name) for name in GuestMetrics.__dataclass_fields__}


def event(found: AuditEvent) -> dict[str, Any]:
    """One line of a sandbox's log."""
    return {
        "id": found.id,
        "at": timestamp(found.at),
        "action": found.action,
        "actor": found.actor,
        "outcome": found.outcome.value,
        "detail": found.detail,
    }


def key(found: ApiKey) -> dict[str, Any]:
    """A key as its tenant sees it: never its text."""
    return {
        "id": found.id,
        "name": found.name,
        "prefix": found.prefix,
        "scopes": sorted(found.scopes),
        "created_at": timestamp(found.created_at),
        "last_used_at": timestamp(found.last_used_at),
        "revoked_at": timestamp(found.revoked_at),
    }
