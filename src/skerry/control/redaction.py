"""Taking the secrets that a sandbox was given out of what comes from it: output, errors, records."""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final

from skerry.control.live import Live
from skerry.core.errors import InvalidRequest, SkerryError
from skerry.core.models import Exited, Gap, Output, ProcessEvent, ProcessInfo, Stream
from skerry.core.redact import RedactedStream, Redactor

HOLD_S: Final = 0.025
"""So long may what is held back wait for what tells whether it belongs to a secret. A byte that comes while another
waits may have its turn after that one: none waits for more than twice as long."""
_CLIPPED: Final = re.compile(r"…( \(\d+ [a-z]+\))?\Z")
"""What is put where a text was cut."""


Source = Callable[[], Coroutine[Any, Any, ProcessEvent]]


class Redaction:
    """The events of one process as its readers may have them. Positions stay what they are.

    A stream is read on while a few bytes of it are held back, so that they come out when their time is up: the task
    that does it is this object's, which must be closed.
    """

    def __init__(self, live: Live, redactor: Redactor, begins: Mapping[Stream, int]) -> None:
        """`begins`: what comes before it in a stream is only looked at, not given."""
        self._live = live
        self._redactor = redactor
        self._begins = begins
        self._streams: dict[Stream, _Place] = {}
        self._ready: deque[ProcessEvent] = deque()
        self._reading: asyncio.Task[ProcessEvent] | None = None
        self._over: BaseException | None = None

    async def next(self, source: Source) -> ProcessEvent:
        """The next event that there is something of. What `source` raises comes after all that was held back."""
        while True:
            self._flush(asyncio.get_running_loop().time())
            if self._ready:
                return self._ready.popleft()
            if self._over is not None:
                raise self._over
            event = await self._read(source)
            if event is not None:
                self.take(event)

    async def _read(self, source: Source) -> ProcessEvent | None:
        """What comes next; None where what is held back must not wait any longer, or at the end."""
        due = min((place.due for place in self._streams.values() if place.due is not None), default=None)
        try:
            if due is None and self._reading is None:
                return await source()
            if self._reading is None:
                self._reading = asyncio.create_task(source())
            wait = None if due is None else max(0.0, due - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait({self._reading}, timeout=wait)
            if not done:
                return None
            reading, self._reading = self._reading, None
            return reading.result()
        except (SkerryError, StopAsyncIteration) as error:
            self._over = error
            for stream, place in self._streams.items():  # not the process's end: another reader may get the rest
                self._give(stream, place, place.text.flush(early=True))
            return None

    def take(self, event: ProcessEvent) -> None:
        """Sort one in."""
        if self._live.redactor is not None and self._live.redactor is not self._redactor:
            self._redactor = self._live.redactor
            for place in self._streams.values():
                place.text.widen(self._redactor)
        if isinstance(event, Exited):
            for stream, place in self._streams.items():
                self._give(stream, place, place.text.flush())
            self._ready.append(event)
        elif isinstance(event, Gap):
            place = self._streams.pop(event.stream, None)
            if place is not None:
                self._give(event.stream, place, place.text.flush(early=True))
            self._ready.append(event)
        else:
            place = self._streams.get(event.stream)
            if place is None:
                place = self._streams[event.stream] = _Place(self._redactor.stream(), event.offset)
            self._give(event.stream, place, place.text.feed(event.data))

    def _flush(self, now: float) -> None:
        for stream, place in self._streams.items():
            if place.text.held == 0:
                place.due = None
            elif place.due is None or place.at >= place.waiting:
                place.due, place.waiting = now + HOLD_S, place.at + place.text.held
            elif place.due <= now:
                self._give(stream, place, place.text.flush(early=True))
                place.due = None

    def _give(self, stream: Stream, place: "_Place", data: bytes) -> None:
        at, place.at = place.at, place.at + len(data)
        skip = max(0, self._begins.get(stream, 0) - at)
        if skip < len(data):
            self._ready.append(Output(stream, at + skip, data[skip:]))

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()  # it has been seen
            self._reading = None


class _Place:
    """Where one stream is."""

    __slots__ = ("at", "due", "text", "waiting")

    def __init__(self, text: RedactedStream, at: int) -> None:
        self.text = text
        self.at = at
        """The offset of what is given next."""
        self.due: float | None = None
        """When what is held back before the offset `waiting` is to be given, on the loop's clock."""
        self.waiting = 0


# ------------------------------------------------------------------------------------------------------------ the rest


def clean(value: Any, redactor: Redactor) -> Any:
    """A value of an error or a record, whose texts may have been cut."""
    if isinstance(value, str):
        cut = _CLIPPED.search(value)
        return redactor.text(value) if cut is None else redactor.text(value[: cut.start()]) + cut[0]
    if isinstance(value, Mapping):
        return {clean(key, redactor): clean(each, redactor) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(clean(each, redactor) for each in value)
    return value


def clean_error(error: SkerryError, redactor: Redactor | None) -> SkerryError:
    """The same error, without secrets."""
    if redactor is None:
        return error
    error.message = clean(error.message, redactor)
    error.args = (error.message,)
    error.context = clean(error.context, redactor)
    if isinstance(error, InvalidRequest):
        error.problems = tuple(
            replace(
                p, field=clean(p.field, redactor), message=clean(p.message, redactor), given=clean(p.given, redactor)
            )
            for p in error.problems
        )
    return error


def clean_process(info: ProcessInfo, redactor: Redactor | None) -> ProcessInfo:
    """As lists and streams show it."""
    if redactor is None:
        return info
    texts = {name: clean(getattr(info, name), redactor) for name in ("argv", "cwd", "user", "tag", "env")}
    return replace(info, **texts)
