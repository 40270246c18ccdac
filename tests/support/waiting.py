"""Waiting for what a busy machine may be slow to do, instead of asserting how long it took."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], object], within: float = 60) -> None:
    """Until it is true. Raises TimeoutError after `within` seconds."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], object], within: float = 60) -> None:
    """`until` for tests that block; they look less often, for they ask a server."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come true in {within} seconds")
        time.sleep(0.1)


async def stands_still(look: Callable[[], T], seconds: float, within: float = 60) -> T:
    """Until what `look` tells stays the same for `seconds`. Raises TimeoutError for what never does."""
    async with asyncio.timeout(within):
        seen = look()
        while True:
            await asyncio.sleep(seconds)
            if (now := look()) == seen:
                return now
            seen = now
