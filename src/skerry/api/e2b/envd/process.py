"""The service `process.Process`."""

import signal
from collections.abc import AsyncIterator
from typing import Any, Final, cast

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from protobuf import Oneof

from skerry.api.e2b.envd import errors
from skerry.api.e2b.envd.call import Call, current
from skerry.api.e2b.envd.connect import overdue, stream, told
from skerry.api.e2b.envd.entries import plain
from skerry.api.e2b.gen import process_connect
from skerry.api.e2b.gen import process_pb as pb
from skerry.core import ids
from skerry.core.errors import SkerryError
from skerry.core.models import (
    Exited,
    ExitStatus,
    Gap,
    Output,
    ProcessEnd,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ProcessState,
    PtySize,
    Stream,
)
from skerry.node.contract import ProcessStream

OUTPUT_BYTES: Final = 32 * 1024
PTY_BYTES: Final = 16 * 1024
FROM_NOW_ON: Final = 2**63 - 1
"""An offset beyond all output: what was written before is not told."""


class ProcessService(process_connect.Process):
    async def list(self, request: pb.ListRequest, ctx: RequestContext) -> pb.ListResponse:
        """Those that run."""
        call = current.get()
        found = await told(call.services.processes.list(call.principal, call.sandbox_id), ctx.timeout_ms)
        return pb.ListResponse(processes=[_shown(p) for p in found if p.state is ProcessState.RUNNING])

    async def start(self, request: pb.StartRequest, ctx: RequestContext) -> AsyncIterator[pb.StartResponse]:
        """The client's deadline is the process's: it is killed then, whether the client is still there or not."""
        call, timeout_ms = current.get(), ctx.timeout_ms
        spec = _spec(request, call.user, timeout_ms)
        source = await told(call.services.processes.start(call.principal, call.sandbox_id, spec))
        async for event in _events(source, timeout_ms, deadline_is_ours=True):
            yield pb.StartResponse(event=event)

    async def connect(self, request: pb.ConnectRequest, ctx: RequestContext) -> AsyncIterator[pb.ConnectResponse]:
        call = current.get()
        process = await _find(call, request.process)
        source = await told(
            call.services.processes.attach(
                call.principal,
                call.sandbox_id,
                process.process_id,
                stdout_offset=FROM_NOW_ON,
                stderr_offset=FROM_NOW_ON,
            )
        )
        async for event in _events(source, ctx.timeout_ms, deadline_is_ours=False):
            yield pb.ConnectResponse(event=event)

    async def update(self, request: pb.UpdateRequest, ctx: RequestContext) -> pb.UpdateResponse:
        call = current.get()
        process = await _find_running(call, request.process)
        size = _size(request.pty)
        if size is not None:
            resizing = call.services.processes.resize(call.principal, call.sandbox_id, process.process_id, size)
            await told(resizing, ctx.timeout_ms)
        return pb.UpdateResponse()

    async def stream_input(
        self, request: AsyncIterator[pb.StreamInputRequest], ctx: RequestContext
    ) -> pb.StreamInputResponse:
        """`start` says to which process; then its input, in order, as fast as it is read."""
        call = current.get()
        process: ProcessInfo | None = None
        async for message in request:
            match message.event:
                case Oneof(field="start", value=start):
                    process = await _find_running(call, start.process)
                case Oneof(field="keepalive"):
                    continue
                case _:
                    break
            break
        if process is None:
            raise ConnectError(Code.INVALID_ARGUMENT, "the stream does not begin with a start event")
        await _write(call, process, _pieces(process, request), ctx.timeout_ms)
        return pb.StreamInputResponse()

    async def send_input(self, request: pb.SendInputRequest, ctx: RequestContext) -> pb.SendInputResponse:
        call = current.get()
        process = await _find_running(call, request.process)
        await _write(call, process, _one(_bytes(process, request.input)), ctx.timeout_ms)
        return pb.SendInputResponse()

    async def send_signal(self, request: pb.SendSignalRequest, ctx: RequestContext) -> pb.SendSignalResponse:
        """SIGKILL ends the whole tree, SIGTERM goes to the process group."""
        call = current.get()
        if request.signal not in {pb.Signal.SIGKILL, pb.Signal.SIGTERM}:
            raise ConnectError(Code.UNIMPLEMENTED, f"invalid signal: {request.signal}; allowed: SIGTERM, SIGKILL")
        process = await _find_running(call, request.process)
        who = (call.principal, call.sandbox_id, process.process_id)
        if request.signal == pb.Signal.SIGKILL:
            if not await told(call.services.processes.kill(*who), ctx.timeout_ms):
                raise _missing(request.process)
            return pb.SendSignalResponse()
        try:
            await call.services.processes.signal(*who, "SIGTERM")
        except SkerryError as error:
            over = error.code == "process_exited"
            raise (_missing(request.process) if over else errors.to_connect(error)) from error
        return pb.SendSignalResponse()

    async def close_stdin(self, request: pb.CloseStdinRequest, ctx: RequestContext) -> pb.CloseStdinResponse:
        """Twice is no error; a terminal's cannot be closed."""
        call = current.get()
        process = await _find_running(call, request.process)
        if process.pty:
            raise ConnectError(Code.INTERNAL, "cannot close the input of a terminal: send Ctrl+D (0x04) instead")
        try:
            await call.services.processes.close_stdin(call.principal, call.sandbox_id, process.process_id)
        except SkerryError as error:
            if error.code != "stdin_closed":
                raise errors.to_connect(error) from error
        return pb.CloseStdinResponse()


