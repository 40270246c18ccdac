"""The service `filesystem.Filesystem`. As in E2B, everything is done with root's power in the user's name."""

import posixpath
from collections.abc import AsyncIterator
from typing import Any, Final, cast

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from protobuf import Oneof

from skerry.api.e2b.envd import errors
from skerry.api.e2b.envd.call import Call, current
from skerry.api.e2b.envd.connect import stream, told
from skerry.api.e2b.envd.entries import entry, plain
from skerry.api.e2b.envd.watches import Told, Watchers, end
from skerry.api.e2b.gen import filesystem_connect
from skerry.api.e2b.gen import filesystem_pb as pb
from skerry.control import HeldWatch
from skerry.core.errors import SkerryError
from skerry.core.models import FileInfo, WatchEvent, WatchKind

EVENTS: Final = {
    WatchKind.CREATE: pb.EventType.CREATE,
    WatchKind.WRITE: pb.EventType.WRITE,
    WatchKind.REMOVE: pb.EventType.REMOVE,
    WatchKind.RENAME_FROM: pb.EventType.RENAME,
    WatchKind.RENAME_TO: pb.EventType.CREATE,
    WatchKind.CHMOD: pb.EventType.CHMOD,
}
"""As Go's fsnotify has them."""
_THERE: Final = frozenset({WatchKind.CREATE, WatchKind.WRITE, WatchKind.RENAME_TO, WatchKind.CHMOD})


class FilesystemService(filesystem_connect.Filesystem):
    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers

    async def stat(self, request: pb.StatRequest, ctx: RequestContext) -> pb.StatResponse:
        call = current.get()
        return pb.StatResponse(entry=entry(await told(_stat(call, request.path), ctx.timeout_ms)))

    async def make_dir(self, request: pb.MakeDirRequest, ctx: RequestContext) -> pb.MakeDirResponse:
        """With its parents, all of them the user's."""
        call = current.get()
        making = call.services.files.make_dir(
            call.principal, call.sandbox_id, request.path, user=call.user, detail=True, privileged=True
        )
        try:
            info, new = await making
        except SkerryError as error:
            if error.code == "path_exists":
                raise ConnectError(
                    Code.INVALID_ARGUMENT, f"path already exists but it is not a directory: {request.path}"
                ) from error
            raise errors.to_connect(error) from error
        if not new:
            raise ConnectError(Code.ALREADY_EXISTS, f"directory already exists: {plain(info.path)}")
        return pb.MakeDirResponse(entry=entry(info))

    async def move(self, request: pb.MoveRequest, ctx: RequestContext) -> pb.MoveResponse:
        """Parents of the destination are made."""
        call = current.get()
        return pb.MoveResponse(entry=entry(await told(_move(call, request.source, request.destination))))

    async def list_dir(self, request: pb.ListDirRequest, ctx: RequestContext) -> pb.ListDirResponse:
        call = current.get()
        return pb.ListDirResponse(entries=await told(_list(call, request.path, request.depth or 1), ctx.timeout_ms))

    async def remove(self, request: pb.RemoveRequest, ctx: RequestContext) -> pb.RemoveResponse:
        """Whole trees too; what is not there is no error."""
        call = current.get()
        try:
            await call.services.files.remove(
                call.principal, call.sandbox_id, request.path, user=call.user, privileged=True
            )
        except SkerryError as error:
            if error.code != "path_not_found":
                raise errors.to_connect(error) from error
        return pb.RemoveResponse()

    # ------------------------------------------------------------------------------------------------------- watches

    async def watch_dir(self, request: pb.WatchDirRequest, ctx: RequestContext) -> AsyncIterator[pb.WatchDirResponse]:
        call = current.get()
        source, each = await _watch(call, request)

        async def shown(event: WatchEvent) -> AsyncIterator[pb.WatchDirResponse]:
            yield _answer("filesystem", await each(event))

        start = _answer("start", pb.WatchDirResponse.StartEvent())
        alive = _answer("keepalive", pb.WatchDirResponse.KeepAlive())
        try:
            async for message in stream(source, start, shown, alive, ctx.timeout_ms):
                yield message
        finally:
            await _close(call, source)

    async def create_watcher(self, request: pb.CreateWatcherRequest, ctx: RequestContext) -> pb.CreateWatcherResponse:
        call = current.get()
        source, each = await _watch(call, request)
        try:
            name = self._watchers.add(call, source, each)
        except SkerryError as error:
            await _close(call, source)
            raise errors.to_connect(error) from error
        return pb.CreateWatcherResponse(watcher_id=name)

    async def get_watcher_events(
        self, request: pb.GetWatcherEventsRequest, ctx: RequestContext
    ) -> pb.GetWatcherEventsResponse:
        call = current.get()
        watcher = self._watchers.get(call.sandbox_id, request.watcher_id)
        return pb.GetWatcherEventsResponse(events=await told(watcher.take(), ctx.timeout_ms))

    async def remove_watcher(self, request: pb.RemoveWatcherRequest, ctx: RequestContext) -> pb.RemoveWatcherResponse:
        await self._watchers.remove(current.get().sandbox_id, request.watcher_id)
        return pb.RemoveWatcherResponse()


async def _stat(call: Call, path: str) -> FileInfo:
    return await call.services.files.stat(
        call.principal, call.sandbox_id, path, user=call.user, detail=True, privileged=True
    )


async def _move(call: Call, source: str, target: str) -> FileInfo:
    async def once() -> FileInfo:
        return await call.services.files.move(
            call.principal, call.sandbox_id, source, target, user=call.user, detail=True, privileged=True
        )

    try:
        return await once()
    except SkerryError as error:
        parent = posixpath.dirname(target.rstrip("/"))
        if error.code != "path_not_found" or not parent:
            raise
    await _stat(call, source)  # it is this one that is missing, or a parent of the other
    await call.services.files.make_dir(call.principal, call.sandbox_id, parent, user=call.user, privileged=True)
    return await once()


async def _list(call: Call, path: str, depth: int) -> list[pb.EntryInfo]:
    found = await call.services.files.list_dir(
        call.principal, call.sandbox_id, path, depth=depth, user=call.user, detail=True, privileged=True
    )
    try:
        return [entry(info) async for info in found]
    finally:
        await found.aclose()


async def _watch(call: Call, request: pb.WatchDirRequest | pb.CreateWatcherRequest) -> tuple[HeldWatch, Told]:
    """The armed watch, and what makes a client's event of one of its own."""
    watching = call.services.files.watch(
        call.principal, call.sandbox_id, request.path, recursive=request.recursive, user=call.user, privileged=True
    )
    source = await told(watching)
    root = request.path.rstrip("/") or "/"
    with_entry = request.include_entry

    async def each(event: WatchEvent) -> pb.FilesystemEvent:
        shown = pb.FilesystemEvent(name=plain(event.path), type=EVENTS[event.kind])
        if with_entry and event.kind in _THERE:
            try:
                shown.entry = entry(await _stat(call, posixpath.join(root, event.path)))
            except SkerryError as error:
                if errors.breaks(error):
                    raise  # a file that is gone again has no entry; a sandbox that is gone has no watch
        return shown

    return source, each


async def _close(call: Call, source: HeldWatch) -> None:
    """Nobody comes back to it."""
    await source.aclose()
    await end(call.services.files, call.principal, call.sandbox_id, source.watch_id)


def _answer(kind: str, value: Any) -> pb.WatchDirResponse:
    return pb.WatchDirResponse(event=cast("Any", Oneof(kind, value)))
