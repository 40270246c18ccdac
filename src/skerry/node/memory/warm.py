"""What a guest runs before it is handed out, so that the usual programs are in its memory and, under emulation, are
translated already: measured on QEMU 10 without KVM, a first command takes 350 to 500 ms, and 15 ms after that."""

import asyncio
from typing import Final

from skerry.core import ids
from skerry.core.errors import InternalError, InvalidRequest
from skerry.core.models import Exited, ProcessSpec
from skerry.images.model import Start
from skerry.node.agents import AgentLink
from skerry.node.start import ask_ready

DEADLINE_S: Final = 120.0
USUAL: Final = (
    ("/bin/true",),
    ("/bin/sh", "-c", "ls / >/dev/null; cat /etc/hostname; echo $HOME | tr a-z A-Z"),
    ("/bin/bash", "-c", "command -v python3 >/dev/null && python3 -c 'import json, os, sys' || true"),
    ("/bin/bash", "-c", "true"),
)


async def warm_up(link: AgentLink, start: Start | None, *, rounds: int = 1) -> None:
    """Run the usual programs. What they answer does not matter; that the guest lets them run does. A template that says
    when it is ready (`start`) has to be so: Raises InternalError where it is not."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(rounds):
                for argv in USUAL:
                    await _run(link, argv)
            await link.stat("/")
            ready, said = await ask_ready(link, start) if start is not None else (True, "")
    except TimeoutError:
        raise InternalError("the guest did not run the usual programs in time", step="warm") from None
    if not ready:
        raise InternalError(f"what the template has started does not answer: {said}", step="warm")


async def _run(link: AgentLink, argv: tuple[str, ...]) -> None:
    try:
        stream = await link.start(ProcessSpec(ids.new_id(ids.PROCESS), argv=argv))
    except InvalidRequest:  # not every image has it
        return
    try:
        async for event in stream:
            if isinstance(event, Exited):
                return
    finally:
        await stream.aclose()
