"""A `contract.Node` without machines, whose faults are set by the test. It shows how the services take a node's
troubles; what a node really does is tested with real VMs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

from skerry.core import ids
from skerry.core.errors import (
    Conflict,
    Gone,
    GuestUnreachable,
    InternalError,
    NotFound,
    OutcomeUnknown,
    SkerryError,
    Unavailable,
)
from skerry.core.lifecycle import EndReason
from skerry.core.models import (
    EgressLayer,
    Exited,
    ExitStatus,
    FileInfo,
    FileKind,
    GuestMetrics,
    NetworkEvent,
    Output,
    ProcessEnd,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ProcessState,
    PtySize,
    SandboxSpec,
    Stream,
    WatchEvent,
    WatchKind,
)
from skerry.node.contract import (
    Connection,
    Ended,
    Guest,
    ImageInfo,
    NodeInfo,
    NodePaused,
    NodeSandbox,
    NodeSnapshot,
    PoolStatus,
    TemplateInfo,
)


@dataclass
class Faults:
    """What goes wrong next. Each holds until the test changes it."""

    create: SkerryError | Exception | None = None
    create_delay: float = 0.0
    create_gate: asyncio.Event | None = None
    """A create waits for it."""
    kill: SkerryError | None = None
    kill_delay: float = 0.0
    kill_misses_creates: bool = False
    """A kill comes just before the node has begun a create, pause or resume: it finds nothing, and the VM or its image
    is there after it."""
    guest: SkerryError | None = None
    egress: SkerryError | None = None
    pause: "Fault | None" = None
    resume: "Fault | None" = None
    snapshot: "Fault | None" = None
    fork: "Fault | None" = None
    fork_copies: int | None = None
    """Only so many copies of a fork come up."""


@dataclass
class Fault:
    """What befalls an act: first it waits for `gate`, then `error` is raised, or `crash`: its VM dies of it.

    `late`: the error comes after the act was done, as an answer that is lost.
    """

    error: SkerryError | Exception | None = None
    gate: asyncio.Event | None = None
    crash: bool = False
    late: bool = False


@dataclass
class FakeImage:
    guest: "FakeGuest"
    memory: bool


class FakeNode:
    """VMs are entries of a dict. `vms` survive `stop`, as real ones do: hand the same object to the next services."""

    def __init__(self, node_id: str = "ndfake", templates: Sequence[str] = ("base",)) -> None:
        self.node_id = node_id
        self.names = tuple(templates)
        self.faults = Faults()
        self.vms: dict[str, FakeGuest] = {}
        self.creates = 0
        self.started: list[str] = []
        self.images_at_rest: dict[str, FakeImage] = {}
        self.snapshots_kept: dict[str, FakeImage] = {}
        self.pools: list[PoolStatus] = []
        self.woken: list[tuple[str, bool]] = []
        """Who was resumed, and whether with its memory."""
        self.acts: list[str] = []
        """What was asked of it and begun: "pause sb…"."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._killed: set[str] = set()
        self._passing: set[str] = set()
        self._creating: dict[str, asyncio.Task[object] | None] = {}
        self._listeners: set[asyncio.Queue[Ended | None]] = set()
        self._traffic: set[asyncio.Queue[NetworkEvent]] = set()
        self.connections = 0
        """So many a change of a policy cuts."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> Sequence[NodeSandbox]:
        return self.sandboxes()

    async def stop(self) -> None:
        self._listeners.clear()

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot_id: str | None = None) -> NodeSandbox:
        self.creates += 1
        if sandbox_id in self.vms:
            return self._vm(sandbox_id)
        if spec.template not in self.names:
            raise NotFound("no such template", code="template_not_found")
        if snapshot_id is not None and snapshot_id not in self.snapshots_kept:
            raise NotFound("no such image", code="image_not_found")
        self._creating[sandbox_id] = asyncio.current_task()
        try:
            made = await self._create(sandbox_id, spec)
            if snapshot_id is not None:
                self.vms[sandbox_id].take_from(self.snapshots_kept[snapshot_id])
            return made
        finally:
            self._creating.pop(sandbox_id, None)

    async def _create(self, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
        if self.faults.create_gate is not None:
            await self.faults.create_gate.wait()
        await asyncio.sleep(self.faults.create_delay)
        if self.faults.create is not None:
            raise self.faults.create
        if self._creating.get(sandbox_id) is None:
            raise InternalError("killed while it came up", code="vm_start_failed", step="killed")
        self.vms[sandbox_id] = self.new_guest(sandbox_id, spec)
        self.started.append(sandbox_id)
        return self._vm(sandbox_id)

    def _vm(self, sandbox_id: str) -> NodeSandbox:
        return NodeSandbox(sandbox_id, "boot", {}, 1)

    async def kill(self, sandbox_id: str) -> bool:
        if self.faults.kill is not None:
            raise self.faults.kill
        if sandbox_id in self._creating and not self.faults.kill_misses_creates:
            self._creating[sandbox_id] = None
        if sandbox_id in self._passing:
            if self.faults.kill_misses_creates:
                return False
            self._killed.add(sandbox_id)
        await asyncio.sleep(self.faults.kill_delay)
        guest = self.vms.pop(sandbox_id, None)
        if guest is not None:
            guest.end()
        image = self.images_at_rest.pop(sandbox_id, None)
        return guest is not None or image is not None

    # ------------------------------------------------------------------------------------------- pause, snapshot, fork

    @asynccontextmanager
    async def _act(self, name: str, sandbox_id: str, fault: Fault | None) -> AsyncIterator[None]:
        """One at a time for each sandbox, with its fault; Gone if a kill came meanwhile."""
        lock = self._locks.setdefault(sandbox_id, asyncio.Lock())
        async with lock:
            self.acts.append(f"{name} {sandbox_id}")
            if name in {"pause", "resume"}:
                self._passing.add(sandbox_id)
            try:
                if fault is not None and fault.gate is not None:
                    await fault.gate.wait()
                await asyncio.sleep(0)
                if sandbox_id in self._killed:
                    raise Gone("it was killed meanwhile")
                if fault is not None and fault.crash:
                    if sandbox_id in self.vms:
                        self.crash(sandbox_id)
                    raise GuestUnreachable("the VMM is gone")
                if fault is not None and fault.error is not None and not fault.late:
                    raise fault.error
                yield
                if fault is not None and fault.error is not None:
                    raise fault.error
            finally:
                self._passing.discard(sandbox_id)
                self._killed.discard(sandbox_id)

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> NodePaused:
        async with self._act("pause", sandbox_id, self.faults.pause):
            if sandbox_id not in self.images_at_rest:
                guest = self.vms.pop(self._there(sandbox_id))
                guest.end()
                self.images_at_rest[sandbox_id] = FakeImage(guest, memory)
        return NodePaused(sandbox_id, memory, 4096, {})

    def _there(self, sandbox_id: str) -> str:
        if sandbox_id not in self.vms:
            raise NotFound(f"there is no sandbox {sandbox_id}", code="sandbox_not_found")
        return sandbox_id

    async def resume(self, sandbox_id: str, *, memory: bool = True) -> NodeSandbox:
        async with self._act("resume", sandbox_id, self.faults.resume):
            if sandbox_id not in self.vms:
                image = self.images_at_rest.pop(sandbox_id, None)
                if image is None:
                    raise NotFound("its image is not there", code="image_not_found")
                self.woken.append((sandbox_id, memory))
                guest = self.new_guest(sandbox_id, image.guest.spec)
                guest.take_from(replace(image, memory=image.memory and memory))
                self.vms[sandbox_id] = guest
        return NodeSandbox(sandbox_id, "clone", {}, 1)

    def paused(self) -> Sequence[NodePaused]:
        return [NodePaused(i, image.memory, 4096, {}) for i, image in self.images_at_rest.items()]

    async def snapshot(self, sandbox_id: str, snapshot_id: str, *, memory: bool = True) -> NodeSnapshot:
        async with self._act("snapshot", sandbox_id, self.faults.snapshot):
            at_rest = self.images_at_rest.get(sandbox_id)
            guest = at_rest.guest if at_rest is not None else self.vms[self._there(sandbox_id)]
            kept = self.new_guest(snapshot_id, guest.spec)
            kept.take_from(FakeImage(guest, memory))
            self.snapshots_kept[snapshot_id] = FakeImage(kept, memory)
        return NodeSnapshot(snapshot_id, memory, 8192, {"stood_still": 12.5})

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return self.snapshots_kept.pop(snapshot_id, None) is not None

    def snapshots(self) -> Sequence[str]:
        return list(self.snapshots_kept)

    async def fork(self, sandbox_id: str, copies: Mapping[str, SandboxSpec]) -> Mapping[str, NodeSandbox | SkerryError]:
        found: dict[str, NodeSandbox | SkerryError] = {}
        async with self._act("fork", sandbox_id, self.faults.fork):
            original = self.vms[self._there(sandbox_id)]
            for n, (copy_id, spec) in enumerate(copies.items()):
                if self.faults.fork_copies is not None and n >= self.faults.fork_copies:
                    found[copy_id] = Unavailable("no room", code="node_full")
                    continue
                guest = self.new_guest(copy_id, spec)
                guest.take_from(FakeImage(original, memory=True))
                self.vms[copy_id] = guest
                found[copy_id] = NodeSandbox(copy_id, "clone", {}, 1)
        return found

    def pool(self) -> Sequence[PoolStatus]:
        return self.pools

    def images(self) -> Sequence[ImageInfo]:
        at = "2026-01-01T00:00:00Z"
        return [
            *(ImageInfo(i, "pause", "base", image.memory, 4096, at, (i,)) for i, image in self.images_at_rest.items()),
            *(
                ImageInfo(i, "snapshot", "base", image.memory, 8192, at, (i,))
                for i, image in self.snapshots_kept.items()
            ),
        ]

    async def verify_images(self) -> Sequence[ImageInfo]:
        return [replace(image, damage="page 7 differs") for image in self.images()]

    async def collect_images(self) -> Sequence[str]:
        return ["imold"]

    async def set_egress(self, sandbox_id: str, layers: Sequence[EgressLayer]) -> int:
        if self.faults.egress is not None:
            raise self.faults.egress
        at_rest = self.images_at_rest.get(sandbox_id)
        guest = at_rest.guest if at_rest is not None else self.vms[self._there(sandbox_id)]
        changed = guest.spec.egress != tuple(layers)
        guest.spec = replace(guest.spec, egress=tuple(layers))
        return self.connections if changed else 0

    @asynccontextmanager
    async def network_events(self) -> AsyncIterator[AsyncIterator[NetworkEvent]]:
        queue: asyncio.Queue[NetworkEvent] = asyncio.Queue()
        self._traffic.add(queue)

        async def events() -> AsyncIterator[NetworkEvent]:
            while True:
                yield await queue.get()

        try:
            yield events()
        finally:
            self._traffic.discard(queue)

    def tell_traffic(self, event: NetworkEvent) -> None:
        for queue in self._traffic:
            queue.put_nowait(event)

    def new_guest(self, sandbox_id: str, spec: SandboxSpec) -> "FakeGuest":
        return FakeGuest(self, sandbox_id, spec)

    def crash(self, sandbox_id: str, reason: EndReason = EndReason.CRASHED, detail: str = "qemu died") -> None:
        """As if the VMM had died by itself."""
        self.vms.pop(sandbox_id).end()
        self.tell(sandbox_id, reason, detail)

    def tell(self, sandbox_id: str, reason: EndReason, detail: str = "") -> None:
        """The news alone."""
        for queue in self._listeners:
            queue.put_nowait(Ended(sandbox_id, reason, detail))

    def cut_news(self) -> None:
        """The line of the news breaks; who subscribes again gets a new one."""
        for queue in self._listeners:
            queue.put_nowait(None)

    def guest(self, sandbox_id: str) -> Guest:
        if sandbox_id not in self.vms:
            raise NotFound(f"there is no sandbox {sandbox_id}", code="sandbox_not_found")
        return self.vms[sandbox_id]

    def sandboxes(self) -> Sequence[NodeSandbox]:
        return [self._vm(sandbox_id) for sandbox_id in self.vms]

    @asynccontextmanager
    async def ended(self) -> AsyncIterator[AsyncIterator[Ended]]:
        queue: asyncio.Queue[Ended | None] = asyncio.Queue()
        self._listeners.add(queue)

        async def news() -> AsyncIterator[Ended]:
            while True:
                ended = await queue.get()
                if ended is None:
                    raise Unavailable("the line broke")
                yield ended

        try:
            yield news()
        finally:
            self._listeners.discard(queue)

    def info(self) -> NodeInfo:
        return NodeInfo(self.node_id, "tcg", "fake 1.0", len(self.vms), 4096, 65_536)

    def templates(self) -> Sequence[str]:
        return self.names

    def template(self, name: str) -> TemplateInfo:
        if name not in self.names:
            known = ", ".join(self.names)
            raise NotFound(
                f"there is no template {name!r}; there is: {known}", code="template_not_found", available=known
            )
        return TemplateInfo(name, None, None)

    async def console(self, sandbox_id: str, *, limit: int = 65_536) -> bytes:
        self.guest(sandbox_id)
        return b"login:"[-limit:]


@dataclass
class FakeProcess:
    info: ProcessInfo
    events: list[ProcessEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeStream:
    def __init__(
        self, guest: "FakeGuest", process: FakeProcess, begins: dict[Stream, int], *, before: int = 0,
        follow: bool = True,
    ) -> None:  # fmt: skip
        self._guest = guest
        self.begins = begins
        self._before = before
        self._follow = follow
        self._process = process
        self._next = 0
        self.closed = False

    def __aiter__(self) -> Self:
        return self

    @property
    def process(self) -> ProcessInfo:
        return self._process.info

    async def __anext__(self) -> ProcessEvent:
        while self._next >= len(self._process.events):
            if self._next and isinstance(self._process.events[-1], Exited):
                raise StopAsyncIteration
            if self._guest.over:
                raise OutcomeUnknown("the line to the guest broke")
            if not self._follow:
                raise StopAsyncIteration
            self._process.changed.clear()
            await self._process.changed.wait()
        self._next += 1
        event = self._process.events[self._next - 1]
        if not isinstance(event, Output) or (left := self._from(event)) == event:
            return event
        return left if left is not None else await self.__anext__()

    def _from(self, event: Output) -> Output | None:
        """What of it does not lie before what was asked for."""
        skip = max(0, self.begins.get(event.stream, 0) - self._before - event.offset)
        return replace(event, offset=event.offset + skip, data=event.data[skip:]) if skip < len(event.data) else None

    async def aclose(self) -> None:
        self.closed = True


class FakeBytes:
    def __init__(self, info: FileInfo, data: bytes) -> None:
        self.info = info
        self.length = len(data)
        self._data: bytes | None = data

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._data:
            raise StopAsyncIteration
        data, self._data = self._data, None
        return data

    async def aclose(self) -> None:
        self._data = None


class FakeWatch:
    def __init__(self, guest: "FakeGuest", watch_id: str, offset: int = 0) -> None:
        self._guest = guest
        self._next = offset
        self.watch_id = watch_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._guest.over:
            told = self._guest.watches.get(self.watch_id)
            if told is None:
                raise NotFound("no such watch", code="watch_not_found")
            if self._next < len(told):
                self._next += 1
                return told[self._next - 1]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._guest.ended.wait(), 0.01)
        raise GuestUnreachable("the line to the guest broke")

    async def aclose(self) -> None:
        return None


class FakeGuest:
    """Processes start and stay until `finish`; files are a dict."""

    def __init__(self, node: FakeNode, sandbox_id: str, spec: SandboxSpec) -> None:
        self._node = node
        self.sandbox_id = sandbox_id
        self.spec = spec
        self.ended = asyncio.Event()
        self.running: dict[str, FakeProcess] = {}
        self.started: dict[str, ProcessSpec] = {}
        """What each was started with."""
        self.files: dict[str, bytes] = {}
        self.watches: dict[str, list[WatchEvent]] = {}
        """What each watch has told."""
        self.stdin = b""
        self._pids = 100

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    def end(self) -> None:
        self.ended.set()
        for process in self.running.values():
            process.changed.set()

    def take_from(self, image: FakeImage) -> None:
        """Its files, and with memory its processes, which go on in this guest."""
        self.files = dict(image.guest.files)
        if image.memory:
            for process_id, process in image.guest.running.items():
                self.running[process_id] = FakeProcess(process.info, list(process.events))
            self.watches = {watch_id: list(told) for watch_id, told in image.guest.watches.items()}
            self._pids = image.guest._pids

    def _check(self) -> None:
        if self._node.faults.guest is not None:
            raise self._node.faults.guest
        if self.over:
            raise GuestUnreachable("the guest does not answer")

    def emit(self, process_id: str, data: bytes) -> None:
        process = self.running[process_id]
        offset = sum(len(e.data) for e in process.events if isinstance(e, Output))
        process.events.append(Output(Stream.STDOUT, offset, data))
        process.changed.set()

    def finish(self, process_id: str, code: int = 0) -> None:
        process = self.running[process_id]
        status = ExitStatus(ProcessEnd.EXIT, code, None, 5)
        process.info = replace(process.info, state=ProcessState.EXITED, exit=status)
        process.events.append(Exited(status))
        process.changed.set()

    def _process(self, process_id: str) -> FakeProcess:
        if process_id not in self.running:
            raise NotFound("no such process", code="process_not_found")
        return self.running[process_id]

    async def start(self, spec: ProcessSpec) -> FakeStream:
        self._check()
        self._pids += 1
        info = ProcessInfo(
            spec.process_id,
            self._pids,
            spec.argv or ("/bin/bash", "-c", spec.shell or ""),
            spec.cwd or "/home/user",
            spec.user or "user",
            spec.tag,
            spec.pty is not None,
            spec.stdin,
            spec.background,
            ProcessState.RUNNING,
            int(time.time() * 1000),
            None,
        )
        process = FakeProcess(info)
        self.started[spec.process_id] = spec
        self.running[spec.process_id] = process
        return FakeStream(self, process, {})

    async def attach(
        self,
        process_id: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        before: int = 0,
        follow: bool = True,
    ) -> FakeStream:
        self._check()
        process = self._process(process_id)
        end = sum(len(event.data) for event in process.events if isinstance(event, Output))
        begins = {Stream.STDOUT: min(stdout_offset, end), Stream.STDERR: 0}
        return FakeStream(self, process, begins, before=before, follow=follow)

    async def processes(self) -> list[ProcessInfo]:
        self._check()
        return [process.info for process in self.running.values()]

    async def signal(self, process_id: str, signal: str) -> None:
        self._check()
        if self._process(process_id).info.exit is not None:
            raise Conflict("it is over", code="process_exited")
        self.finish(process_id, 128)

    async def kill_process(self, process_id: str) -> bool:
        self._check()
        if self._process(process_id).info.exit is not None:
            return False
        self.finish(process_id, 137)
        return True

    async def write_stdin(self, process_id: str, data: AsyncIterator[bytes]) -> int:
        self._check()
        self._process(process_id)
        written = 0
        async for chunk in data:
            self.stdin += chunk
            written += len(chunk)
        return written

    async def close_stdin(self, process_id: str) -> None:
        self._check()
        self._process(process_id)

    async def resize_pty(self, process_id: str, size: PtySize) -> None:
        self._check()
        self._process(process_id)

    def _info(self, path: str) -> FileInfo:
        size = len(self.files[path])
        name = path.rsplit("/", 1)[-1]
        return FileInfo(path, name, FileKind.FILE, size, 0o644, 1000, 1000, "user", "user", 0, None)

    def _there(self, path: str) -> None:
        self._check()
        if path not in self.files:
            raise NotFound(f"there is no {path}", code="path_not_found", path=path)

    async def stat(
        self, path: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo:
        self._there(path)
        return self._info(path)

    async def list_dir(
        self, path: str, *, depth: int = 1, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> AsyncIterator[FileInfo]:
        self._check()
        below = sorted(name for name in self.files if name.startswith(path.rstrip("/") + "/"))
        if not below and path != "/empty":
            raise NotFound(f"there is no {path}", code="path_not_found", path=path)
        for name in below:
            yield self._info(name)

    async def read_file(
        self, path: str, *, user: str | None = None, offset: int = 0, length: int | None = None,
        privileged: bool = False,
    ) -> FakeBytes:  # fmt: skip
        self._there(path)
        end = None if length is None else offset + length
        return FakeBytes(self._info(path), self.files[path][offset:end])

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
        self._check()
        self.files[path] = b"".join([chunk async for chunk in data])
        self._check()
        return self._info(path)

    async def make_dir(
        self, path: str, *, user: str | None = None, mode: int | None = None, detail: bool = False,
        privileged: bool = False,
    ) -> tuple[FileInfo, bool]:  # fmt: skip
        self._check()
        new = path not in self.files
        self.files.setdefault(path, b"")
        return replace(self._info(path), kind=FileKind.DIRECTORY), new

    async def move(
        self, source: str, target: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo:
        self._there(source)
        self.files[target] = self.files.pop(source)
        return self._info(target)

    async def remove(self, path: str, *, user: str | None = None, privileged: bool = False) -> None:
        self._there(path)
        del self.files[path]

    async def symlink(self, target: str, path: str, *, user: str | None = None) -> FileInfo:
        self._check()
        self.files[path] = b""
        return replace(self._info(path), kind=FileKind.SYMLINK, target=target)

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> FileInfo:
        self._there(path)
        return replace(self._info(path), mode=mode)

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None, privileged: bool = False
    ) -> FakeWatch:
        self._check()
        watch_id = ids.new_id(ids.WATCH)
        self.watches[watch_id] = []
        return FakeWatch(self, watch_id)

    def see(self, path: str) -> None:
        """All watches tell that it was made."""
        for told in self.watches.values():
            told.append(WatchEvent(WatchKind.CREATE, path, is_dir=False, offset=len(told)))

    async def attach_watch(self, watch_id: str, *, offset: int = 0) -> FakeWatch:
        self._check()
        if watch_id not in self.watches:
            raise NotFound("no such watch", code="watch_not_found")
        return FakeWatch(self, watch_id, offset)

    async def settle_watch(self, watch_id: str) -> int:
        self._check()
        return len(self.watches[watch_id])

    async def end_watch(self, watch_id: str) -> None:
        self._check()
        if self.watches.pop(watch_id, None) is None:
            raise NotFound("no such watch", code="watch_not_found")

    async def metrics(self) -> GuestMetrics:
        self._check()
        return GuestMetrics(0, 1.0, self.spec.cpu, 0.0, 0.0, 1, 1, 0, 1, 1, len(self.running))

    async def connect(self, port: int) -> Connection:
        raise Conflict("nobody listens there", code="port_not_open", port=port)
