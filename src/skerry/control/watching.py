"""A watch's stream that goes on over pauses: the watch lives in the guest, the stream is only read from it."""

from typing import Self

from skerry.control.access import Access
from skerry.control.live import Live
from skerry.core.errors import GuestUnreachable, OutcomeUnknown, SkerryError
from skerry.core.models import WatchEvent
from skerry.node.contract import WatchStream

TRIES = 3
"""How often in a row a stream that broke is taken up again without a single event."""


class HeldWatch:
    """A `contract.WatchStream`. While its sandbox rests it waits, and counts as no activity; it wakes nothing.

    Ends by Gone, `watch_overflow`, `path_not_found`, or `watch_not_found` where the guest has forgotten the watch (it
    was booted anew, or nobody read it for too long)."""

    def __init__(self, live: Live, access: Access, watch_id: str, offset: int, source: WatchStream | None) -> None:
        self._live = live
        self._access = access
        self._watch_id = watch_id
        self._next = offset
        self._source = source
        self._failures = 0

    @property
    def watch_id(self) -> str:
        return self._watch_id

    @property
    def offset(self) -> int:
        """Of the next event."""
        return self._next

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while True:
            try:
                source = self._source or await self._open()
                event = await source.__anext__()
            except SkerryError as error:
                await self._close()
                await self._bear(error)
            else:
                self._next, self._failures = event.offset + 1, 0
                return event

    async def _open(self) -> WatchStream:
        entry = await self._access.enter_again(self._live)
        try:
            async with self._access.answered(entry.live):
                self._source = await entry.guest.attach_watch(self._watch_id, offset=self._next)
        except BaseException:
            self._access.leave(entry.live)
            raise
        return self._source

    async def _bear(self, error: SkerryError) -> None:
        """Return where the stream can be taken up again, raise where it cannot."""
        explained = await self._access.explain(self._live, error)
        if explained.code == "sandbox_paused":
            return
        self._failures += 1
        if not isinstance(explained, (GuestUnreachable, OutcomeUnknown)) or self._failures >= TRIES:
            raise explained from error

    async def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._access.leave(self._live)
            await source.aclose()

    async def aclose(self) -> None:
        """The watch goes on in the guest, for somebody to come back to."""
        await self._close()
