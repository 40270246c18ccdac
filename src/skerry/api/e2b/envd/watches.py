"""Watches that are asked again and again, for clients that do not hold a stream."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from skerry.api.e2b.envd.call import Call
from skerry.api.e2b.gen import filesystem_pb as pb
from skerry.api.streams import Owned
from skerry.control import Files, HeldWatch, Principal
from skerry.core.errors import LimitExceeded, SkerryError
from skerry.core.models import WatchEvent

PER_SANDBOX_MAX: Final = 64
KEPT_MAX: Final = 4096
"""Events of one watch that wait to be asked for; then they wait in the guest, whose queue may overflow."""

Told = Callable[[WatchEvent], Coroutine[Any, Any, pb.FilesystemEvent]]


class Watcher:
    """Collects the events of one watch until it ends. The watch itself lives in the guest, over pauses too."""

    def __init__(self, call: Call, source: HeldWatch, each: Told, owned: Owned) -> None:
        self._files = call.services.files
        self._who = (call.principal, call.sandbox_id, source.watch_id)
        self._source = source
        self._each = each
        self._events: list[pb.FilesystemEvent] = []
        self._told = 0
        """How many events of the watch were collected, taken ones too."""
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._ended: SkerryError | None = None
        self._reading = owned.add(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._source:
                self._events.append(await self._each(event))
                self._told = event.offset + 1
                self._news.set()
                if len(self._events) >= KEPT_MAX:
                    self._room.clear()
                await self._room.wait()
        except SkerryError as error:
            self._ended = error
        finally:
            self._news.set()
            await self._source.aclose()

    @property
    def over(self) -> bool:
        return self._reading.done() and not self._events

    async def take(self) -> list[pb.FilesystemEvent]:
        """All that had changed since the last time, when this was called. Raises what ended the watch, once everything
        before it was taken."""
        if self._ended is None:
            await self._catch_up()
        found, self._events = self._events, []
        self._room.set()
        if not found and self._ended is not None:
            raise self._ended
        return found

    async def _catch_up(self) -> None:
        self._room.set()
        try:
            until = await self._files.settle_watch(*self._who)
        except SkerryError as error:
            if error.code == "watch_not_found":
                self._ended = self._ended or error
                return
            raise
        while self._told < until and not self._reading.done():
            self._news.clear()
            self._room.set()
            await self._news.wait()

    async def aclose(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        await end(self._files, *self._who)


async def end(files: Files, principal: Principal, sandbox_id: str, watch_id: str) -> None:
    """Let the guest forget a watch. Where it cannot be told it forgets by itself."""
    with suppress(SkerryError):
        await files.end_watch(principal, sandbox_id, watch_id)


class Watchers:
    """Those of all sandboxes. They do not outlive the server, nor their sandbox."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self._all: dict[str, dict[str, Watcher]] = {}

    def add(self, call: Call, source: HeldWatch, each: Told) -> str:
        """Its id. Raises LimitExceeded; the source is then the caller's to close."""
        own = self._all.setdefault(call.sandbox_id, {})
        for name in [name for name, watcher in own.items() if watcher.over]:
            del own[name]
        if len(own) >= PER_SANDBOX_MAX:
            raise LimitExceeded(f"a sandbox has at most {PER_SANDBOX_MAX} watchers", allowed=PER_SANDBOX_MAX)
        name = f"w{secrets.token_hex(8)}"
        own[name] = Watcher(call, source, each, self._owned)
        return name

    def get(self, sandbox_id: str, name: str) -> Watcher:
        """Raises a Connect error, not_found."""
        found = self._all.get(sandbox_id, {}).get(name)
        if found is None:
            raise ConnectError(Code.NOT_FOUND, f"watcher with id {name} not found")
        return found

    async def remove(self, sandbox_id: str, name: str) -> None:
        watcher = self.get(sandbox_id, name)
        self._forget(sandbox_id, name)
        await watcher.aclose()

    def _forget(self, sandbox_id: str, name: str) -> None:
        own = self._all.get(sandbox_id, {})
        own.pop(name, None)
        if not own:
            self._all.pop(sandbox_id, None)
