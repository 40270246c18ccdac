"""Sending bytes while listening: the agent may refuse in the middle, and the sender must not be the last to know."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from skerry.core.errors import SkerryError
from skerry.guest import protocol
from skerry.node.guestlink.channel import Channel

_LAST_WORD_S = 5.0


class _SourceFailed(Exception):
    """What was to be sent did not come."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def upload(channel: Channel, data: AsyncIterator[bytes], answer_s: float) -> Any:
    """Send all of `data` and END; returns the OK frame's JSON, raises what an ERROR frame says.

    An exception of `data` itself goes through; the agent then drops what it has, as END never comes."""
    answer = asyncio.create_task(channel.frame())
    feed = asyncio.create_task(_feed(channel, data))
    try:
        await asyncio.wait({answer, feed}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await _fed(answer, feed, channel, answer_s)
        kind, payload = answer.result()
        if kind != protocol.OK:
            raise channel.unexpected(kind, payload)
        return channel.load(payload)
    finally:
        for task in (answer, feed):
            task.cancel()
        await asyncio.gather(answer, feed, return_exceptions=True)
        channel.close()


async def _fed(answer: asyncio.Task[Any], feed: asyncio.Task[None], channel: Channel, answer_s: float) -> None:
    """All is sent, or sending failed: wait for the answer. A line that broke may have brought one before it did."""
    problem = feed.exception()
    if isinstance(problem, _SourceFailed):
        raise problem.error
    if problem is not None and not isinstance(problem, SkerryError):
        raise problem
    done, _ = await asyncio.wait({answer}, timeout=answer_s if problem is None else _LAST_WORD_S)
    if problem is not None and (not done or answer.exception() is not None):
        raise problem
    if not done:
        raise channel.failure("no answer in time")


async def _feed(channel: Channel, data: AsyncIterator[bytes]) -> None:
    while True:
        try:
            part = await anext(data, None)
        except Exception as error:
            raise _SourceFailed(error) from error
        if part is None:
            break
        if part:
            await channel.send_data(part)
    await channel.send(protocol.frame(protocol.END, b"{}"))
