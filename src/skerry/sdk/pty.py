"""A terminal in a sandbox, over a WebSocket: bytes both ways."""

import json
from collections.abc import AsyncIterator
from typing import Any

from websockets.exceptions import ConnectionClosed

from skerry.sdk.client import Connection, Query, let_go
from skerry.sdk.errors import bad_answer, from_problem, line_broke
from skerry.sdk.io import Socket
from skerry.sdk.models import ExitInfo, parse
from skerry.sdk.process import AsyncProcess

START_TIMEOUT = 30.0
"""Seconds for the guest to start the shell."""


class AsyncPty:
    """An open terminal. Leaving its `with` block kills what runs in it, unless it was attached to."""

    def __init__(self, connection: Connection, sandbox_id: str, *, kill_on_exit: bool) -> None:
        self._connection = connection
        self._about: dict[str, Any] = {"sandbox_id": sandbox_id}
        self._socket: Socket | None = None
        self._kill_on_exit = kill_on_exit
        self._early: list[bytes] = []
        self._process: AsyncProcess | None = None
        self.exit: ExitInfo | None = None
        """How it ended, once that was received."""

    async def open(self, path: str, query: Query) -> "AsyncPty":
        """Connect, and wait until the process has started."""
        self._socket = await self._connection.socket(path, query, self._about)
        try:
            while self._process is None:
                data = await self._next(START_TIMEOUT)
                if data:
                    self._early.append(data)
                elif data is None:
                    break
        except BaseException:
            await self._socket.aclose()
            raise
        if self._process is None:
            await self._socket.aclose()
            raise bad_answer("a terminal ended before it started", **self._about)
        return self

    @property
    def process(self) -> AsyncProcess:
        """The process in it."""
        if self._process is None:
            raise bad_answer("a terminal has not started", **self._about)
        return self._process

    async def send(self, data: str | bytes) -> None:
        """Type. Raises OutcomeUnknown where the line is broken."""
        await self._write(data.encode() if isinstance(data, str) else bytes(data))

    async def resize(self, cols: int, rows: int) -> None:
        await self._write(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    async def recv(self, timeout: float | None = None) -> bytes | None:
        """The next bytes of the screen, None once the process has ended (`exit` then says how).

        TimeoutError after `timeout` seconds, with nothing lost. Raises OutcomeUnknown where the line breaks.
        """
        if self._early:
            return self._early.pop(0)
        while self.exit is None:
            data = await self._next(timeout)
            if data or data is None:
                return data
        return None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read()

    async def _read(self) -> AsyncIterator[bytes]:
        while (data := await self.recv()) is not None:
            yield data

    async def wait(self) -> ExitInfo:
        """Read, and forget, all output to the end."""
        while await self.recv() is not None:
            pass
        if self.exit is None:
            raise line_broke("the terminal's exit", **self._about)
        return self.exit

    async def aclose(self) -> None:
        """Close the line. What runs in the terminal runs on. May be called twice."""
        if self._socket is not None:
            await self._socket.aclose()

    async def __aenter__(self) -> "AsyncPty":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._kill_on_exit and self.exit is None:
                await let_go(self.process.kill, raising=kind is None)
        finally:
            await self.aclose()

    # ------------------------------------------------------------------------------------------------------- inside

    async def _write(self, message: str | bytes) -> None:
        if self._socket is None:
            raise line_broke("it was open", **self._about)
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            raise line_broke(f"all was sent: {error}", **self._about) from error

    async def _next(self, timeout: float | None) -> bytes | None:
        """One message: bytes, b"" for what is no output, None at the end."""
        if self._socket is None:
            raise line_broke("it was open", **self._about)
        try:
            message = await self._socket.recv(timeout)
        except ConnectionClosed as error:
            raise line_broke(f"the terminal's exit: {error}", **self._about) from error
        if isinstance(message, bytes):
            return message
        try:
            event = json.loads(message)
            kind = event["type"]
            if kind == "started":
                process_id = str(event["process_id"])
                self._process = AsyncProcess(self._connection, self._about["sandbox_id"], process_id, int(event["pid"]))
                self._about["process_id"] = process_id
        except (ValueError, KeyError, TypeError):
            raise bad_answer("a message of the terminal has the wrong form", **self._about) from None
        if kind == "error":
            raise from_problem(event.get("error"), 500)
        if kind == "exit":
            self.exit = parse(ExitInfo, event)
            return None
        return b""