# ------------------------------------------------------------------------------------------------------------- start


def _spec(request: pb.StartRequest, user: str | None, timeout_ms: float | None) -> ProcessSpec:
    wanted = request.process or pb.ProcessConfig()
    return ProcessSpec(
        process_id=ids.new_id(ids.PROCESS),
        argv=(wanted.cmd, *wanted.args),
        cwd=(wanted.cwd or None) if wanted.has_field("cwd") else None,
        env=dict(wanted.envs),
        user=user,
        stdin=request.stdin if request.has_field("stdin") else True,
        pty=_size(request.pty),
        timeout_ms=None if timeout_ms is None else max(1, round(timeout_ms)),
        background=True,  # it goes on when nobody reads what it writes
        tag=(request.tag or None) if request.has_field("tag") else None,
    )


def _size(wanted: pb.PTY | None) -> PtySize | None:
    if wanted is None or wanted.size is None:
        return None
    return PtySize(cols=wanted.size.cols, rows=wanted.size.rows)


def _shown(process: ProcessInfo) -> pb.ProcessInfo:
    config = pb.ProcessConfig(
        cmd=plain(process.argv[0]),
        args=[plain(argument) for argument in process.argv[1:]],
        envs={plain(name): plain(value) for name, value in process.env.items()},
        cwd=plain(process.cwd),
    )
    shown = pb.ProcessInfo(config=config, pid=process.pid)
    if process.tag is not None:
        shown.tag = process.tag
    return shown


# ------------------------------------------------------------------------------------------------------------ events


async def _events(
    source: ProcessStream, timeout_ms: float | None, *, deadline_is_ours: bool
) -> AsyncIterator[pb.ProcessEvent]:
    """`start`, the output from now on, `end`. Closing it never touches the process."""
    start = _event("start", pb.ProcessEvent.StartEvent(pid=source.process.pid))
    alive = _event("keepalive", pb.ProcessEvent.KeepAlive())

    async def each(event: ProcessEvent) -> AsyncIterator[pb.ProcessEvent]:
        if isinstance(event, Output):
            size = PTY_BYTES if event.stream is Stream.PTY else OUTPUT_BYTES
            for at in range(0, len(event.data), size):
                piece = Oneof(event.stream.value, event.data[at : at + size])
                yield _event("data", pb.ProcessEvent.DataEvent(output=cast("Any", piece)))
        elif isinstance(event, Gap):
            raise ConnectError(Code.DATA_LOSS, f"{event.missed} bytes of {event.stream.value} are no longer kept")
        elif isinstance(event, Exited):
            if deadline_is_ours and event.status.reason is ProcessEnd.DEADLINE:
                raise overdue()
            yield _event("end", _end(event.status))

    try:
        async for message in stream(source, start, each, alive, timeout_ms):
            yield message
    finally:
        await source.aclose()


