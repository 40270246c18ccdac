"""What the server says, as plain values. States and reasons are texts, so that a newer server's words pass through.

Times are aware UTC datetimes, durations are seconds unless the name says otherwise, sizes are bytes.
"""

import base64
import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, TypeVar

from skerry.sdk.errors import bad_answer
from skerry.sdk.text import decode

M = TypeVar("M")

_SIGNAL_NAMES: Final = (
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU URG "
    "XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
SIGNALS: Final = {
    **{f"SIG{name}": number for number, name in enumerate(_SIGNAL_NAMES.split(), start=1)},
    "SIGIOT": 6,
    "SIGPOLL": 29,
}
"""Linux's numbers: a guest is Linux whatever the client runs on."""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    template: str
    state: str
    cpu: int
    memory_mb: int
    disk_mb: int
    metadata: dict[str, str]
    created_at: datetime
    started_at: datetime | None
    expires_at: datetime
    """When its timeout ends (or, with `auto_pause`, pauses) it. Of a paused one: what it was when it went to rest."""
    ended_at: datetime | None
    end_reason: str | None
    error: str | None
    timeout_ms: int
    idle_timeout_ms: int | None
    start_kind: str | None
    """"boot" (cold), "clone" (of a memory image) or "pool" (a clone that stood ready)."""
    node_id: str
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: bool = False
    public_ports: bool = True
    """Its ports can be reached without its traffic token."""
    mask_request_host: str | None = None
    network: "NetworkInfo | None" = None
    """Its own rules for what may leave it. None: whatever its project allows."""
    paused_at: datetime | None = None
    snapshot_id: str | None = None
    """What it was made of, if that was a snapshot."""


@dataclass(frozen=True, slots=True)
class NetworkInfo:
    """Rules for what may leave."""

    mode: str
    """"allow" (these alone) or "open" (but for `deny`); of a project also "deny" (these and the curated list)."""
    allow: tuple[str, ...]
    deny: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NetworkChange:
    """What was set, and what became of open connections."""

    mode: str
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    connections_cut: int


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """Something may leave where every layer allows it."""

    origin: str
    """"project", "template" or "sandbox"."""
    mode: str
    """What becomes of what no rule names: "deny" or "open"."""
    allow: tuple[str, ...]
    deny: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NetworkInForce:
    network: NetworkInfo | None
    """The sandbox's own."""
    layers: tuple[NetworkLayer, ...]
    """From the outermost on."""


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """A look-up, a connection (told at its end) or a refused packet of a sandbox."""

    id: str
    at: datetime
    kind: str
    """"look_up", "connection" or "packet"."""
    allowed: bool
    rule: str
    """What decided, such as "project: allow pypi.example"."""
    name: str | None = None
    address: str | None = None
    port: int | None = None
    record: str | None = None
    """Of a look-up: the type of record."""
    protocol: str | None = None
    """Of a packet."""
    sent_bytes: int = 0
    """From the sandbox."""
    received_bytes: int = 0
    duration_ms: float = 0.0
    error: str | None = None
    count: int = 1
    """So many alike within a second, told at once."""


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    template: str | None
    """None: the project's own."""
    mode: str
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    updated_at: datetime | None = None
    """None: nobody has set it, and it is the default."""


@dataclass(frozen=True, slots=True)
class EgressChange:
    """What was set, and how far it has come."""

    template: str | None
    mode: str
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    connections_cut: int
    pending: int
    """Sandboxes that do not have it yet, such as one that is just being paused. They get it."""


@dataclass(frozen=True, slots=True)
class CuratedRule:
    rule: str
    tool: str
    """What needs it: a package manager of the server's machine, or "settings"."""
    source: str
    """Where it was read."""


@dataclass(frozen=True, slots=True)
class ProjectEgress:
    project_id: str
    policy: EgressPolicy
    templates: tuple[EgressPolicy, ...]
    curated: tuple[CuratedRule, ...]
    notes: tuple[str, ...]
    """What could not be found out about the curated list."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A kept state of a sandbox; `Sandbox.create(snapshot)` makes others of it. It outlives its sandbox."""

    id: str
    name: str | None
    sandbox_id: str
    template: str
    memory: bool
    """False: the disk alone."""
    cpu: int
    memory_mb: int
    disk_mb: int
    state: str
    """"creating", "ready" or "failed"."""
    error: str | None
    size_bytes: int | None
    stood_still_ms: float | None
    """How long the sandbox did not run for it."""
    created_at: datetime
    node_id: str
    holds_secrets: bool = False
    """Its memory may hold secrets that the sandbox was given."""


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Where a port of a sandbox is, for HTTP and WebSockets."""

    url: str
    """By name. Browsers and curl know that names below `localhost` are this machine; others may have to be told."""
    headers: dict[str, str] = field(repr=False)
    """What has to be sent with it: nothing where the sandbox's ports are public."""
    path_url: str
    """By the server's own address, with a slash at its end. Needs no name service, and always its headers."""
    path_headers: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The warm clones of one template and shape. Counters are since the server started."""

    template: str
    cpu: int
    memory_mb: int
    ready: int
    wanted: int
    hits: int
    misses: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Image:
    """A memory image or disk that the node keeps."""

    image_id: str
    kind: str
    """"template", "pause" or "snapshot"."""
    template: str
    memory: bool
    size_bytes: int
    created_at: str
    used_by: tuple[str, ...]
    """Sandboxes and snapshots that need it."""
    damage: str | None
    """What is wrong with it, if that was looked for."""


@dataclass(frozen=True, slots=True)
class ExitInfo:
    reason: str
    exit_code: int | None
    signal: str | None
    duration_ms: int

    @property
    def code(self) -> int:
        """The exit code, or 128 + n where signal n ended it, as a shell counts: never 0 unless it exited with 0."""
        return shell_code(self.exit_code, self.signal)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    process_id: str
    pid: int
    argv: tuple[str, ...]
    cwd: str
    user: str
    tag: str | None
    pty: bool
    stdin: bool
    background: bool
    state: str
    """"running" or "exited"."""
    started_at_ms: int
    exit: ExitInfo | None


@dataclass(frozen=True)
class CommandResult:
    """How a command ended and what it wrote. A non-zero exit code is a result, not an error."""

    process_id: str
    pid: int
    reason: str
    """"exit", "signal", "killed" (by a client) or "deadline"."""
    exit_code: int | None
    """None where a signal ended it, which `signal` then names."""
    signal: str | None
    duration: float
    """Seconds, as the guest measured them."""
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    stdout_truncated: bool = False
    """Bytes are missing from `stdout_bytes`: there were more than `max_output`, or nobody read them in time."""
    stderr_truncated: bool = False

    @property
    def ok(self) -> bool:
        """It exited with 0."""
        return self.exit_code == 0

    @property
    def code(self) -> int:
        """The exit code, or 128 + n where signal n ended it, as a shell counts: never 0 unless it exited with 0."""
        return shell_code(self.exit_code, self.signal)

    @cached_property
    def stdout(self) -> str:
        """As UTF-8 text; bytes that are none are replaced. `stdout_bytes` are the exact ones."""
        return decode(self.stdout_bytes, whole=not self.stdout_truncated)

    @cached_property
    def stderr(self) -> str:
        return decode(self.stderr_bytes, whole=not self.stderr_truncated)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: text, and the exact bytes as base64."""
        return {
            **{
                k: getattr(self, k)
                for k in ("process_id", "pid", "reason", "exit_code", "signal", "duration", "stdout", "stderr")
            },
            "stdout_base64": base64.b64encode(self.stdout_bytes).decode(),
            "stderr_base64": base64.b64encode(self.stderr_bytes).decode(),
            "stdout_truncated": self.stdout_truncated,
            "stderr_truncated": self.stderr_truncated,
        }


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of `commands.stream`: the process is there."""

    text: ClassVar[str] = ""

    process_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes a process wrote, and the text they give together with those before them."""

    stream: str
    """"stdout", "stderr" or "pty"."""
    offset: int
    """How many bytes of the stream came before, from the process's start."""
    data: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """`missed` bytes of `stream` from `offset` on are lost: nobody read them in time."""

    text: ClassVar[str] = ""

    stream: str
    offset: int
    missed: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Always the last event."""

    text: ClassVar[str] = ""

    exit: ExitInfo


ProcessEvent = Started | Output | Gap | Exited


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory, link or other thing, as lstat(2) says. Odd bytes of names are lone surrogates."""

    path: str
    name: str
    kind: str
    """"file", "directory", "symlink", "fifo", "socket", "char_device" or "block_device"."""
    size: int
    mode: int
    """Permission bits, 0o7777."""
    uid: int
    gid: int
    owner: str
    group: str
    mtime_ns: int
    target: str | None = None
    """What a symlink says."""
    error: str | None = None
    """In a listing: why this directory could not be read."""

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        return self.kind == "file"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: Literal["create", "write", "remove", "rename_from", "rename_to", "chmod"] | str
    path: str
    """Relative to the watched directory."""
    is_dir: bool
    cookie: int = 0
    """Pairs a rename_from with its rename_to; 0 where there is no partner."""
    offset: int = 0
    """How many events of this watch came before."""


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
    secret: str | None = field(default=None, repr=False)
    """The key's text: only in the answer that made it."""


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """A secret as it may be shown: the server never gives its value back."""

    id: str
    name: str
    version: int
    created_at: datetime | None = None
    updated_at: datetime | None = None


def shell_code(exit_code: int | None, signal: str | None) -> int:
    """One number for how a process ended, as shells count: the exit code, or 128 + the signal's number."""
    if signal is not None:
        return 128 + SIGNALS.get(signal, 127)
    if exit_code is None:
        raise bad_answer("an exit has neither a code nor a signal")
    return exit_code


# ------------------------------------------------------------------------------------------------- from JSON, to JSON


def parse(cls: type[M], data: Any) -> M:
    """An object of JSON as a `cls`. Fields that `cls` does not know are left out; one that is missing is an error."""
    if not isinstance(data, Mapping):
        raise bad_answer(f"{cls.__name__} is no JSON object")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if spec.name in data:
            values[spec.name] = _convert(hints[spec.name], data[spec.name], f"{cls.__name__}.{spec.name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise bad_answer(f"{cls.__name__}.{spec.name} is missing")
    return cls(**values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        kind = next(a for a in args if a is not type(None))
        return _convert(kind, value, where)
    try:
        if kind is datetime:
            return datetime.fromisoformat(value)
        if kind is int and isinstance(value, str):
            return int(value, 8)  # modes are octal text
    except (TypeError, ValueError):
        raise bad_answer(f"{where} has the wrong form") from None
    if dataclasses.is_dataclass(kind):
        return parse(typing.cast("type[Any]", kind), value)
    if origin is tuple:
        return tuple(_convert(args[0], item, where) for item in value or ())
    return value


def plain(value: Any) -> Any:
    """A model as what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value
