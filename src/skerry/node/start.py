"""A template's start command: run where a guest has booted, and waited for until the template is ready."""

import asyncio
from typing import Final

from skerry.core import ids
from skerry.core.errors import InternalError, SkerryError
from skerry.core.models import Exited, Output, ProcessSpec
from skerry.images.model import Start
from skerry.node.agents import AgentLink
from skerry.node.aio import log
from skerry.node.contract import ProcessStream

POLL_S: Final = 0.25
READY_MS: Final = 60_000
"""For one run of the ready command."""
SAID_MAX: Final = 2000
FAILED: Final = "template_start_failed"


async def start(link: AgentLink, what: Start, deadline_s: float) -> None:
    """Run the start command, and the ready command until it succeeds.

    Raises InternalError `template_start_failed`, with the last that either has said.
    """
    said = ""
    try:
        await _run(link, what)
        async with asyncio.timeout(deadline_s):
            while not (answer := await ask_ready(link, what))[0]:
                said = answer[1]
                code, output = await _read(await link.attach(ids.START_PROCESS, follow=False))
                if code not in (None, 0):
                    raise _failed(f"its start command ended with exit code {code}", output)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise _failed(f"its ready command did not succeed within {deadline_s:.0f} s", said) from None
    except SkerryError as error:
        if error.code == FAILED:
            raise
        raise _failed(error.message, said) from error


async def start_again(link: AgentLink, what: Start) -> None:
    """Run the start command on a disk that its users have changed: whether it succeeds is their business, and no reason
    to keep them from their disk."""
    try:
        await _run(link, what)
    except SkerryError as error:
        log.warning("a template's start command could not be run", error=error.message)


async def ask_ready(link: AgentLink, what: Start) -> tuple[bool, str]:
    """Run the ready command once: whether it succeeded, and the last it said."""
    if what.ready is None:
        return True, ""
    spec = ProcessSpec(ids.new_id(ids.PROCESS), shell=what.ready, user=what.user, timeout_ms=READY_MS)
    code, said = await _read(await link.start(spec))
    return code == 0, said


async def _run(link: AgentLink, what: Start) -> None:
    spec = ProcessSpec(ids.START_PROCESS, shell=what.command, user=what.user, background=True, tag="template-start")
    await (await link.start(spec)).aclose()


async def _read(stream: ProcessStream) -> tuple[int | None, str]:
    """The exit code (None: it runs, or a signal ended it), and the end of what was said."""
    code, said = None, bytearray()
    try:
        async for event in stream:
            if isinstance(event, Output):
                said += event.data
                del said[:-SAID_MAX]
            elif isinstance(event, Exited):
                code = event.status.exit_code
    finally:
        await stream.aclose()
    return code, said.decode(errors="replace").strip()


def _failed(what: str, said: str) -> InternalError:
    return InternalError(
        f"the template did not start: {what}" + (f"; it said last: {said}" if said else ""), code=FAILED, step="start"
    )
