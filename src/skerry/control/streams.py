"""Streams out of a guest, held as activity until they end, explained if the sandbox ends first."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Generic, Protocol, Self, TypeVar

from skerry.control.access import Access
from skerry.control.live import Live
from skerry.control.redaction import Redaction, clean_process
from skerry.core.errors import OutcomeUnknown, SkerryError
from skerry.core.models import Exited, FileInfo, ProcessEvent, ProcessInfo, Stream
from skerry.node.contract import FileDownload, ProcessStream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Closable(Protocol[T_co]):
    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class Held(Generic[T]):
    """A stream that keeps its sandbox from being idle. It must be closed, or read to its end; twice is no error."""

    def __init__(self, source: Closable[T], live: Live, access: Access) -> None:
        self._source = source
        self._live = live
        self._access = access
        self._held = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self._source.__anext__()
        except SkerryError as error:
            explained = await self._access.explain(self._live, error)
            self._release()
            raise explained from error
        except StopAsyncIteration:
            self._release()
            raise

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._access.leave(self._live)

    async def aclose(self) -> None:
        """Never touches what the stream is about."""
        try:
            await self._source.aclose()
        finally:
            self._release()


class HeldProcess(Held[ProcessEvent]):
    """A `contract.ProcessStream`."""

    def __init__(
        self,
        source: ProcessStream,
        live: Live,
        access: Access,
        exited: Callable[[Exited], Awaitable[None]],
        *,
        follow: bool = True,
    ) -> None:
        super().__init__(source, live, access)
        self._process = source
        self._exited = exited
        self._complete = not follow  # what is there now may end before the process does
        self._redaction: Redaction | None = None
        """Made at the first event after the sandbox was given a secret: those without any pay nothing."""

    @property
    def process(self) -> ProcessInfo:
        return clean_process(self._process.process, self._live.redactor)

    @property
    def begins(self) -> Mapping[Stream, int]:
        return self._process.begins

    async def __anext__(self) -> ProcessEvent:
        if self._redaction is not None:
            event = await self._redaction.next(self._next)
        else:
            event = await self._next()
            if self._live.redactor is not None:
                self._redaction = Redaction(self._live, self._live.redactor, self._process.begins)
                self._redaction.take(event)
                event = await self._redaction.next(self._next)
        if isinstance(event, Exited):
            self._complete = True
            await self._exited(event)
            self._release()
        return event

    async def _next(self) -> ProcessEvent:
        """As the guest has it."""
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if not self._complete:
                raise OutcomeUnknown("the stream ended before the process did", sandbox_id=self._live.id) from None
            raise

    async def aclose(self) -> None:
        if self._redaction is not None:
            await self._redaction.aclose()
        await super().aclose()


class HeldDownload(Held[bytes]):
    """A `contract.FileDownload`."""

    def __init__(self, source: FileDownload, live: Live, access: Access) -> None:
        super().__init__(source, live, access)
        self._download = source

    @property
    def info(self) -> FileInfo:
        return self._download.info

    @property
    def length(self) -> int:
        return self._download.length


class Peeked(Generic[T]):
    """An iterator whose first item was read already, so that errors come before a stream has begun."""

    def __init__(self, source: AsyncIterator[T], first: T | None, *, empty: bool) -> None:
        self._source = source
        self._first = first
        self._fresh = not empty
        self._empty = empty

    @classmethod
    async def of(cls, source: AsyncIterator[T]) -> "Peeked[T]":
        try:
            first = await source.__anext__()
        except StopAsyncIteration:
            return cls(source, None, empty=True)
        return cls(source, first, empty=False)

    async def __anext__(self) -> T:
        if self._empty:
            raise StopAsyncIteration
        if self._fresh:
            self._fresh = False
            first, self._first = self._first, None
            return first  # pyright: ignore[reportReturnType] - not empty: it is a T
        return await self._source.__anext__()

    async def aclose(self) -> None:
        close = getattr(self._source, "aclose", None)  # generators have it; an iterator need not
        if close is not None:
            await close()
