"""How much of something may happen in a time."""

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
