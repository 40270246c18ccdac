"""Output as the kernel of the operating system hands it over: what nobody has read yet holds up its writer."""

import asyncio
import codecs
import os
from collections.abc import Iterator
from typing import Final

from skerry.interpreter import events
from skerry.interpreter.events import Event

CHUNK: Final = 65_536


class Pipe:
    """The reading end of one stream, and the text in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fd, self.writer = os.pipe()
        os.set_blocking(self._fd, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = False

    def close_writer(self) -> None:
        """Once it was handed to whoever writes."""
        os.close(self.writer)

    async def readable(self) -> None:
        """Returns when there is something to read; never after the end."""
        if self._ended:
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self._fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)

    def read(self) -> Event | None:
        """What is there now, at most 64 KiB of it; None if there is nothing."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return None
        self._ended = self._ended or not data
        text = self._decoder.decode(data)
        if text:
            return events.output(self.name, text)
        return self.read() if data else None  # the beginning of a character

    def drain(self) -> Iterator[Event]:
        """All that is there now."""
        while (event := self.read()) is not None:
            yield event

    def close(self) -> None:
        if self._fd >= 0:  # the number may be another's by now
            os.close(self._fd)
            self._fd = -1


async def first_readable(*pipes: Pipe) -> None:
    """Returns when any of them has something."""
    waits = [asyncio.ensure_future(pipe.readable()) for pipe in pipes]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
