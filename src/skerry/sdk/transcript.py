"""What a process wrote and how it ended, put together from the events of a stream. Pure."""

import base64
from collections.abc import Mapping
from typing import Any, Final

from skerry.sdk.errors import CommandDeadline, CommandFailed, bad_answer
from skerry.sdk.models import CommandResult, Exited, ExitInfo, Gap, Output, ProcessEvent, Started, parse
from skerry.sdk.text import Capture

MAX_OUTPUT: Final = 64 * 1024 * 1024
"""Bytes of each stream that a result keeps, unless told otherwise."""


class Transcript:
    """Takes the events of one process, across however many streams they came in."""

    def __init__(self, process_id: str = "", pid: int = 0, *, limit: int = MAX_OUTPUT) -> None:
        self.process_id = process_id
        self.pid = pid
        self._limit = limit
        self.streams = {"stdout": Capture(limit), "stderr": Capture(limit)}
        self.exit: ExitInfo | None = None

    def start_at(self, stdout_offset: int, stderr_offset: int) -> None:
        self.streams = {"stdout": Capture(self._limit, stdout_offset), "stderr": Capture(self._limit, stderr_offset)}

    def take(self, event: Mapping[str, Any]) -> list[ProcessEvent]:
        """An event of the interface, as what is new in it. Raises InternalError `bad_answer`."""
        try:
            return self._take(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise bad_answer("an event of the stream has the wrong form", process_id=self.process_id) from None

    def _take(self, event: Mapping[str, Any]) -> list[ProcessEvent]:
        kind = event["type"]
        if kind in self.streams:
            stream = self.streams[kind]
            data, text = stream.feed(event["offset"], base64.b64decode(event["data"], validate=True))
            return [Output(kind, stream.offset - len(data), data, text)] if data or text else []
        if kind == "gap":
            stream = self.streams[event["stream"]]
            text = stream.gap(event["offset"] + event["missed"])
            lead: list[ProcessEvent] = [Output(event["stream"], event["offset"], b"", text)] if text else []
            return [*lead, Gap(event["stream"], event["offset"], event["missed"])]
        if kind == "started":
            known = bool(self.process_id)
            self.process_id, self.pid = str(event["process_id"]), int(event["pid"])
            return [] if known else [Started(self.process_id, self.pid)]
        if kind == "exit":
            self.exit = parse(ExitInfo, event)
            rest = [(name, stream, stream.flush()) for name, stream in self.streams.items()]
            return [*(Output(n, s.offset, b"", text) for n, s, text in rest if text), Exited(self.exit)]
        return []

    def outcome(self) -> CommandResult:
        """The result. Raises InternalError `bad_answer` where there was no exit."""
        if self.exit is None:
            raise bad_answer("a stream ended without an exit", process_id=self.process_id)
        return self.result(self.exit)

    def result(self, ended: ExitInfo) -> CommandResult:
        out, err = self.streams["stdout"], self.streams["stderr"]
        return CommandResult(
            process_id=self.process_id,
            pid=self.pid,
            reason=ended.reason,
            exit_code=ended.exit_code,
            signal=ended.signal,
            duration=ended.duration_ms / 1000,
            stdout_bytes=out.data,
            stderr_bytes=err.data,
            stdout_truncated=out.truncated,
            stderr_truncated=err.truncated,
        )

    @property
    def place(self) -> dict[str, Any]:
        """What an error must say for the process to be taken up again."""
        return {
            "process_id": self.process_id or None,
            "stdout_offset": self.streams["stdout"].offset,
            "stderr_offset": self.streams["stderr"].offset,
        }


def judge(result: CommandResult, sandbox_id: str, *, check: bool) -> CommandResult:
    """The result, or the error that it is. Raises CommandDeadline, and with `check` CommandFailed."""
    context = {"sandbox_id": sandbox_id, "process_id": result.process_id}
    if result.reason == "deadline":
        raise CommandDeadline(
            f"the command reached its deadline after {result.duration:.1f} s and was stopped", result=result, **context
        )
    if check and not result.ok:
        how = f"ended by {result.signal}" if result.signal else f"ended with exit code {result.exit_code}"
        tail = result.stderr.strip()[-500:]
        raise CommandFailed(f"the command {how}" + (f": {tail}" if tail else ""), result=result, **context)
    return result
