"""A process in a sandbox, held by the client."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final

from skerry.core.errors import GuestUnreachable, OutcomeUnknown, Unavailable
from skerry.sdk import content
from skerry.sdk.client import Call, Connection, segment, stream_events
from skerry.sdk.content import Content
from skerry.sdk.errors import line_broke
from skerry.sdk.io import STREAM_READ_TIMEOUT, AsyncStream
from skerry.sdk.models import CommandResult, Output, ProcessEvent, ProcessInfo, parse
from skerry.sdk.transcript import MAX_OUTPUT, Transcript, judge

REATTACH: Final = 6
"""How often in a row a broken stream of a process is taken up again before that is an error."""
REATTACH_BACKOFF: Final = 0.1
"""Seconds, doubled before each of them: about 13 in all, in which a server may restart."""

OnOutput = Callable[[str], Any]
"""Gets text as it comes. With the asynchronous client it may be asynchronous."""
Callbacks = Mapping[str, OnOutput | None]

OCTETS: Final = {"Content-Type": "application/octet-stream"}


async def tell(connection: Connection, callbacks: Callbacks, event: ProcessEvent) -> None:
    """Give an event's text to the callback of its stream."""
    if isinstance(event, Output) and event.text:
        callback = callbacks.get(event.stream)
        if callback is not None:
            await connection.io.notify(callback, event.text)


class AsyncProcess:
    """A process in a sandbox. It runs on whether or not anybody holds this.

    What it wrote is kept here as far as it was received: by iterating, by `wait`, or by `poll`.
    """

    def __init__(
        self,
        connection: Connection,
        sandbox_id: str,
        process_id: str,
        pid: int,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        self._connection = connection
        self._sandbox_id = sandbox_id
        self._path = f"/v1/sandboxes/{segment(sandbox_id)}/processes/{segment(process_id)}"
        self._about = {"sandbox_id": sandbox_id, "process_id": process_id}
        self._seen = Transcript(process_id, pid, limit=max_output)
        self._seen.start_at(stdout_offset, stderr_offset)
        self.process_id = process_id
        """For `commands.attach`."""
        self.pid = pid
        """In the guest."""

    @property
    def stdout(self) -> str:
        """What was received of it so far, as text."""
        return self._seen.streams["stdout"].text

    @property
    def stderr(self) -> str:
        return self._seen.streams["stderr"].text

    @property
    def stdout_bytes(self) -> bytes:
        return self._seen.streams["stdout"].data

    @property
    def stderr_bytes(self) -> bytes:
        return self._seen.streams["stderr"].data

    @property
    def stdout_offset(self) -> int:
        """Where the next byte stands: what `commands.attach` takes to go on from here."""
        return self._seen.streams["stdout"].offset

    @property
    def stderr_offset(self) -> int:
        return self._seen.streams["stderr"].offset

    @property
    def result(self) -> CommandResult | None:
        """How it ended, once that was received; None before."""
        return self._seen.result(self._seen.exit) if self._seen.exit else None

    async def info(self) -> ProcessInfo:
        """What the guest says of it now."""
        return parse(ProcessInfo, await self._send("GET", again=True))

    def events(self) -> AsyncStream[ProcessEvent]:
        """Its output from where this object stands, to its exit. The last event is `Exited`.

        A stream that breaks is taken up again where it broke. Raises OutcomeUnknown or Unavailable where that fails
        several times in a row, Gone where the sandbox ended.
        """
        return AsyncStream(self._events(follow=True))

    def __aiter__(self) -> AsyncIterator[ProcessEvent]:
        return self.events()

    async def wait(
        self, *, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None, check: bool = False
    ) -> CommandResult:
        """Read to its end. Raises CommandDeadline, and with `check` CommandFailed. May be called again."""
        if self._seen.exit is None:
            callbacks: Callbacks = {"stdout": on_stdout, "stderr": on_stderr}
            async with self.events() as events:
                async for event in events:
                    await tell(self._connection, callbacks, event)
        return judge(self._seen.outcome(), self._sandbox_id, check=check)

    async def poll(self) -> CommandResult | None:
        """Receive what it wrote until now. Its result if it is over, else None."""
        async for _ in self._events(follow=False):
            pass
        return self.result

    async def signal(self, signal: str | int) -> None:
        """Send a signal, such as "SIGINT", to its process group."""
        await self._send("POST", "/signal", json={"signal": str(signal)})

    async def kill(self) -> bool:
        """SIGKILL to its whole tree. False if it was over."""
        answer = await self._send("DELETE", again=True)
        return bool(answer and answer.get("killed"))

    async def send_stdin(self, data: Content) -> int:
        """Write to its standard input; returns once the process's pipe took all of it. The count of bytes."""
        body = content.body(self._connection.io, data)
        answer = await self._send("POST", "/stdin", content=body, headers=OCTETS)
        return int((answer or {}).get("written", 0))

    async def close_stdin(self) -> None:
        """The process reads end of file. May be repeated."""
        await self._send("DELETE", "/stdin")

    async def resize(self, cols: int, rows: int) -> None:
        """Of a process that was started with a terminal."""
        await self._send("POST", "/resize", json={"cols": cols, "rows": rows})

    # ------------------------------------------------------------------------------------------------------- inside

    async def _send(self, method: str, path: str = "", **options: Any) -> Any:
        return await self._connection.send(Call(method, self._path + path, about=self._about, **options))

    async def _events(self, *, follow: bool) -> AsyncGenerator[ProcessEvent, None]:
        failures = 0
        while self._seen.exit is None:
            before = self._seen.place
            try:
                async with contextlib.aclosing(self._once(follow=follow)) as events:
                    async for event in events:
                        yield event
            except (OutcomeUnknown, Unavailable, GuestUnreachable):
                failures = 1 if self._seen.place != before else failures + 1
                if failures > REATTACH:
                    raise
                await self._connection.io.sleep(REATTACH_BACKOFF * 2**failures)
            else:
                return

    async def _once(self, *, follow: bool) -> AsyncGenerator[ProcessEvent, None]:
        place = self._seen.place
        query = {k: place[k] for k in ("stdout_offset", "stderr_offset")} | ({} if follow else {"follow": False})
        call = Call(
            "GET", f"{self._path}/output", query, again=True, read_timeout=STREAM_READ_TIMEOUT, about=self._about
        )
        async with contextlib.aclosing(stream_events(self._connection, call)) as events:
            async for event in events:
                if event.get("type") == "end":
                    return
                for new in self._seen.take(event):
                    yield new
                if self._seen.exit is not None:
                    return
        raise line_broke("the process's exit", **{**self._about, **self._seen.place})