def _event(kind: str, value: Any) -> pb.ProcessEvent:
    return pb.ProcessEvent(event=cast("Any", Oneof(kind, value)))


def _end(status: ExitStatus) -> pb.ProcessEvent.EndEvent:
    """In Go's words, which clients show."""
    if status.exit_code is None:
        code, text = -1, f"signal: {_signal_text(status.signal or '')}"
    else:
        code, text = status.exit_code, f"exit status {status.exit_code}"
    end = pb.ProcessEvent.EndEvent(exit_code=code, exited=status.exit_code is not None, status=text)
    if code != 0:
        end.error = text
    return end


def _signal_text(name: str) -> str:
    """ "killed" for SIGKILL. Real-time signals keep their names."""
    known = signal.Signals.__members__.get(name)
    return (signal.strsignal(known) or name).lower() if known is not None else name


# ------------------------------------------------------------------------------------------------------------- input


async def _write(call: Call, process: ProcessInfo, data: AsyncIterator[bytes], timeout_ms: float | None) -> None:
    writing = call.services.processes.write_stdin(call.principal, call.sandbox_id, process.process_id, data)
    await told(writing, timeout_ms)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _pieces(process: ProcessInfo, request: AsyncIterator[pb.StreamInputRequest]) -> AsyncIterator[bytes]:
    async for message in request:
        match message.event:
            case Oneof(field="data", value=data):
                yield _bytes(process, data.input)
            case Oneof(field="keepalive"):
                continue
            case _:
                raise ConnectError(Code.INVALID_ARGUMENT, "only data and keepalive events follow the start event")


def _bytes(process: ProcessInfo, wanted: pb.ProcessInput | None) -> bytes:
    """Terminals take `pty`, pipes `stdin`."""
    match wanted.input if wanted is not None else None:
        case Oneof(field=field, value=data) if (field == "pty") == process.pty:
            return data
        case Oneof(field="pty"):
            raise ConnectError(Code.INTERNAL, "the process has no terminal")
        case Oneof():
            raise ConnectError(Code.INTERNAL, "the process has a terminal: send the input as pty")
        case _:
            raise ConnectError(Code.INVALID_ARGUMENT, "input: give stdin or pty")


# ------------------------------------------------------------------------------------------------------------ finding


async def _find(call: Call, wanted: pb.ProcessSelector | None) -> ProcessInfo:
    """The latest with that pid or tag, running or ended."""
    match wanted.selector if wanted is not None else None:
        case Oneof(field="pid", value=pid):
            try:
                return await call.services.processes.get(call.principal, call.sandbox_id, str(pid))
            except SkerryError as error:
                unknown = error.code == "process_not_found"
                raise (_missing(wanted) if unknown else errors.to_connect(error)) from error
        case Oneof(field="tag", value=tag):
            found = await told(call.services.processes.list(call.principal, call.sandbox_id))
            tagged = [process for process in found if process.tag == tag]
            if not tagged:
                raise _missing(wanted)
            return max(tagged, key=lambda process: (process.state is ProcessState.RUNNING, process.started_at_ms))
        case _:
            raise ConnectError(Code.INVALID_ARGUMENT, "process: give a pid or a tag")


async def _find_running(call: Call, wanted: pb.ProcessSelector | None) -> ProcessInfo:
    process = await _find(call, wanted)
    if process.state is not ProcessState.RUNNING:
        raise _missing(wanted)
    return process


def _missing(wanted: pb.ProcessSelector | None) -> ConnectError:
    said = wanted.selector if wanted is not None else None
    what = f"{said.field} {said.value}" if isinstance(said, Oneof) else "that selector"
    return ConnectError(Code.NOT_FOUND, f"process with {what} not found")
