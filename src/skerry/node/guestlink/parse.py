"""From what a guest says to the words of the product. Strict: a wrong type, size or name is Malformed."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from skerry.core import errors
from skerry.core.errors import SkerryError
from skerry.core.models import (
    ExitStatus,
    FileInfo,
    FileKind,
    Gap,
    GuestMetrics,
    ProcessEnd,
    ProcessInfo,
    ProcessState,
    Stream,
    WatchEvent,
    WatchKind,
)

E = TypeVar("E", FileKind, ProcessEnd, ProcessState, Stream, WatchKind)

_TEXT_MAX: Final = 64 * 1024
_CONTEXT_MAX: Final = 16
_TEXTS_MAX: Final = 4096
_INT_MAX: Final = 2**63 - 1

_ERRORS: Final[dict[str, type[SkerryError]]] = {
    cls.__name__: cls
    for cls in (
        errors.InvalidRequest,
        errors.Forbidden,
        errors.NotFound,
        errors.Conflict,
        errors.TooLarge,
        errors.Unavailable,
        errors.NoSpace,
        errors.InternalError,
    )
}
# The agent turned the host itself away: nothing was done.
_ALLOWED = {
    "user_not_found": "a user of the sandbox, by name or number",
    "cwd_not_found": "a directory that is there",
    "cwd_not_a_directory": "a directory",
}
"""What a guest's refusals leave unsaid, by their code."""
_TURNED_AWAY: Final = frozenset({"wrong_token", "stale_generation", "not_identified", "protocol_version"})


class Malformed(Exception):
    """The guest said something that the protocol does not know."""


def _get(source: Any, name: str) -> Any:
    if not isinstance(source, dict):
        raise Malformed("not an object")
    return source.get(name)


def text(source: Any, name: str, limit: int = _TEXT_MAX) -> str:
    value = _get(source, name)
    if not isinstance(value, str) or len(value) > limit:
        raise Malformed(f"{name} is not a text")
    return value


def opt_text(source: Any, name: str) -> str | None:
    return None if _get(source, name) is None else text(source, name)


