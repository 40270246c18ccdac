"""A terminal over a WebSocket: binary frames are bytes both ways, text frames are JSON.

Whatever goes wrong before the terminal exists refuses the handshake with a problem and its status.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import structlog
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.api import observe, problems, requests, schemas, wire
from skerry.api.problems import ClientGone
from skerry.api.requests import request_id_of
from skerry.api.schemas_env import Env, parted
from skerry.api.streams import attended, server_stops
from skerry.api.v1.access import principal_of, services_of
from skerry.control import Principal, Services
from skerry.core import ids
from skerry.core.errors import Conflict, InvalidRequest, SkerryError
from skerry.core.models import NO_SECRETS, Bindings, Exited, Output, ProcessSpec, PtySize
from skerry.node.contract import ProcessStream

router = APIRouter(tags=["pty"])
log = structlog.get_logger("skerry.api")

INPUT_QUEUE = 64
"""Frames of input that wait for the guest; beyond them the client is held."""

CLOSED_BASE = 4000 - 400


@router.websocket("/v1/sandboxes/{sandbox_id}/pty")
async def pty(socket: WebSocket) -> None:
    try:
        principal = await principal_of(socket)
        asked = requests.query(socket, schemas.PtyQuery)
        sandbox_id: str = socket.path_params["sandbox_id"]
        stream = await _open(services_of(socket), principal, sandbox_id, asked)
    except SkerryError as error:
        await observe.deny(problems.response(error, request_id_of(socket)), socket.send)
        return
    try:
        await socket.accept()
        await _Terminal(socket, services_of(socket), principal, sandbox_id, stream).serve()
    finally:
        await stream.aclose()


async def _open(services: Services, principal: Principal, sandbox_id: str, asked: schemas.PtyQuery) -> ProcessStream:
    if asked.process is not None:
        for name in ("command", "cwd", "user", "env"):
            if getattr(asked, name) is not None:
                raise InvalidRequest.of(name, "does not go with process: that one runs already", allowed="none")
        stream = await services.processes.attach(
            principal, sandbox_id, asked.process, stdout_offset=asked.stdout_offset, stderr_offset=0
        )
        if not stream.process.pty:
            await stream.aclose()
            raise Conflict("that process has no terminal", code="not_a_pty", process_id=asked.process)
        return stream
    if asked.stdout_offset:
        raise InvalidRequest.of("stdout_offset", "goes with process only", given=asked.stdout_offset, allowed=0)
    env, secrets = _environment(asked.env)
    login = ("/bin/sh", "-c", 'exec "$(command -v bash || command -v sh)" -l') if asked.command is None else None
    spec = ProcessSpec(
        process_id=ids.new_id(ids.PROCESS),
        argv=login,
        shell=asked.command,
        cwd=asked.cwd,
        env=env,
        user=asked.user,
        pty=PtySize(asked.cols, asked.rows),
        background=True,
    )
    return await services.processes.start(principal, sandbox_id, spec, secrets)


class _Environment(schemas.Strict):
    env: Env


def _environment(text: str | None) -> tuple[dict[str, str], Bindings]:
    if text is None:
        return {}, NO_SECRETS
    try:
        found = requests.parse_json(text.encode("utf-8"))
    except (InvalidRequest, UnicodeEncodeError):
        raise InvalidRequest.of("env", "must be a JSON object", allowed="object") from None
    return parted(requests.validate(_Environment, {"env": found}).env)


class _Terminal:
    """One socket and one process, until the process exits or the client leaves."""

    def __init__(
        self, socket: WebSocket, services: Services, principal: Principal, sandbox_id: str, stream: ProcessStream
    ) -> None:
        self._socket = socket
        self._services = services
        self._principal = principal
        self._target = (sandbox_id, stream.process.process_id)
        self._stream = stream
        self._input: asyncio.Queue[bytes] = asyncio.Queue(INPUT_QUEUE)

    async def serve(self) -> None:
        stop: asyncio.Event = self._socket.app.state.stopping
        try:
            await attended(self._write(), self._read(), self._feed(), server_stops(stop))
        except (ClientGone, WebSocketDisconnect):
            return
        except SkerryError as error:
            await self._fail(error)
        except Exception:
            log.exception("terminal failed", request_id=request_id_of(self._socket))
            await self._fail(problems.unexpected())

    async def _write(self) -> None:
        """From the guest to the client; ends the socket after the exit."""
        await self._socket.send_text(wire.dumps(wire.started(self._stream.process)))
        async for event in self._stream:
            if isinstance(event, Output):
                await self._socket.send_bytes(event.data)
                continue
            await self._socket.send_text(wire.process_event(event)[1])
            if isinstance(event, Exited):
                await self._socket.close(1000)
                return
        raise RuntimeError("the stream ended without an exit and without an error")

    async def _read(self) -> None:
        """From the client: bytes to the queue of input, sizes to the terminal."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise ClientGone("the client hung up")
            if message.get("bytes") is not None:
                if message["bytes"]:
                    await self._input.put(message["bytes"])
            else:
                await self._unless_over(self._control(message.get("text") or ""))

    async def _control(self, text: str) -> None:
        try:
            message = json.loads(text)
        except ValueError:
            raise InvalidRequest("a text frame is not JSON", code="malformed_json") from None
        if not isinstance(message, dict) or message.pop("type", None) != "resize":
            raise InvalidRequest.of("type", "is not known here", allowed="resize")
        size = requests.validate(schemas.PtyBody, message)
        await self._services.processes.resize(self._principal, *self._target, PtySize(size.cols, size.rows))

    async def _feed(self) -> None:
        """From the queue into the guest, over one open line for as long as the socket lives."""
        await self._unless_over(self._services.processes.write_stdin(self._principal, *self._target, self._pieces()))
        await asyncio.Event().wait()  # The input is over, the output is not: `_write` ends the terminal.

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._input.get()

    async def _unless_over(self, work: Coroutine[Any, Any, object]) -> None:
        """Typing into a process that has just ended is no error: its exit is on the way."""
        try:
            await work
        except Conflict as error:
            if error.code not in {"process_exited", "stdin_closed"}:
                raise

    async def _fail(self, error: SkerryError) -> None:
        document = problems.document(error, request_id_of(self._socket))
        await self._socket.send_text(wire.dumps({"type": "error", "error": document}))
        await self._socket.close(CLOSED_BASE + error.status, error.code)
