"""The files of a sandbox. A relative path starts at the home of `user` (default: the sandbox's user)."""

import contextlib
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal, cast

from skerry.core.errors import InvalidRequest, NotFound, OutcomeUnknown, Unavailable
from skerry.sdk import content
from skerry.sdk.client import Call, Connection, segment, stream_events
from skerry.sdk.content import Content
from skerry.sdk.errors import bad_answer
from skerry.sdk.io import AsyncStream
from skerry.sdk.models import Entry, parse
from skerry.sdk.transfer import Transfer, download, upload
from skerry.sdk.watch import AsyncWatch

GuestPath = str | os.PathLike[str]
HostPath = str | os.PathLike[str]

DEPTH_MAX = 64
LIST_READ_TIMEOUT = 120.0


class AsyncFiles:
    """Read, write, list, move, watch. Paths are the guest's unless they are called `local`."""

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._path = f"/v1/sandboxes/{segment(sandbox_id)}/files"
        self._about: dict[str, Any] = {"sandbox_id": sandbox_id}

    async def read(
        self, path: GuestPath, *, user: str | None = None, errors: Literal["replace", "strict"] = "replace"
    ) -> str:
        """A whole file as UTF-8 text. Bytes that are none are replaced, or raise UnicodeDecodeError if `strict`."""
        return (await self.read_bytes(path, user=user)).decode("utf-8", errors)

    async def read_bytes(
        self, path: GuestPath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> bytes:
        """A file's bytes, or `length` of them from `offset` on (fewer where it ends before, none beyond its end)."""
        async with self.stream(path, offset=offset, length=length, user=user) as chunks:
            return b"".join([chunk async for chunk in chunks])

    def stream(
        self, path: GuestPath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncStream[bytes]:
        """A file's bytes piece by piece, however large it is. Raises Gone where the sandbox ends, Unavailable where the
        line breaks."""
        return AsyncStream(self._stream(self._reading(path, offset, length, user), nothing=length == 0))

    async def write(
        self,
        path: GuestPath,
        data: Content,
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        user: str | None = None,
    ) -> Entry:
        """Write a whole file: it has the new content or the old, never a part. Directories on the way are made.

        `data`: text (as UTF-8), bytes, a file or an iterable of bytes; the last two are streamed, without a deadline.
        `mode`: permission bits (0o644). Raises NoSpace where the guest's disk is full.
        """
        query = self._query(path, user) | {"mode": None if mode is None else f"{mode:04o}", "mtime_ns": mtime_ns}
        body = content.body(self._connection.io, data)
        headers = {"Content-Type": "application/octet-stream"}
        return await self._entry("PUT", "", query=query, content=body, headers=headers)

    async def write_many(
        self,
        files: Mapping[str, Content] | Iterable[tuple[GuestPath, Content]],
        *,
        mode: int | None = None,
        user: str | None = None,
    ) -> "list[Entry]":
        """Write several files. All are tried; raises TransferIncomplete, which names each that was not written."""
        pairs = cast("Iterable[tuple[GuestPath, Content]]", files.items() if isinstance(files, Mapping) else files)
        done = Transfer()
        written: list[Entry] = []
        for path, data in pairs:
            async with done.one(os.fsdecode(path)):
                written.append(await self.write(path, data, mode=mode, user=user))
        done.finish("files were not written")
        return written

    async def upload(self, local: HostPath, path: GuestPath, *, user: str | None = None) -> int:
        """Copy a local file or directory tree to `path`; modes, times and links are kept. The count of entries.

        All entries are tried; raises TransferIncomplete, which names each that was not copied.
        """
        return await upload(self, self._connection.io, local, os.fsdecode(path), user)

    async def download(self, path: GuestPath, local: HostPath, *, user: str | None = None) -> int:
        """Copy a file or directory tree to the local path; modes, times and links are kept. The count of entries.

        Nothing is written outside `local`, whatever the guest says, and no link of the guest's is followed.
        All entries are tried; raises TransferIncomplete, which names each that was not copied.
        """
        return await download(self, self._connection.io, os.fsdecode(path), local, user)

    def walk(self, path: GuestPath, *, depth: int = 1, user: str | None = None) -> AsyncStream[Entry]:
        """The entries below a directory as they come. Raises Unavailable where the listing breaks off."""
        return AsyncStream(self._walk(self._query(path, user) | {"depth": depth}))

    async def list(self, path: GuestPath = ".", *, depth: int = 1, user: str | None = None) -> "list[Entry]":
        """The entries below a directory, to `depth` levels (1 to 64); always all of them, or an error."""
        async with self.walk(path, depth=depth, user=user) as entries:
            return [entry async for entry in entries]

    async def stat(self, path: GuestPath, *, user: str | None = None) -> Entry:
        """What is there; a link itself, not what it points to. Raises NotFound."""
        return await self._entry("GET", "/stat", query=self._query(path, user), again=True)

    async def exists(self, path: GuestPath, *, user: str | None = None) -> bool:
        """Whether anything is there (also a link that leads nowhere)."""
        try:
            await self.stat(path, user=user)
        except NotFound as error:
            if error.code == "sandbox_not_found":
                raise
            return False
        return True

    async def mkdir(self, path: GuestPath, *, mode: int | None = None, user: str | None = None) -> bool:
        """Make a directory and those on the way. False if it was there."""
        body = {"path": os.fsdecode(path)} | ({} if mode is None else {"mode": f"{mode:04o}"})
        answer = await self._send("POST", "/mkdir", query={"user": user}, json=body)
        return bool(answer and answer.get("created"))

    async def move(self, source: GuestPath, target: GuestPath, *, user: str | None = None) -> Entry:
        """Rename; what stood at `target` is replaced as rename(2) does."""
        body = {"source": os.fsdecode(source), "target": os.fsdecode(target)}
        return await self._entry("POST", "/move", query={"user": user}, json=body)

    async def symlink(self, target: GuestPath, path: GuestPath, *, user: str | None = None) -> Entry:
        """Make `path` a link that says `target`."""
        body = {"target": os.fsdecode(target), "path": os.fsdecode(path)}
        return await self._entry("POST", "/symlink", query={"user": user}, json=body)

    async def chmod(self, path: GuestPath, mode: int, *, user: str | None = None) -> Entry:
        body = {"path": os.fsdecode(path), "mode": f"{mode:04o}"}
        return await self._entry("POST", "/chmod", query={"user": user}, json=body)

    async def remove(self, path: GuestPath, *, user: str | None = None) -> None:
        """Remove a file, a link or a whole tree. Raises NotFound."""
        await self._send("DELETE", "", query=self._query(path, user))

    async def watch(self, path: GuestPath, *, recursive: bool = False, user: str | None = None) -> AsyncWatch:
        """Watch a directory. What happens after this returned is seen, also over pauses and broken lines.

        Raises a SkerryError `watch_overflow` while it is read if events were lost, `watch_not_found` if the sandbox
        was booted anew: list the directory again, and watch anew.
        """
        query = self._query(path, user) | {"recursive": recursive}
        return await AsyncWatch(self._connection, f"{self._path}/watch", self._about).open(query)

    # ------------------------------------------------------------------------------------------------------- inside

    def _query(self, path: GuestPath, user: str | None) -> dict[str, Any]:
        text = os.fsdecode(path)
        if not text:
            raise InvalidRequest.of("path", "must not be empty", given=text, code="invalid_path")
        return {"path": text, "user": user}

    async def _send(self, method: str, path: str, **options: Any) -> Any:
        return await self._connection.send(Call(method, self._path + path, about=self._about, **options))

    async def _entry(self, method: str, path: str, **options: Any) -> Entry:
        return parse(Entry, await self._send(method, path, **options))

    def _reading(self, path: GuestPath, offset: int, length: int | None, user: str | None) -> Call:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest.of("offset, length", "must not be negative", given=f"{offset}, {length}")
        headers = {}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + max(length, 1) - 1}"
        return Call("GET", self._path, self._query(path, user), headers=headers, again=True, about=self._about)

    async def _stream(self, call: Call, *, nothing: bool) -> AsyncGenerator[bytes, None]:
        """`nothing`: no byte is wanted, for which HTTP has no range."""
        if nothing:
            return
        try:
            reply = await self._connection.open(call)
        except InvalidRequest as error:
            if error.code == "range_not_satisfiable":
                return  # beyond its end there is nothing, as for read(2)
            raise
        async with contextlib.aclosing(reply), contextlib.aclosing(self._connection.chunks(call, reply)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except Unavailable:
                await self._raise_if_over()
                raise

    async def _raise_if_over(self) -> None:
        """Raise Gone if the sandbox ended: a body of plain bytes breaks off without a word about why."""
        call = Call("GET", f"{self._path}/stat", {"path": "/"}, again=True, about=self._about)
        with contextlib.suppress(Unavailable, OutcomeUnknown):
            await self._connection.send(call)

    async def _walk(self, query: Mapping[str, Any]) -> AsyncGenerator[Entry, None]:
        call = Call("GET", f"{self._path}/list", query, again=True, read_timeout=LIST_READ_TIMEOUT, about=self._about)
        count = 0
        async with contextlib.aclosing(stream_events(self._connection, call)) as lines:
            async for line in lines:
                if line.get("type") == "end":
                    if line.get("count") != count:
                        raise bad_answer("a listing's count differs from its entries", **self._about)
                    return
                count += 1
                yield parse(Entry, line)
        raise Unavailable("the listing broke off before its end", code="connection_lost", **self._about)
