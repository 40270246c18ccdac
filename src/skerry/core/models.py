"""The nouns both sides of an edge share: what is wanted (`…Spec`), what is recorded, what a guest says.

Plain frozen dataclasses. Times are aware UTC datetimes, durations are in the unit their name says, bytes are bytes.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from skerry.core import limits
from skerry.core.lifecycle import EndReason, State

# --------------------------------------------------------------------------------------------------------- sandboxes


@dataclass(frozen=True, slots=True)
class Bindings:
    """Which secrets go where: references, `NAME` or `NAME@VERSION`, never values."""

    env: dict[str, str] = field(default_factory=dict)
    """Variable → reference."""
    files: dict[str, str] = field(default_factory=dict)
    """Variable that tells where a file is → reference of what is in the file."""

    def __bool__(self) -> bool:
        return bool(self.env or self.files)


NO_SECRETS: Final = Bindings()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a caller wants. `env` goes to every command of the sandbox; a command's own `env` wins over it."""

    template: str = "base"
    cpu: int = 1
    memory_mb: int = 512
    disk_mb: int = 8192
    timeout_ms: int = limits.TIMEOUT_MS_DEFAULT
    idle_timeout_ms: int | None = limits.IDLE_TIMEOUT_MS_DEFAULT
    """None: never ends for being idle."""
    auto_pause: bool = False
    """At its timeout or idle time it is paused instead of killed: a persistent sandbox."""
    auto_pause_memory: bool = True
    """False: such a pause keeps its disk alone, and a resume boots. Needs `auto_pause`, and never `auto_resume`."""
    auto_resume: bool = False
    """The first request to it while it is paused resumes it, and waits."""
    public_ports: bool = True
    """Whoever knows its id can reach its ports by name. False: only with its traffic token."""
    mask_request_host: str | None = None
    """What its servers see as `Host`; `${PORT}` stands for the port. None: what the client said."""
    env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    network: "NetworkRules | None" = None
    """Its own say about what may leave it: `allow` or `open`. None: whatever its project allows."""
    egress: tuple["EgressLayer", ...] = ()
    """What may leave it, from the outermost layer on; without any, nothing. The services fill it in."""
    secrets: Bindings = field(default_factory=Bindings)
    """For each of its commands; a command's own win over them."""


@dataclass(frozen=True, slots=True)
class NetworkRules:
    """What a project, a template or a sandbox says about what may leave: rules as texts, in `policy`'s grammar."""

    mode: str
    """"deny", "allow" or "open": see `network`."""
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CuratedRule:
    """A rule of the list that projects have by default, and where it comes from."""

    rule: str
    tool: str
    """The program that needs it, such as "pip"; "settings" for what an operator has added."""
    source: str
    """Where it was read, for people."""


@dataclass(frozen=True, slots=True)
class EgressLayer:
    """One level's say about what may leave a sandbox: rules as texts, in `policy`'s grammar."""

    origin: str
    """"project", "template" or "sandbox"."""
    mode: str = "deny"
    """What becomes of what no rule names: "deny" or "open"."""
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """A look-up or a connection of a sandbox, and what became of it."""

    sandbox_id: str
    at: datetime
    kind: str
    """"look_up", "connection" (told at its end), or "packet" (refused by the kernel)."""
    allowed: bool
    rule: str
    name: str | None = None
    address: str | None = None
    port: int | None = None
    record: str | None = None
    """Of a look-up: the type of record, such as "A"."""
    protocol: str | None = None
    """Of a packet: "tcp", "udp", "icmp" or a number."""
    sent_bytes: int = 0
    """From the sandbox."""
    received_bytes: int = 0
    duration_ms: float = 0.0
    error: str | None = None
    count: int = 1
    """So many alike within a moment, told at once."""


class SnapshotState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A kept state of a sandbox, from which others can be made. It survives the sandbox."""

    id: str
    tenant_id: str
    project_id: str
    name: str | None
    """Shared by all that were taken under it in its project; it then stands for the newest that is ready."""
    sandbox_id: str
    template: str
    """What its sandbox was made of."""
    memory: bool
    """False: the disk alone."""
    cpu: int
    memory_mb: int
    disk_mb: int
    state: SnapshotState
    error: str | None
    size_bytes: int | None
    stood_still_ms: float | None
    node_id: str
    created_at: datetime
    holds_secrets: bool = False
    """Its memory may hold secrets that its sandbox was given. While it is taken: whether it may."""


@dataclass(frozen=True, slots=True)
class Secret:
    """What is known of a secret: never its value."""

    id: str
    tenant_id: str
    project_id: str
    name: str
    version: int
    """The newest; each `put` makes one."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What is recorded."""

    id: str
    tenant_id: str
    project_id: str
    spec: SandboxSpec
    state: State
    node_id: str
    created_at: datetime
    started_at: datetime | None
    expires_at: datetime
    """When the timeout ends it: the one that is shown is the one that is enforced."""
    ended_at: datetime | None
    end_reason: EndReason | None
    error: str | None
    """One line, where `state` is `error`."""
    start_kind: str | None
    """How it came up: "boot" (cold), "clone" (of a memory image) or "pool" (a clone that stood ready)."""
    paused_at: datetime | None = None
    """Since when it rests; the timeout does not run meanwhile."""
    remaining_ms: int | None = None
    """While it is paused: what its timeout had left."""
    rested_ms: int = 0
    """How long it was paused in all its earlier pauses: time that does not count towards its longest life."""
    snapshot_id: str | None = None
    """The snapshot it was made of. It may be deleted meanwhile."""


