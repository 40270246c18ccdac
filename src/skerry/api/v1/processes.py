"""Commands in a sandbox: run (blocking or streaming), start, list, attach, signal, input, size."""

import base64
import binascii
import time
from collections.abc import AsyncIterator
from typing import Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, requests, schemas, wire
from skerry.api.schemas_env import parted
from skerry.api.streams import EventStream, Line, Owned, attended, hung_up, server_stops
from skerry.api.v1.access import metrics_of, principal_of, services_of
from skerry.control import Principal, Services
from skerry.core import ids
from skerry.core.errors import Conflict, InvalidRequest, SkerryError
from skerry.core.models import Bindings, Exited, Gap, ProcessSpec, PtySize
from skerry.node.contract import ProcessStream

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["processes"])
log = structlog.get_logger("skerry.api")

FEED_BYTES: Final = 65_536


def spec_of(wanted: schemas.Command, *, timeout_ms: int | None, **more: object) -> tuple[ProcessSpec, Bindings]:
    """The process that a body asks for, and the secrets that it is to get.

    Raises InvalidRequest unless exactly one of argv and command is there."""
    if (wanted.argv is None) == (wanted.command is None):
        raise InvalidRequest.of("command", "give exactly one of the two", allowed="argv or command")
    env, secrets = parted(wanted.env)
    spec = ProcessSpec(
        process_id=ids.new_id(ids.PROCESS),
        argv=tuple(wanted.argv) if wanted.argv is not None else None,
        shell=wanted.command,
        cwd=wanted.cwd,
        env=env,
        user=wanted.user,
        timeout_ms=timeout_ms or None,
        **more,  # pyright: ignore[reportArgumentType]
    )
    return spec, secrets


# --------------------------------------------------------------------------------------------------------------- run


async def run(request: Request) -> Response:
    began = time.perf_counter()
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.RunCommand)
    if wanted.stream and wanted.max_output_bytes is not None:
        raise InvalidRequest.of(
            "max_output_bytes", "belongs to the blocking form; a stream has no such limit", allowed="none"
        )
    fed = _input(wanted.stdin)
    spec, secrets = spec_of(wanted, timeout_ms=wanted.timeout_ms, stdin=fed is not None)
    sandbox_id: str = request.path_params["sandbox_id"]
    services = services_of(request)
    stream = await services.processes.start(principal, sandbox_id, spec, secrets)
    metrics_of(request).start_seconds.observe(time.perf_counter() - began)
    if fed is not None:
        owned: Owned = request.app.state.owned
        owned.add(_feed(services, principal, sandbox_id, stream.process.process_id, fed))
    if wanted.stream:
        return EventStream(request, lines_of(stream))
    limit = schemas.OUTPUT_BYTES_DEFAULT if wanted.max_output_bytes is None else wanted.max_output_bytes
    result = _Collected(stream, limit)
    try:
        await attended(result.read(), hung_up(request.receive), server_stops(request.app.state.stopping))
    finally:
        await stream.aclose()
    metrics_of(request).run_seconds.observe(time.perf_counter() - began)
    return wire.Json(result.document())


def _input(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest.of("stdin", "is not base64", allowed="base64 with its padding") from None


async def _feed(services: Services, principal: Principal, sandbox_id: str, process_id: str, data: bytes) -> None:
    """Give a process all of its input and the end of it. One that ends or closes before has had enough: no error."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), FEED_BYTES):
            yield data[start : start + FEED_BYTES]

    try:
        if data:
            await services.processes.write_stdin(principal, sandbox_id, process_id, pieces())
        await services.processes.close_stdin(principal, sandbox_id, process_id)
    except Conflict:
        return
    except SkerryError as error:
        log.warning("input was not delivered", sandbox_id=sandbox_id, process_id=process_id, code=error.code)


class _Collected:
    """A process's output up to `limit` bytes for each stream, and its exit. What is beyond is read and dropped."""

    def __init__(self, stream: ProcessStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._exit: Exited | None = None
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._cut = {"stdout": False, "stderr": False}

    async def read(self) -> None:
        async for event in self._stream:
            if isinstance(event, Exited):
                self._exit = event
                return
            name = wire.stream_name(event.stream)
            if isinstance(event, Gap):
                self._cut[name] = True
                continue
            kept = self._kept[name]
            room = self._limit - len(kept)
            if len(event.data) > room:
                self._cut[name] = True
            if room > 0:
                kept += event.data[:room]

    def document(self) -> dict[str, object]:
        if self._exit is None:
            raise RuntimeError("the stream ended without an exit and without an error")
        stdout, stdout_base64 = _text(bytes(self._kept["stdout"]))
        stderr, stderr_base64 = _text(bytes(self._kept["stderr"]))
        return {
            "process_id": self._stream.process.process_id,
            "pid": self._stream.process.pid,
            **wire.exit_status(self._exit.status),
            "stdout": stdout,
            "stderr": stderr,
            "stdout_base64": stdout_base64,
            "stderr_base64": stderr_base64,
            "stdout_truncated": self._cut["stdout"],
            "stderr_truncated": self._cut["stderr"],
        }


def _text(data: bytes) -> tuple[str, str | None]:
    """Output as text, and the exact bytes as base64 where the text is not they."""
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), base64.b64encode(data).decode("ascii")


async def lines_of(stream: ProcessStream) -> AsyncIterator[Line]:
    """The stream as lines. Closing them closes the stream, never the process."""
    try:
        yield "started", wire.dumps(wire.started(stream.process))
        async for event in stream:
            yield wire.process_event(event)
            if isinstance(event, Exited):
                return
        raise RuntimeError("the stream ended without an exit and without an error")
    finally:
        await stream.aclose()


# ---------------------------------------------------------------------------------------------------------- processes


async def start(request: Request) -> Response:
    began = time.perf_counter()
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.StartProcess)
    spec, secrets = spec_of(
        wanted,
        timeout_ms=wanted.timeout_ms,
        stdin=wanted.stdin,
        pty=PtySize(wanted.pty.cols, wanted.pty.rows) if wanted.pty else None,
        tag=wanted.tag,
        background=True,
    )
    stream = await services_of(request).processes.start(principal, request.path_params["sandbox_id"], spec, secrets)
    metrics_of(request).start_seconds.observe(time.perf_counter() - began)
    await stream.aclose()
    return wire.Json(wire.process(stream.process), 201)


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).processes.list(principal, request.path_params["sandbox_id"])
    return wire.Json({"items": [wire.process(info) for info in found]})


