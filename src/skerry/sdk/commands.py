"""Commands: run one and have its result, or start one and hold on to it."""

import base64
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from skerry.core.errors import InvalidRequest, NotFound, SkerryError
from skerry.core.limits import COMMAND_TIMEOUT_MS_DEFAULT
from skerry.sdk import content
from skerry.sdk.client import Call, Connection, items, milliseconds, segment, stream_events
from skerry.sdk.environment import Env, env_body
from skerry.sdk.errors import line_broke
from skerry.sdk.io import STREAM_READ_TIMEOUT, AsyncStream
from skerry.sdk.models import CommandResult, ProcessEvent, ProcessInfo, parse
from skerry.sdk.process import AsyncProcess, Callbacks, OnOutput, tell
from skerry.sdk.transcript import MAX_OUTPUT, Transcript, judge

DEADLINE: Final = COMMAND_TIMEOUT_MS_DEFAULT / 1000

Command = str | Sequence[str]
"""Text for a shell, or the arguments of a program."""


def command_body(
    command: Command,
    cwd: str | os.PathLike[str] | None,
    env: Env | None,
    user: str | int | None,
    timeout: float | None,
) -> dict[str, Any]:
    """The part of a body that `run` and `processes` share."""
    body: dict[str, Any] = {"timeout_ms": None if timeout is None else milliseconds("timeout", timeout)}
    if isinstance(command, str):
        body["command"] = command
    else:
        body["argv"] = [os.fsdecode(argument) for argument in command]
    if cwd is not None:
        body["cwd"] = os.fsdecode(cwd)
    if env:
        body["env"] = env_body(env)
    if user is not None:
        body["user"] = str(user)
    return body


class AsyncCommands:
    """The processes of a sandbox."""

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._sandbox_id = sandbox_id
        self._path = f"/v1/sandboxes/{segment(sandbox_id)}"
        self._about = {"sandbox_id": sandbox_id}

    async def run(
        self,
        command: Command,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Env | None = None,
        user: str | int | None = None,
        timeout: float | None = DEADLINE,
        stdin: str | bytes | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        check: bool = False,
        max_output: int = MAX_OUTPUT,
    ) -> CommandResult:
        """Run a command to its end. A non-zero exit code is a result, unless `check`.

        A text goes to a shell unchanged; a list is a program and its arguments. `timeout` is in seconds (None or 0: no
        deadline). `stdin` is all of standard input (None: it is empty). Callbacks get all text as it comes; the result
        keeps the first `max_output` bytes of each stream. Raises CommandDeadline with what was printed; OutcomeUnknown
        where the line breaks (its context has `process_id` and offsets for `attach`); Gone where the sandbox ended.
        """
        seen = Transcript(limit=max_output)
        callbacks: Callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        call = self._run_call(command_body(command, cwd, env, user, timeout), stdin)
        async with contextlib.aclosing(self._stream(call, seen)) as events:
            async for event in events:
                await tell(self._connection, callbacks, event)
        return judge(seen.outcome(), self._sandbox_id, check=check)

    def stream(
        self,
        command: Command,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Env | None = None,
        user: str | int | None = None,
        timeout: float | None = DEADLINE,
        stdin: str | bytes | None = None,
    ) -> AsyncStream[ProcessEvent]:
        """Run a command and give its events as they come, as exact bytes and as text: `Started`, then `Output` (and
        `Gap`), then `Exited`. A slow reader slows the command; nothing is kept. Raises as `run` does, except that a
        deadline is told by `Exited`."""
        call = self._run_call(command_body(command, cwd, env, user, timeout), stdin)
        return AsyncStream(self._stream(call, Transcript(limit=0)))

    async def start(
        self,
        command: Command,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Env | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        tag: str | None = None,
        pty: tuple[int, int] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> AsyncProcess:
        """Start a command in the background. It has no deadline unless `timeout` (seconds) is given.

        `stdin=True`: an open pipe for `send_stdin`. `pty=(cols, rows)`: a terminal; all it writes is `stdout`.
        """
        body: dict[str, Any] = {**command_body(command, cwd, env, user, timeout), "stdin": stdin}
        if tag is not None:
            body["tag"] = tag
        if pty is not None:
            body["pty"] = {"cols": pty[0], "rows": pty[1]}
        call = Call("POST", f"{self._path}/processes", json=body, about=self._about)
        info = parse(ProcessInfo, await self._connection.send(call))
        return AsyncProcess(self._connection, self._sandbox_id, info.process_id, info.pid, max_output=max_output)

    async def list(self) -> "list[ProcessInfo]":
        """Those that run and those that the guest remembers."""
        call = Call("GET", f"{self._path}/processes", again=True, about=self._about)
        return [parse(ProcessInfo, item) for item in items(await self._connection.send(call))]

    async def get(self, process: str | int) -> ProcessInfo:
        """What the guest says of a process, by its id or by its pid in the guest. Raises NotFound."""
        call = Call("GET", f"{self._path}/processes/{segment(process)}", again=True, about=self._about)
        return parse(ProcessInfo, await self._connection.send(call))

    async def attach(
        self,
        process: str | int,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        max_output: int = MAX_OUTPUT,
    ) -> AsyncProcess:
        """Take hold of a process that was started before, by its id or by its pid in the guest.

        Output is given from the offsets on, as far as the guest still has it. Raises NotFound.
        """
        info = await self.get(process)
        return AsyncProcess(
            self._connection,
            self._sandbox_id,
            info.process_id,
            info.pid,
            stdout_offset=stdout_offset,
            stderr_offset=stderr_offset,
            max_output=max_output,
        )

    async def kill(self, process: str | int) -> bool:
        """SIGKILL to a process and its whole tree. False if it was over or never was."""
        call = Call("DELETE", f"{self._path}/processes/{segment(process)}", again=True, about=self._about)
        try:
            answer = await self._connection.send(call)
        except NotFound as error:
            if error.code == "sandbox_not_found":
                raise
            return False
        return bool(answer and answer.get("killed"))

    # ------------------------------------------------------------------------------------------------------- inside

    def _run_call(self, body: dict[str, Any], stdin: str | bytes | None) -> Call:
        ready = None if stdin is None else content.whole(stdin)
        if ready is not None:
            body["stdin"] = base64.b64encode(ready).decode("ascii")
        elif stdin is not None:
            raise InvalidRequest.of("stdin", "must be text or bytes here; use start(stdin=True) for more")
        body["stream"] = True
        return Call("POST", f"{self._path}/run", json=body, read_timeout=STREAM_READ_TIMEOUT, about=self._about)

    async def _stream(self, call: Call, seen: Transcript) -> AsyncGenerator[ProcessEvent, None]:
        try:
            async with contextlib.aclosing(stream_events(self._connection, call)) as events:
                async for event in events:
                    for new in seen.take(event):
                        yield new
                    if seen.exit is not None:
                        return
            raise line_broke("the command's exit", **self._about)
        except SkerryError as error:
            if seen.process_id:
                error.context = {**self._about, **seen.place, **error.context}
            raise
