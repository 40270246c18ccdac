"""Shapes of `/v1`: what requests must look like (enforced), what answers look like (told in OpenAPI, held by tests).

Answers are written by `wire`, not through these models: a pydantic pass over each would cost more than the call.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from skerry.api.schemas_env import Env, Value
from skerry.core import limits
from skerry.core.policy import RULES_MAX

OUTPUT_BYTES_DEFAULT = 16 * 1024 * 1024
OUTPUT_BYTES_MAX = 64 * 1024 * 1024
COMMAND_TIMEOUT_MS_MAX = 2**53
IDLE_TIMEOUT_MS_MIN = 1000
PTY_SIDE_MAX = 4096
MTIME_NS_MAX = 2**63 - 1


class Strict(BaseModel):
    """A request body: no unknown field, no coercion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Query(BaseModel):
    """A query: no unknown parameter; numbers and booleans are read from their text."""

    model_config = ConfigDict(extra="forbid")


class View(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")


Octal = Annotated[str, Field(pattern=r"^[0-7]{3,4}$", description="Permission bits as octal text, such as 0644")]
TimeoutMs = Annotated[int, Field(ge=limits.TIMEOUT_MS_MIN, le=limits.TIMEOUT_MS_MAX)]
IdleTimeoutMs = Annotated[int, Field(ge=IDLE_TIMEOUT_MS_MIN, le=limits.TIMEOUT_MS_MAX)]
CommandTimeoutMs = Annotated[int, Field(ge=0, le=COMMAND_TIMEOUT_MS_MAX)]
Offset = Annotated[int, Field(ge=0, le=2**63 - 1)]
Signal = Annotated[str, Field(min_length=1, max_length=20, description='A name or a number: "SIGINT", "INT" or "2"')]

# --------------------------------------------------------------------------------------------------------- sandboxes

Rules = Annotated[
    list[str],
    Field(max_length=RULES_MAX, description="NAME[:PORTS], *.NAME[:PORTS] or ADDRESS[/LENGTH][:PORTS]"),
]


class PutNetwork(Strict):
    """Of a template or a sandbox: can only narrow what is allowed around it."""

    mode: Literal["allow", "open"] | None = Field(
        default=None, description="open: whatever is allowed around it; by default allow where `allow` is given"
    )
    allow: Rules | None = Field(default=None, description="These alone; [] is nothing")
    deny: Rules = Field(default_factory=list)


class NetworkView(View):
    mode: Literal["allow", "open"]
    allow: list[str]
    deny: list[str]


class CreateSandbox(Strict):
    template: str = Field(default="base", description="A template's name, or a snapshot's id or name")
    cpu: int = Field(default=1, ge=limits.CPU_MIN, le=limits.CPU_MAX)
    memory_mb: int = Field(default=512, ge=limits.MEMORY_MB_MIN, le=limits.MEMORY_MB_MAX)
    disk_mb: int = Field(default=8192, ge=limits.DISK_MB_MIN, le=limits.DISK_MB_MAX)
    timeout_ms: TimeoutMs = limits.TIMEOUT_MS_DEFAULT
    idle_timeout_ms: IdleTimeoutMs | None = Field(
        default=limits.IDLE_TIMEOUT_MS_DEFAULT,
        description=f"null: never; {limits.PERSISTENT_IDLE_TIMEOUT_MS_DEFAULT} by default with auto_pause",
    )
    auto_pause: bool = Field(default=False, description="Paused, not killed, at its timeout or idle time")
    auto_pause_memory: bool = Field(
        default=True,
        description="false: auto_pause keeps its disk alone, and a resume boots; not with auto_resume",
    )
    auto_resume: bool = Field(default=False, description="The first request to it while it is paused resumes it")
    public_ports: bool = Field(default=True, description="Its ports can be reached without its traffic token")
    mask_request_host: str | None = Field(
        default=None, description="What its servers see as Host; ${PORT} stands for the port"
    )
    network: PutNetwork | None = Field(default=None, description="What may leave it; null: whatever its project allows")
    env: Env = Field(default_factory=dict[str, Value])
    metadata: dict[str, str] = Field(default_factory=dict)


class PatchSandbox(Strict):
    """Exactly one of the two."""

    timeout_ms: TimeoutMs | None = None
    extend_timeout_ms: TimeoutMs | None = None


class ListSandboxes(Query):
    state: list[Literal["creating", "running", "pausing", "paused", "resuming", "killed", "error"]] = Field(
        default_factory=list, description="Repeatable"
    )
    metadata: list[str] = Field(default_factory=list, description="Repeatable, key=value; all must match")
    template: str | None = None
    limit: int = Field(default=50, ge=1, le=100)
    cursor: str | None = None


class Logs(Query):
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None
    console: bool = Field(default=False, description="The serial console's end instead of the events")


class SandboxView(View):
    id: str
    template: str
    state: Literal["creating", "running", "pausing", "paused", "resuming", "killed", "error"]
    cpu: int
    memory_mb: int
    disk_mb: int
    metadata: dict[str, str]
    created_at: str
    started_at: str | None
    expires_at: str
    ended_at: str | None
    end_reason: (
        Literal["killed", "expired", "idle", "max_lifetime", "start_failed", "crashed", "poweroff", "lost"] | None
    )
    error: str | None
    timeout_ms: int
    idle_timeout_ms: int | None
    auto_pause: bool
    auto_pause_memory: bool
    auto_resume: bool
    public_ports: bool
    mask_request_host: str | None
    network: NetworkView | None
    paused_at: str | None
    snapshot_id: str | None
    start_kind: str | None
    node_id: str


class SandboxPage(View):
    items: list[SandboxView]
    next_cursor: str | None


class EventView(View):
    id: str
    at: str
    action: str
    actor: str
    outcome: Literal["ok", "refused", "failed", "unknown"]
    detail: dict[str, Any]


class LogsView(View):
    """Events, or (with `console=true`) the end of the serial console."""

    items: list[EventView] | None = None
    next_cursor: str | None = None
    console: str | None = None


class MetricsView(View):
    at_ms: int
    uptime_s: float
    cpu_count: int
    cpu_used_pct: float
    load_1m: float
    memory_total_bytes: int
    memory_used_bytes: int
    memory_cache_bytes: int
    disk_total_bytes: int
    disk_used_bytes: int
    processes: int


# --------------------------------------------------------------------------------------------------------- processes


class PtyBody(Strict):
    cols: int = Field(ge=1, le=PTY_SIDE_MAX)
    rows: int = Field(ge=1, le=PTY_SIDE_MAX)


class Command(Strict):
    """Exactly one of `argv` and `command`."""

    argv: list[str] | None = Field(default=None, min_length=1)
    command: str | None = Field(default=None, description="Shell text, passed on unchanged")
    cwd: str | None = None
    env: Env = Field(default_factory=dict[str, Value])
    user: str | None = None


class RunCommand(Command):
    timeout_ms: CommandTimeoutMs | None = Field(
        default=limits.COMMAND_TIMEOUT_MS_DEFAULT, description="null or 0: no deadline"
    )
    stdin: str | None = Field(default=None, description="Base64: all of standard input")
    stream: bool = False
    max_output_bytes: int | None = Field(
        default=None, ge=0, le=OUTPUT_BYTES_MAX, description="Blocking form only; for each stream; default 16777216"
    )


class StartProcess(Command):
    timeout_ms: CommandTimeoutMs | None = Field(default=None, description="null or 0: no deadline")
    stdin: bool = Field(default=False, description="true: an open pipe")
    tag: str | None = None
    pty: PtyBody | None = None


class SendSignal(Strict):
    signal: Signal


class OutputQuery(Query):
    stdout_offset: Offset = 0
    stderr_offset: Offset = 0
    follow: bool = True


class PtyQuery(Query):
    cols: int = Field(default=80, ge=1, le=PTY_SIDE_MAX)
    rows: int = Field(default=24, ge=1, le=PTY_SIDE_MAX)
    command: str | None = None
    cwd: str | None = None
    user: str | None = None
    env: str | None = None
    process: str | None = None
    stdout_offset: Offset = 0


class RunResult(View):
    process_id: str
    pid: int
    reason: Literal["exit", "signal", "deadline", "killed"]
    exit_code: int | None
    signal: str | None
    duration_ms: int
    stdout: str
    stderr: str
    stdout_base64: str | None
    stderr_base64: str | None
    stdout_truncated: bool
    stderr_truncated: bool


class ExitView(View):
    reason: Literal["exit", "signal", "deadline", "killed"]
    exit_code: int | None
    signal: str | None
    duration_ms: int


class ProcessView(View):
    process_id: str
    pid: int
    argv: list[str]
    cwd: str
    user: str
    tag: str | None
    pty: bool
    stdin: bool
    background: bool
    state: Literal["running", "exited"]
    started_at_ms: int
    exit: ExitView | None


class ProcessList(View):
    items: list[ProcessView]


class Killed(View):
    killed: bool


class Written(View):
    written: int


# -------------------------------------------------------------------------------------------------------------- files


class FileQuery(Query):
    path: str
    user: str | None = None


class UserQuery(Query):
    user: str | None = None


class WriteQuery(FileQuery):
    mode: Octal | None = None
    mtime_ns: int | None = Field(default=None, ge=0, le=MTIME_NS_MAX)


class ListQuery(FileQuery):
    depth: int = Field(default=1, ge=1, le=64)


class WatchQuery(UserQuery):
    """Either a new watch of `path`, or `watch_id` and from which event on."""

    path: str | None = None
    recursive: bool = False
    watch_id: str | None = Field(default=None, description="A watch that was begun before")
    offset: Offset = Field(default=0, description="With watch_id: how many of its events were received before")


class EndWatchQuery(Query):
    watch_id: str


class MakeDir(Strict):
    path: str
    mode: Octal | None = None


class Move(Strict):
    source: str
    target: str


class Symlink(Strict):
    target: str
    path: str


class Chmod(Strict):
    path: str
    mode: Octal


class Entry(View):
    path: str
    name: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device"]
    size: int
    mode: str
    uid: int
    gid: int
    owner: str
    group: str
    mtime_ns: int
    target: str | None
    error: str | None


class MadeDir(View):
    created: bool
    entry: Entry


class PortsView(View):
    """`{port}` in `url` and `path` stands for the port."""

    url: str
    path: str
    public: bool
    token: str


# --------------------------------------------------------------------------------------------------- keys, the server


class CreateKey(Strict):
    name: str = Field(min_length=1, max_length=100)
    scopes: list[
        Literal[
            "sandboxes:read",
            "sandboxes:write",
            "sandboxes:use",
            "secrets:read",
            "secrets:write",
            "secrets:use",
            "keys:write",
            "admin",
        ]
    ] = Field(min_length=1, max_length=8)


class KeyView(View):
    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: str
    last_used_at: str | None
    revoked_at: str | None


class NewKey(KeyView):
    secret: str


class KeyList(View):
    items: list[KeyView]


class ServerView(View):
    version: str
    node_id: str
    accelerator: str
    vmm: str
    templates: list[str]


class Health(View):
    status: Literal["ok"]


class FieldProblem(View):
    field: str
    message: str
    given: Any = None
    allowed: Any = None


class ProblemView(View):
    """RFC 9457. `docs/reference/errors.md` has every code."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    retry: Literal["safe", "never", "unknown"]
    request_id: str
    errors: list[FieldProblem] | None = None
    context: dict[str, Any] | None = None