def integer(source: Any, name: str, low: int = 0, high: int = _INT_MAX) -> int:
    value = _get(source, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Malformed(f"{name} is not a number in range")
    return value


def opt_integer(source: Any, name: str, low: int = 0, high: int = _INT_MAX) -> int | None:
    return None if _get(source, name) is None else integer(source, name, low, high)


def number(source: Any, name: str, high: float = 1e15) -> float:
    value = _get(source, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= high:
        raise Malformed(f"{name} is not a number in range")
    return float(value)


def flag(source: Any, name: str) -> bool:
    value = _get(source, name)
    if not isinstance(value, bool):
        raise Malformed(f"{name} is not true or false")
    return value


def begins(said: Any) -> dict[Stream, int]:
    """Where streams begin; an agent that does not know the question says nothing."""
    if said is None:
        return {}
    names = [stream for stream in Stream if _get(said, stream.value) is not None]
    return {stream: integer(said, stream.value) for stream in names}


def _member(kind: type[E], source: Any, name: str) -> E:
    try:
        return kind(text(source, name, 64))
    except ValueError:
        raise Malformed(f"{name} is not a {kind.__name__}") from None


def refusal(said: Any) -> SkerryError:
    """The error that an ERROR frame means. Its text is the guest's: bounded, one line, printable."""
    cls = _ERRORS.get(text(said, "error", 64))
    code = text(said, "code", 64)
    if cls is None or not code.isascii() or not code.replace("_", "").isalnum():
        raise Malformed("an unknown error")
    message = "".join(c if c.isprintable() else "\ufffd" for c in text(said, "message", 4096))
    context = _get(said, "context")
    if not isinstance(context, Mapping) or len(context) > _CONTEXT_MAX:
        raise Malformed("context is not an object")
    plain: dict[str, Any] = {
        str(k)[:64]: v for k, v in context.items() if isinstance(v, (str, int, float)) and _is_key(k)
    }
    if code in _TURNED_AWAY:
        return errors.GuestUnreachable(f"the guest refuses this host: {message}", guest_code=code)
    if cls is errors.InvalidRequest:
        field = plain.pop("field", None) or next((k for k in ("cwd", "user", "argv0", "path") if k in plain), None)
        if field is not None:
            given, allowed = plain.get("given", plain.get(str(field))), plain.get("allowed", _ALLOWED.get(code))
            problem = errors.Problem("argv" if field == "argv0" else str(field), message, given, allowed)
            return errors.InvalidRequest(message, problems=[problem], code=code, **plain)
    return cls(message, code=code, **plain)


def _is_key(key: str) -> bool:
    return key.isidentifier() and key not in {"message", "code", "retry", "retry_after", "problems", "self"}


def _opt_texts(source: Any, name: str) -> dict[str, str] | None:
    value = _get(source, name)
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _TEXTS_MAX or sum(map(len, value)) > _TEXT_MAX:
        raise Malformed(f"{name} is not an object of texts")
    return {key: text(value, key) for key in value}


def file_info(said: Any) -> FileInfo:
    return FileInfo(
        path=text(said, "path"),
        name=text(said, "name", 1024),
        kind=_member(FileKind, said, "kind"),
        size=integer(said, "size"),
        mode=integer(said, "mode", 0, 0o7777),
        uid=integer(said, "uid", 0, 2**32 - 1),
        gid=integer(said, "gid", 0, 2**32 - 1),
        owner=text(said, "owner", 256),
        group=text(said, "group", 256),
        mtime_ns=integer(said, "mtime_ns", -_INT_MAX),
        target=opt_text(said, "target"),
        error=opt_text(said, "error"),
        resolved=opt_text(said, "resolved"),
        resolved_kind=None if _get(said, "resolved_kind") is None else _member(FileKind, said, "resolved_kind"),
        xattrs=_opt_texts(said, "xattrs"),
    )


def exit_status(said: Any) -> ExitStatus:
    code = opt_integer(said, "exit_code", 0, 255)
    signal = _get(said, "signal")
    signal = None if signal is None else text(said, "signal", 32)
    if (code is None) == (signal is None):
        raise Malformed("an exit has a code or a signal")
    return ExitStatus(_member(ProcessEnd, said, "reason"), code, signal, integer(said, "duration_ms"))


def process_info(said: Any) -> ProcessInfo:
    argv = _get(said, "argv")
    if not isinstance(argv, list) or not all(isinstance(a, str) for a in argv):
        raise Malformed("argv is not a list of texts")
    ended = _get(said, "exit")
    return ProcessInfo(
        process_id=text(said, "process_id", 64),
        pid=integer(said, "pid", 1, 2**31 - 1),
        argv=tuple(argv),
        cwd=text(said, "cwd"),
        user=text(said, "user", 256),
        tag=opt_text(said, "tag"),
        pty=flag(said, "pty"),
        stdin=flag(said, "stdin"),
        background=flag(said, "background"),
        state=_member(ProcessState, said, "state"),
        started_at_ms=integer(said, "started_at_ms"),
        exit=None if ended is None else exit_status(ended),
        env=_opt_texts(said, "env") or {},
    )


def gap(said: Any) -> Gap:
    return Gap(_member(Stream, said, "stream"), integer(said, "offset"), integer(said, "missed", 1))


def watch_event(said: Any) -> WatchEvent:
    return WatchEvent(
        _member(WatchKind, said, "kind"),
        text(said, "path"),
        flag(said, "is_dir"),
        integer(said, "cookie", 0, 2**32 - 1),
        integer(said, "offset"),
    )


def metrics(said: Any) -> GuestMetrics:
    return GuestMetrics(
        at_ms=integer(said, "at_ms"),
        uptime_s=number(said, "uptime_s"),
        cpu_count=integer(said, "cpu_count", 1, 4096),
        cpu_used_pct=number(said, "cpu_used_pct", 100.0),
        load_1m=number(said, "load_1m"),
        memory_total_bytes=integer(said, "memory_total_bytes"),
        memory_used_bytes=integer(said, "memory_used_bytes"),
        memory_cache_bytes=integer(said, "memory_cache_bytes"),
        disk_total_bytes=integer(said, "disk_total_bytes"),
        disk_used_bytes=integer(said, "disk_used_bytes"),
        processes=integer(said, "processes"),
    )