# ----------------------------------------------------------------------------------------------------------- guests


@dataclass(frozen=True, slots=True)
class Identity:
    """What a guest is told once it is up, and again after each restore."""

    sandbox_id: str
    generation: int
    """Grows by one at each restore; an agent refuses a lower one, so that a stale host cannot speak to it."""
    token: str
    """What the host must present on every later connection."""
    hostname: str
    machine_id: str
    """32 hex digits."""
    wall_clock_ns: int
    """Host's CLOCK_REALTIME at the moment of sending."""
    entropy: bytes
    """At least 64 bytes from the host's random source; credited to the guest's pool, which is then reseeded."""
    env: dict[str, str]
    """Default environment of every process of the sandbox."""
    default_user: str
    default_cwd: str | None
    """None: the user's home."""
    fresh: bool = False
    """Forget the commands that ran before: this machine begins a life, it does not go on with one."""


@dataclass(frozen=True, slots=True)
class PtySize:
    cols: int
    rows: int


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start in a guest. Exactly one of `argv` and `shell` is given.

    `shell` is a text for `/bin/bash -c` (`/bin/sh` where the image has no bash), passed on unchanged.
    """

    process_id: str
    """Chosen by the host before dispatch, so that an unknown outcome can be looked up."""
    argv: tuple[str, ...] | None = None
    shell: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secret_env: dict[str, str] = field(default_factory=dict, repr=False)
    """Values that are laid over `env` and never shown again, not in lists either."""
    secret_files: dict[str, str] = field(default_factory=dict, repr=False)
    """Variable that tells where a file is → what is in it. The file is in memory only, the user's alone to read (0400),
    and gone when the process ends."""
    user: str | None = None
    """A name or a numeric uid. None: the sandbox's default user."""
    stdin: bool = False
    """False: standard input is /dev/null. True: an open pipe that `write_stdin` feeds."""
    pty: PtySize | None = None
    """A terminal instead of pipes; output then comes as one raw `pty` stream and stdin is always open."""
    timeout_ms: int | None = None
    """From the start; the whole tree of the process is then stopped (SIGTERM, after 1 s SIGKILL). None: no deadline."""
    background: bool = False
    """Recorded for lists. A process outlives the connection that started it either way."""
    tag: str | None = None


class ProcessState(StrEnum):
    RUNNING = "running"
    EXITED = "exited"


class ProcessEnd(StrEnum):
    """Why a process ended."""

    EXIT = "exit"  # it exited: exit_code is set
    SIGNAL = "signal"  # a signal ended it: signal is set
    DEADLINE = "deadline"  # its timeout: exit_code or signal say how it went
    KILLED = "killed"  # a client's kill: exit_code or signal say how it went


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. One of `exit_code` and `signal` is set."""

    reason: ProcessEnd
    exit_code: int | None
    signal: str | None
    """A name such as "SIGKILL"."""
    duration_ms: int


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    process_id: str
    pid: int
    """In the guest."""
    argv: tuple[str, ...]
    cwd: str
    user: str
    tag: str | None
    pty: bool
    stdin: bool
    background: bool
    state: ProcessState
    started_at_ms: int
    """Guest's wall clock, milliseconds since the epoch."""
    exit: ExitStatus | None
    env: dict[str, str] = field(default_factory=dict)
    """In a list: the variables that came with the command, as far as they are not too long."""


class Stream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    PTY = "pty"


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes a process wrote. `offset` counts the bytes of this stream before `data`, from the process's start."""

    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """`missed` bytes of `stream` from `offset` on were dropped because nobody was reading."""

    stream: Stream
    offset: int
    missed: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Always the last event, after all output. Its absence means the line broke: the outcome is not known."""

    status: ExitStatus


ProcessEvent = Output | Gap | Exited


class FileKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char_device"
    BLOCK_DEVICE = "block_device"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """As lstat(2) says. Names that are not UTF-8 are carried with surrogate escapes."""

    path: str
    """Absolute, normalised, under the directory that was asked for (never resolved through it)."""
    name: str
    kind: FileKind
    size: int
    mode: int
    """Permission bits, 0o7777."""
    uid: int
    gid: int
    owner: str
    group: str
    mtime_ns: int
    target: str | None
    """What a symlink says."""
    error: str | None = None
    """In a listing: why this directory could not be read."""
    resolved: str | None = None
    """In detail: where a symlink leads in the end, absolute; as far as it can be followed."""
    resolved_kind: FileKind | None = None
    """In detail: what is there; None where nothing is."""
    xattrs: dict[str, str] | None = None
    """In detail: the extended attributes of the user's namespace, by whole name (`user.…`)."""


class WatchKind(StrEnum):
    CREATE = "create"
    WRITE = "write"
    REMOVE = "remove"
    RENAME_FROM = "rename_from"
    RENAME_TO = "rename_to"
    CHMOD = "chmod"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    kind: WatchKind
    path: str
    """Relative to the watched root."""
    is_dir: bool
    cookie: int = 0
    """Pairs a rename_from with its rename_to; 0 where there is no partner."""
    offset: int = 0
    """How many events of this watch came before."""


@dataclass(frozen=True, slots=True)
class GuestMetrics:
    at_ms: int
    uptime_s: float
    cpu_count: int
    cpu_used_pct: float
    """Since the last time it was asked, of all CPUs together: 0..100."""
    load_1m: float
    memory_total_bytes: int
    memory_used_bytes: int
    memory_cache_bytes: int
    disk_total_bytes: int
    disk_used_bytes: int
    processes: int
