"""How much of something may happen in a time."""

import asyncio
import time
from typing import Final


class Bucket:
    """Lets `rate` a second through, and `burst` at once (as many as in a second, if it is not said)."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate: Final = rate
        self._burst: Final = rate if burst is None else burst
        self._left = self._burst
        self._at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Pace:
    """Holds up whoever would go beyond `rate` a second, all of its users together."""

    def __init__(self, rate: float) -> None:
        self._rate: Final = rate
        self._paid_until = time.monotonic()

    async def pay(self, amount: float) -> None:
        """Returns once all that was paid for before, this included, may have happened."""
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now) + amount / self._rate
        await asyncio.sleep(self._paid_until - now)