async def get(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).processes.get(principal, *_target(request))
    return wire.Json(wire.process(found))


def _target(request: Request) -> tuple[str, str]:
    return request.path_params["sandbox_id"], request.path_params["process"]


async def output(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.OutputQuery)
    stream = await services_of(request).processes.attach(
        principal,
        *_target(request),
        stdout_offset=asked.stdout_offset,
        stderr_offset=asked.stderr_offset,
        follow=asked.follow,
    )
    return EventStream(request, lines_of(stream) if asked.follow else _present_lines(stream))


async def _present_lines(stream: ProcessStream) -> AsyncIterator[Line]:
    """What is there now: up to the exit if there was one, else to where the stream, not followed, ends."""
    try:
        yield "started", wire.dumps(wire.started(stream.process))
        async for event in stream:
            yield wire.process_event(event)
        yield "end", '{"type":"end"}'
    finally:
        await stream.aclose()


async def signal(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.SendSignal)
    await services_of(request).processes.signal(principal, *_target(request), wanted.signal)
    return Response(status_code=204)


async def kill(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    killed = await services_of(request).processes.kill(principal, *_target(request))
    return wire.Json({"killed": killed})


async def write_stdin(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    data = requests.body_stream(request)
    written = await services_of(request).processes.write_stdin(principal, *_target(request), data)
    return wire.Json({"written": written})


async def close_stdin(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    await services_of(request).processes.close_stdin(principal, *_target(request))
    return Response(status_code=204)


async def resize(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, schemas.PtyBody)
    size = PtySize(wanted.cols, wanted.rows)
    await services_of(request).processes.resize(principal, *_target(request), size)
    return Response(status_code=204)


operations.add(
    router,
    "POST",
    "/run",
    run,
    summary="Run a command to its end",
    answers={
        200: operations.Content(
            ("application/json", *operations.NDJSON.media),
            {"anyOf": [operations.inline_schema(schemas.RunResult), {"type": "string"}]},
        )
    },
    errors=operations.SANDBOX,
    body=schemas.RunCommand,
)
operations.add(
    router,
    "POST",
    "/processes",
    start,
    summary="Start a process in the background",
    answers={201: schemas.ProcessView},
    errors=operations.SANDBOX,
    body=schemas.StartProcess,
)
operations.add(
    router,
    "GET",
    "/processes",
    list_,
    summary="Processes that run, and those the guest remembers",
    answers={200: schemas.ProcessList},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "GET",
    "/processes/{process}",
    get,
    summary="One process",
    answers={200: schemas.ProcessView},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "GET",
    "/processes/{process}/output",
    output,
    summary="Its output from an offset on, and its exit",
    answers={200: operations.NDJSON},
    errors=operations.SANDBOX,
    query=schemas.OutputQuery,
)
operations.add(
    router,
    "POST",
    "/processes/{process}/signal",
    signal,
    summary="Signal its process group",
    answers={204: None},
    errors=operations.SANDBOX,
    body=schemas.SendSignal,
)
operations.add(
    router,
    "DELETE",
    "/processes/{process}",
    kill,
    summary="Kill its whole tree",
    answers={200: schemas.Killed},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "POST",
    "/processes/{process}/stdin",
    write_stdin,
    summary="Feed its standard input with the body's bytes",
    answers={200: schemas.Written},
    errors=operations.SANDBOX,
    raw_body=True,
)
operations.add(
    router,
    "DELETE",
    "/processes/{process}/stdin",
    close_stdin,
    summary="Close its standard input",
    answers={204: None},
    errors=operations.SANDBOX,
)
operations.add(
    router,
    "POST",
    "/processes/{process}/resize",
    resize,
    summary="Tell a terminal its size",
    answers={204: None},
    errors=operations.SANDBOX,
    body=schemas.PtyBody,
)
