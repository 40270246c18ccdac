"""Files of a sandbox. Arguments and errors are those of `contract.Guest`; paths and users are checked for form here."""

from collections.abc import AsyncIterator, Mapping

from skerry.control.access import Access
from skerry.control.checks import check_user, refuse_paths
from skerry.control.passages import paused_error
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import Recorder, text
from skerry.control.streams import Held, HeldDownload, Peeked
from skerry.control.watching import HeldWatch
from skerry.core import ids
from skerry.core.errors import Problem
from skerry.core.lifecycle import State
from skerry.core.limits import check_range, refuse
from skerry.core.models import FileInfo
from skerry.node.contract import FileDownload

DEPTH_MAX = 64
MODE_MAX = 0o7777
SIZE_MAX = 2**63 - 1


class Files:
    def __init__(self, access: Access, recorder: Recorder) -> None:
        self._access = access
        self._recorder = recorder

    async def stat(
        self, principal: Principal, sandbox_id: str, path: str, *, user: str | None = None, detail: bool = False,
        privileged: bool = False,
    ) -> FileInfo:  # fmt: skip
        _check(user, path=path)
        async with self._access.use(principal, sandbox_id) as entry:
            return await entry.guest.stat(path, user=user, detail=detail, privileged=privileged)

    async def list_dir(
        self, principal: Principal, sandbox_id: str, path: str, *, depth: int = 1, user: str | None = None,
        detail: bool = False, privileged: bool = False,
    ) -> Held[FileInfo]:  # fmt: skip
        """An async iterator with `aclose`. What is wrong with `path` is raised here, not at the first entry."""
        _check(user, path=path)
        refuse(check_range("depth", depth, 1, DEPTH_MAX))
        entry = await self._access.enter(principal, sandbox_id)
        try:
            async with self._access.answered(entry.live):
                entries = entry.guest.list_dir(path, depth=depth, user=user, detail=detail, privileged=privileged)
                found = await Peeked.of(entries)
        except BaseException:
            self._access.leave(entry.live)
            raise
        return Held(found, entry.live, self._access)

    async def read(
        self,
        principal: Principal,
        sandbox_id: str,
        path: str,
        *,
        user: str | None = None,
        offset: int = 0,
        length: int | None = None,
        privileged: bool = False,
    ) -> FileDownload:
        async with self._recorder.act(principal, "file.read", sandbox_id, path=text(path)) as act:
            _check(user, path=path)
            refuse([*check_range("offset", offset, 0, SIZE_MAX), *check_range("length", length or 0, 0, SIZE_MAX)])
            entry = await self._access.enter(principal, sandbox_id)
            try:
                async with self._access.answered(entry.live):
                    download = await entry.guest.read_file(
                        path, user=user, offset=offset, length=length, privileged=privileged
                    )
            except BaseException:
                self._access.leave(entry.live)
                raise
            act.detail |= {"path": text(download.info.path), "bytes": download.length}
        return HeldDownload(download, entry.live, self._access)

    async def write(
        self,
        principal: Principal,
        sandbox_id: str,
        path: str,
        data: AsyncIterator[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        mtime_ns: int | None = None,
        size: int | None = None,
        xattrs: Mapping[str, str] | None = None,
        in_place: bool = False,
        privileged: bool = False,
    ) -> FileInfo:
        """Atomic. It takes as long as `data` takes to come: no deadline of its own."""
        async with self._recorder.act(principal, "file.written", sandbox_id, path=text(path)) as act:
            _check(user, path=path)
            refuse(
                [
                    *check_range("mode", mode or 0, 0, MODE_MAX),
                    *check_range("mtime_ns", mtime_ns or 0, -(2**63), SIZE_MAX),
                    *check_range("size", size or 0, 0, SIZE_MAX),
                ]
            )
            entry = await self._access.enter(principal, sandbox_id)
            try:
                async with self._access.explained(entry.live):
                    info = await entry.guest.write_file(
                        path, data, user=user, mode=mode, mtime_ns=mtime_ns, size=size,
                        xattrs=xattrs, in_place=in_place, privileged=privileged,
                    )  # fmt: skip
            finally:
                self._access.leave(entry.live)
            act.detail |= {"path": text(info.path), "bytes": info.size}
            return info

    async def make_dir(
        self, principal: Principal, sandbox_id: str, path: str, *, user: str | None = None, mode: int | None = None,
        detail: bool = False, privileged: bool = False,
    ) -> tuple[FileInfo, bool]:  # fmt: skip
        """The directory, and whether it is new."""
        async with self._recorder.act(principal, "file.dir_made", sandbox_id, path=text(path)) as act:
            _check(user, path=path)
            refuse(check_range("mode", mode or 0, 0, MODE_MAX))
            async with self._access.use(principal, sandbox_id) as entry:
                info, created = await entry.guest.make_dir(
                    path, user=user, mode=mode, detail=detail, privileged=privileged
                )
            act.detail |= {"path": text(info.path), "created": created}
            return info, created

    async def move(
        self, principal: Principal, sandbox_id: str, source: str, target: str, *, user: str | None = None,
        detail: bool = False, privileged: bool = False,
    ) -> FileInfo:  # fmt: skip
        said = {"source": text(source), "target": text(target)}
        async with self._recorder.act(principal, "file.moved", sandbox_id, **said):
            _check(user, source=source, target=target)
            entry = await self._access.enter(principal, sandbox_id)
            try:
                async with self._access.explained(entry.live):  # across filesystems it copies: no deadline
                    return await entry.guest.move(source, target, user=user, detail=detail, privileged=privileged)
            finally:
                self._access.leave(entry.live)

    async def remove(
        self, principal: Principal, sandbox_id: str, path: str, *, user: str | None = None, privileged: bool = False
    ) -> None:
        async with self._recorder.act(principal, "file.removed", sandbox_id, path=text(path)):
            _check(user, path=path)
            entry = await self._access.enter(principal, sandbox_id)
            try:
                async with self._access.explained(entry.live):  # a whole tree may take long: no deadline
                    await entry.guest.remove(path, user=user, privileged=privileged)
            finally:
                self._access.leave(entry.live)

    async def symlink(
        self, principal: Principal, sandbox_id: str, target: str, path: str, *, user: str | None = None
    ) -> FileInfo:
        """`path` becomes a link that says `target`."""
        detail = {"path": text(path), "target": text(target)}
        async with self._recorder.act(principal, "file.linked", sandbox_id, **detail):
            _check(user, target=target, path=path)
            async with self._access.use(principal, sandbox_id) as entry:
                return await entry.guest.symlink(target, path, user=user)

    async def chmod(
        self, principal: Principal, sandbox_id: str, path: str, mode: int, *, user: str | None = None
    ) -> FileInfo:
        async with self._recorder.act(principal, "file.mode_set", sandbox_id, path=text(path), mode=f"{mode:04o}"):
            _check(user, path=path)
            refuse(check_range("mode", mode, 0, MODE_MAX))
            async with self._access.use(principal, sandbox_id) as entry:
                return await entry.guest.chmod(path, mode, user=user)

    async def watch(
        self, principal: Principal, sandbox_id: str, path: str, *, recursive: bool = False, user: str | None = None,
        privileged: bool = False,
    ) -> HeldWatch:  # fmt: skip
        """Armed when it returns. Ends by an error, never silently; goes on over pauses."""
        _check(user, path=path)
        entry = await self._access.enter(principal, sandbox_id)
        try:
            async with self._access.answered(entry.live):
                stream = await entry.guest.watch(path, recursive=recursive, user=user, privileged=privileged)
        except BaseException:
            self._access.leave(entry.live)
            raise
        return HeldWatch(entry.live, self._access, stream.watch_id, 0, stream)

    async def attach_watch(self, principal: Principal, sandbox_id: str, watch_id: str, *, offset: int = 0) -> HeldWatch:
        """Read on where a stream was left. One that rests is waited for, and not woken."""
        refuse([*_check_watch(watch_id), *check_range("offset", offset, 0, SIZE_MAX)])
        live = await self._access.present(principal, sandbox_id, Scope.USE)
        if live.moving or live.record.state is not State.RUNNING:
            return HeldWatch(live, self._access, watch_id, offset, None)
        entry = await self._access.enter(principal, sandbox_id)
        try:
            async with self._access.answered(entry.live):
                stream = await entry.guest.attach_watch(watch_id, offset=offset)
        except BaseException:
            self._access.leave(entry.live)
            raise
        return HeldWatch(entry.live, self._access, watch_id, offset, stream)

    async def settle_watch(self, principal: Principal, sandbox_id: str, watch_id: str) -> int:
        """The offset that a reader has got to once it has all that had changed when this was called."""
        refuse(_check_watch(watch_id))
        async with self._access.use(principal, sandbox_id) as entry:
            return await entry.guest.settle_watch(watch_id)

    async def end_watch(self, principal: Principal, sandbox_id: str, watch_id: str) -> None:
        """NotFound `watch_not_found`. Of a sandbox at rest: Conflict `sandbox_paused`; it is not woken for that."""
        refuse(_check_watch(watch_id))
        live = await self._access.present(principal, sandbox_id, Scope.USE)
        await self._access.settled(live)
        if live.record.state is not State.RUNNING:
            raise paused_error(live)
        async with self._access.use(principal, sandbox_id) as entry:
            await entry.guest.end_watch(watch_id)


def _check_watch(watch_id: str) -> list[Problem]:
    return (
        []
        if ids.is_id(watch_id, ids.WATCH)
        else [Problem("watch_id", "is not a watch's id", watch_id, f"{ids.WATCH}…")]
    )


def _check(user: str | None, **paths: str) -> None:
    refuse_paths(check_user(user), **paths)
