"""What the control plane may ask of a machine that runs sandboxes.

Every method raises only `skerry.core.errors`. Calls may come concurrently; for one sandbox the node serialises
create and kill itself (a kill that arrives during a create wins).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, Self

from skerry.core.errors import SkerryError
from skerry.core.lifecycle import EndReason
from skerry.core.models import (
    EgressLayer,
    FileInfo,
    GuestMetrics,
    NetworkEvent,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    PtySize,
    SandboxSpec,
    Stream,
    WatchEvent,
)


class ProcessStream(Protocol):
    """The events of one process as they come, ending with `Exited`.

    Reading slowly slows the process. If the line breaks before `Exited`, iteration raises OutcomeUnknown
    (the process runs on); if the sandbox is killed meanwhile it raises Gone. Closing never touches the process.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> ProcessEvent: ...

    @property
    def process(self) -> ProcessInfo: ...

    @property
    def begins(self) -> Mapping[Stream, int]:
        """Of one that was attached to: where in each stream the offsets are that were asked for. What is told before
        is what `before` asked for."""
        ...

    async def aclose(self) -> None: ...


class FileDownload(Protocol):
    """A file's bytes as they come. `info.size` is the whole file's; `length` is what this read will give."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes: ...

    @property
    def info(self) -> FileInfo: ...

    @property
    def length(self) -> int: ...

    async def aclose(self) -> None: ...


class WatchStream(Protocol):
    """Changes as they come; the watch is armed when this object exists.

    Ends by raising Conflict `watch_overflow` (rescan!) or NotFound `path_not_found` (the root is gone); never silently.
    The stream is not the watch: that goes on in the guest, also over a pause, until it is ended, or nobody has read it
    for five minutes; `attach_watch` reads on.
    """

    @property
    def watch_id(self) -> str: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> WatchEvent: ...

    async def aclose(self) -> None: ...


class Guest(Protocol):
    """The inside of one running sandbox.

    `user` is a name or a numeric uid, None for the sandbox's default user; what that user may not do in the guest
    is Forbidden `permission_denied`. Paths are absolute, or relative to the user's home; `~` is the user's home.
    A path that is relative to nothing, empty or too long is InvalidRequest; missing is NotFound `path_not_found`.

    Calls on files that are `privileged` are judged as root's, whoever `user` is: the path is still that user's, and
    what is made belongs to that user. `detail` fills the fields of FileInfo that say so.
    """

    async def start(self, spec: ProcessSpec) -> ProcessStream:
        """Start a process and attach to it. Returns once it runs.

        Raises InvalidRequest with code cwd_not_found, cwd_not_a_directory, user_not_found, command_not_found,
        command_not_executable or command_too_long; Unavailable `process_limit`; GuestUnreachable where nothing was
        dispatched; OutcomeUnknown where it may have been.
        """
        ...

    async def attach(
        self,
        process_id: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        before: int = 0,
        follow: bool = True,
    ) -> ProcessStream:
        """Read a process's output from these offsets (the `pty` stream counts as stdout) on, and its exit. `before`: so
        many bytes before the offsets are told as well, where they are kept.

        `follow` False: what is kept now, and the exit if there was one; then the iteration ends, without `Exited`
        where the process runs on.

        What is no longer kept comes as a `Gap`. Works for an exited process while the guest remembers it
        (the last 64, for ten minutes); else NotFound `process_not_found`.
        """
        ...

    async def processes(self) -> list[ProcessInfo]: ...

    async def signal(self, process_id: str, signal: str) -> None:
        """Send a signal ("SIGINT", "TERM", "9") to the process group. Conflict `process_exited` if it is over."""
        ...

    async def kill_process(self, process_id: str) -> bool:
        """SIGKILL for the whole tree, detached grandchildren included. False if it was over already."""
        ...

    async def write_stdin(self, process_id: str, data: AsyncIterator[bytes]) -> int:
        """Feed standard input (or the terminal); returns how many bytes the process's pipe took.

        Conflict `stdin_not_open` (started without), `stdin_closed`, or `process_exited`.
        """
        ...

    async def close_stdin(self, process_id: str) -> None: ...

    async def resize_pty(self, process_id: str, size: PtySize) -> None: ...

    async def stat(
        self, path: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo: ...

    def list_dir(
        self, path: str, *, depth: int = 1, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> AsyncIterator[FileInfo]:
        """Entries below `path`, parents before children, names in byte order. Symlinked directories are not entered,
        but `path` itself may be one."""
        ...

    async def read_file(
        self, path: str, *, user: str | None = None, offset: int = 0, length: int | None = None,
        privileged: bool = False,
    ) -> FileDownload:  # fmt: skip
        """Conflict `is_a_directory` / `not_a_regular_file` for what has no bytes to read."""
        ...

    async def write_file(
        self,
        path: str,
        data: AsyncIterator[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        mtime_ns: int | None = None,
        size: int | None = None,
        xattrs: Mapping[str, str] | None = None,
        in_place: bool = False,
        privileged: bool = False,
    ) -> FileInfo:
        """Write the whole file: to a temporary beside it, then rename, so that readers see the old or the new one.

        Missing parents are made, owned by the user. `mode` None keeps an existing file's mode, else 0o644.
        `size`, where known, is checked: a short stream leaves the old file. A full disk is NoSpace; nothing is left.
        `xattrs` become all that the file has in the user's namespace (names begin with `user.`).
        `in_place`: an existing file is written into once all bytes are in the guest, and a new one as they come; it
        belongs to `user` afterwards, whose it was before.
        """
        ...

    async def make_dir(
        self, path: str, *, user: str | None = None, mode: int | None = None, detail: bool = False,
        privileged: bool = False,
    ) -> tuple[FileInfo, bool]:  # fmt: skip
        """Make it and its parents. The bool: whether it is new. Conflict `path_exists` if it is not a directory."""
        ...

    async def move(
        self, source: str, target: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo:
        """rename(2); across filesystems copy and remove. Onto a directory that is not empty: Conflict."""
        ...

    async def remove(self, path: str, *, user: str | None = None, privileged: bool = False) -> None:
        """A file, a link (never its target) or a whole tree."""
        ...

    async def symlink(self, target: str, path: str, *, user: str | None = None) -> FileInfo: ...

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> FileInfo: ...

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None, privileged: bool = False
    ) -> WatchStream: ...

    async def attach_watch(self, watch_id: str, *, offset: int = 0) -> WatchStream:
        """Read a watch's events from that one on. NotFound `watch_not_found`, Conflict `watch_overflow` where they are
        no longer all kept."""
        ...

    async def settle_watch(self, watch_id: str) -> int:
        """The offset after the events of everything that has changed by now. NotFound `watch_not_found`; Unavailable
        `guest_busy` where a reader that does not read keeps it from being known."""
        ...

    async def end_watch(self, watch_id: str) -> None:
        """NotFound `watch_not_found`."""
        ...

    async def metrics(self) -> GuestMetrics: ...

    async def connect(self, port: int) -> "Connection":
        """A TCP connection to a port of the guest (never the agent's own). Conflict `port_not_open` if refused."""
        ...


class Connection(Protocol):
    """A byte stream to a guest port."""

    async def read(self, limit: int = 262_144) -> bytes:
        """b"" at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when the bytes are on their way; a slow guest holds the caller."""
        ...

    async def write_eof(self) -> None: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeSandbox:
    """A sandbox as its node sees it."""

    id: str
    start_kind: str
    """"boot" or "clone"."""
    timings_ms: dict[str, float]
    """Milliseconds of each step of its creation; empty after a re-adoption."""
    vmm_pid: int


@dataclass(frozen=True, slots=True)
class NodePaused:
    """A sandbox at rest on its node's disk."""

    id: str
    memory: bool
    """False: its disk alone is kept, and a resume boots it anew."""
    size_bytes: int
    """What it takes on the disk."""
    timings_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    id: str
    memory: bool
    size_bytes: int
    timings_ms: dict[str, float]
    """`stood_still`: how long the sandbox did not run."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The warm clones of one template and shape. Counters are since the node was opened."""

    template: str
    cpu: int
    memory_mb: int
    ready: int
    wanted: int
    hits: int
    misses: int
    oldest_s: float
    """Age of the oldest one that is ready; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """A memory image or disk that the node keeps."""

    image_id: str
    kind: str
    """"template", "pause" or "snapshot"."""
    template: str
    memory: bool
    size_bytes: int
    created_at: str
    used_by: tuple[str, ...]
    """Ids of sandboxes and snapshots that need it; an image without any can be collected."""
    damage: str | None = None
    """Set by `verify_images`: what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A VM ended without a kill."""

    sandbox_id: str
    reason: EndReason
    detail: str
    """One line: how, with the last line of the console where that helps."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    node_id: str
    accelerator: str
    """"kvm" or "tcg"."""
    vmm: str
    """Such as "qemu 10.0.2"."""
    sandboxes: int
    memory_free_mb: int
    disk_free_mb: int


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """What a template wants for sandboxes whose creator names nothing; None: everybody's default."""

    name: str
    cpu: int | None
    memory_mb: int | None


class Node(Protocol):
    async def start(self) -> Sequence[NodeSandbox]:
        """Open the node: re-adopt what lives, remove what is orphaned. Returns the sandboxes that live."""
        ...

    async def stop(self) -> None:
        """Let go of everything; the sandboxes run on."""
        ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot_id: str | None = None) -> NodeSandbox:
        """Bring up a sandbox: a clone of the template's memory, or of a snapshot's where `snapshot_id` is given
        (`spec.cpu` and `spec.memory_mb` are then the snapshot's own), and a boot where there is no memory to clone.

        Idempotent by id: a second call while it lives returns the same VM. NotFound `image_not_found` and Conflict
        `image_mismatch` are about the snapshot. A failure at any step leaves nothing behind and is InternalError
        (`vm_start_failed`, context `step`),
        NotFound `template_not_found`, or Unavailable `node_full`. Cancelling it leaves nothing behind either.
        """
        ...

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox, running or paused, and remove all it held. Idempotent; False if there was nothing.

        Returns when nothing is left."""
        ...

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> NodePaused:
        """Keep a running sandbox on disk and end its VM. Returns when the image is durable and the VM is gone.

        `memory` False: the guest's disk is flushed and kept, its memory is not. Idempotent for a paused one. On failure
        the sandbox runs on: NoSpace `host_disk_full`, InternalError. A kill meanwhile wins: Gone.
        """
        ...

    async def resume(self, sandbox_id: str, *, memory: bool = True) -> NodeSandbox:
        """Let a paused sandbox go on, with a new generation. Idempotent for a running one; concurrent calls share a VM.

        `memory` False: the memory that was kept is dropped, and it boots from its disk, once that has succeeded.

        NotFound `image_not_found`, InternalError `image_damaged`, Conflict `image_mismatch`, Unavailable `node_full`:
        it stays paused. A kill meanwhile wins: Gone.
        """
        ...

    def paused(self) -> Sequence[NodePaused]: ...

    async def snapshot(self, sandbox_id: str, snapshot_id: str, *, memory: bool = True) -> NodeSnapshot:
        """Keep the state of a running or paused sandbox under an id of its own; a running one goes on."""
        ...

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        """Forget it; what running sandboxes still need of it stays until they end. False if there was none."""
        ...

    def snapshots(self) -> Sequence[str]: ...

    async def fork(self, sandbox_id: str, copies: Mapping[str, SandboxSpec]) -> Mapping[str, NodeSandbox | SkerryError]:
        """Running copies of a running sandbox, each under its own id. One copy's failure is that copy's result.

        `spec` of a copy: environment and metadata; cpu and memory are the original's. Raises where no copy could be
        tried at all (then nothing is left).
        """
        ...

    def pool(self) -> Sequence[PoolStatus]: ...

    def images(self) -> Sequence[ImageInfo]: ...

    async def verify_images(self) -> Sequence[ImageInfo]:
        """Read every byte of every image and compare it with what was saved."""
        ...

    async def collect_images(self) -> Sequence[str]:
        """Remove images and layers that nothing needs. Returns their ids."""
        ...

    def guest(self, sandbox_id: str) -> Guest:
        """NotFound `sandbox_not_found` if this node runs no such VM."""
        ...

    def sandboxes(self) -> Sequence[NodeSandbox]: ...

    def ended(self) -> AbstractAsyncContextManager[AsyncIterator[Ended]]:
        """Subscribe to VMs that end without a kill."""
        ...

    async def set_egress(self, sandbox_id: str, layers: Sequence[EgressLayer]) -> int:
        """What may leave a running or paused sandbox from now on. Returns how many connections were cut by it.

        Raises InvalidRequest for what is no rule: then nothing changes.
        """
        ...

    def network_events(self) -> AbstractAsyncContextManager[AsyncIterator[NetworkEvent]]:
        """Subscribe to look-ups, connections and refused packets of all sandboxes."""
        ...

    def info(self) -> NodeInfo: ...

    def templates(self) -> Sequence[str]:
        """Names that `create` can use now."""
        ...

    def template(self, name: str) -> TemplateInfo:
        """NotFound `template_not_found`, which says how to get one that could be there."""
        ...

    async def console(self, sandbox_id: str, *, limit: int = 65_536) -> bytes:
        """The end of the VM's serial console, at most 64 KiB of it. NotFound `sandbox_not_found`."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
