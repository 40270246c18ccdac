"""Files of a sandbox: streamed both ways, never held whole."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.api import operations, requests, schemas, wire
from skerry.api.problems import RangeNotSatisfiable
from skerry.api.streams import EventStream, Line, attended, hung_up
from skerry.api.v1.access import principal_of, services_of
from skerry.control import Held, HeldWatch, Principal, Services
from skerry.core.errors import InvalidRequest
from skerry.core.models import FileInfo
from skerry.node.contract import FileDownload

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/files", tags=["files"])
log = structlog.get_logger("skerry.api")

RANGE: Final = re.compile(r"bytes=(?:([0-9]{1,100})-([0-9]{1,100})?|-([0-9]{1,100}))", re.IGNORECASE)
POSITION_MAX: Final = 2**63 - 1
"""Beyond any file: numbers above it mean the same."""


@dataclass(frozen=True, slots=True)
class Range:
    """One range of bytes, as asked for. `first` None: the last `suffix` bytes."""

    first: int | None
    last: int | None
    suffix: int | None


def range_of(request: Request) -> Range | None:
    """The range a request asks for. With If-Range it gets the whole file: there is no validator it could hold."""
    value = requests.header(request, "range")
    if value is None or "if-range" in request.headers:
        return None
    match = RANGE.fullmatch(value.replace(" ", ""))
    if match is None:
        raise InvalidRequest.of("Range", "must be one range of bytes", given=value, allowed="bytes=FIRST-[LAST] or -N")
    first, last, suffix = (min(int(text), POSITION_MAX) if text else None for text in match.groups())
    if first is not None and last is not None and last < first:
        raise InvalidRequest.of(
            "Range", "ends before it begins", given=value, allowed="bytes=FIRST-[LAST], FIRST <= LAST"
        )
    return Range(first, last, suffix)


def _size_error(size: int) -> RangeNotSatisfiable:
    return RangeNotSatisfiable(f"the range is outside the file, which has {size} bytes", size=size)


class Download(Response):
    """A file's bytes as they come. If they end early the line is cut, so that nobody takes a part for the whole."""

    def __init__(self, download: FileDownload, first: int, *, part: bool) -> None:
        info, length = download.info, download.length
        headers = {
            "Content-Length": str(length),
            "Accept-Ranges": "bytes",
            "Cache-Control": "no-store",
            "X-Skerry-File": wire.dumps(wire.entry(info)),
        }
        if part:
            end = first + length
            # Files of /proc say that they are empty: how much is in them nobody knows.
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{info.size if end <= info.size else '*'}"
        super().__init__(None, 206 if part else 200, headers, media_type="application/octet-stream")
        self._download = download

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (ASGI)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await attended(self._send(send), hung_up(receive))
        finally:
            await self._download.aclose()

    async def _send(self, send: Send) -> None:
        left = self._download.length
        async for chunk in self._download:
            if not chunk:
                continue
            left -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if left == 0:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            log.warning("download ended early", path=wire.dumps(self._download.info.path), missing=left)


async def _open(
    services: Services, principal: Principal, sandbox_id: str, asked: schemas.FileQuery, wanted: Range | None
) -> tuple[FileDownload, int]:
    """The download and its first byte's position. Raises RangeNotSatisfiable."""
    if wanted is None:
        return await services.files.read(principal, sandbox_id, asked.path, user=asked.user), 0
    if wanted.first is None:
        head = await services.files.read(principal, sandbox_id, asked.path, user=asked.user, length=0)
        size = head.info.size
        await head.aclose()
        if not wanted.suffix or not size:
            raise _size_error(size)
        first, length = max(0, size - wanted.suffix), min(size, wanted.suffix)
    else:
        first = wanted.first
        length = None if wanted.last is None else wanted.last - first + 1
    found = await services.files.read(principal, sandbox_id, asked.path, user=asked.user, offset=first, length=length)
    if found.length == 0:
        await found.aclose()
        raise _size_error(found.info.size)
    return found, first


async def read(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.FileQuery)
    wanted = range_of(request)
    download, first = await _open(services_of(request), principal, request.path_params["sandbox_id"], asked, wanted)
    return Download(download, first, part=wanted is not None)


async def head(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.FileQuery)
    download = await services_of(request).files.read(
        principal, request.path_params["sandbox_id"], asked.path, user=asked.user, length=0
    )
    await download.aclose()
    headers = {
        "Content-Length": str(download.info.size),
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-store",
        "X-Skerry-File": wire.dumps(wire.entry(download.info)),
    }
    return Response(None, 200, headers, media_type="application/octet-stream")


async def write(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.WriteQuery)
    if (part := request.headers.get("content-range")) is not None:
        raise InvalidRequest.of("Content-Range", "is not possible: a file is written whole", given=part, allowed="none")
    found = await services_of(request).files.write(
        principal,
        request.path_params["sandbox_id"],
        asked.path,
        requests.body_stream(request),
        user=asked.user,
        mode=_mode(asked.mode),
        mtime_ns=asked.mtime_ns,
        size=requests.content_length(request),
    )
    return wire.Json(wire.entry(found))


def _mode(text: str | None) -> int | None:
    return None if text is None else int(text, 8)


async def remove(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.FileQuery)
    await services_of(request).files.remove(principal, request.path_params["sandbox_id"], asked.path, user=asked.user)
    return Response(status_code=204)


async def stat(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.FileQuery)
    found = await services_of(request).files.stat(
        principal, request.path_params["sandbox_id"], asked.path, user=asked.user
    )
    return wire.Json(wire.entry(found))


async def list_(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.ListQuery)
    entries = await services_of(request).files.list_dir(
        principal, request.path_params["sandbox_id"], asked.path, depth=asked.depth, user=asked.user
    )
    return EventStream(request, _entry_lines(entries))


async def _entry_lines(entries: Held[FileInfo]) -> AsyncIterator[Line]:
    count = 0
    try:
        async for info in entries:
            count += 1
            yield "entry", wire.dumps(wire.entry(info))
        yield "end", wire.dumps({"type": "end", "count": count})
    finally:
        await entries.aclose()


async def make_dir(request: Request) -> Response:
    principal = await principal_of(request)
    user = requests.query(request, schemas.UserQuery).user
    wanted = await requests.body(request, schemas.MakeDir)
    found, created = await services_of(request).files.make_dir(
        principal, request.path_params["sandbox_id"], wanted.path, user=user, mode=_mode(wanted.mode)
    )
    return wire.Json({"created": created, "entry": wire.entry(found)})


async def move(request: Request) -> Response:
    principal = await principal_of(request)
    user = requests.query(request, schemas.UserQuery).user
    wanted = await requests.body(request, schemas.Move)
    found = await services_of(request).files.move(
        principal, request.path_params["sandbox_id"], wanted.source, wanted.target, user=user
    )
    return wire.Json(wire.entry(found))


async def symlink(request: Request) -> Response:
    principal = await principal_of(request)
    user = requests.query(request, schemas.UserQuery).user
    wanted = await requests.body(request, schemas.Symlink)
    found = await services_of(request).files.symlink(
        principal, request.path_params["sandbox_id"], wanted.target, wanted.path, user=user
    )
    return wire.Json(wire.entry(found))


async def chmod(request: Request) -> Response:
    principal = await principal_of(request)
    user = requests.query(request, schemas.UserQuery).user
    wanted = await requests.body(request, schemas.Chmod)
    found = await services_of(request).files.chmod(
        principal, request.path_params["sandbox_id"], wanted.path, int(wanted.mode, 8), user=user
    )
    return wire.Json(wire.entry(found))


async def watch(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.WatchQuery)
    files, sandbox_id = services_of(request).files, request.path_params["sandbox_id"]
    given = asked.model_fields_set
    if asked.path is not None and not given & {"watch_id", "offset"}:
        stream = await files.watch(principal, sandbox_id, asked.path, recursive=asked.recursive, user=asked.user)
    elif asked.watch_id is not None and not given - {"watch_id", "offset"}:
        stream = await files.attach_watch(principal, sandbox_id, asked.watch_id, offset=asked.offset)
    else:
        raise InvalidRequest.of(
            "path", "give either a path or a watch", allowed="path, recursive, user; or watch_id, offset"
        )
    return EventStream(request, _watch_lines(stream))


async def end_watch(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, schemas.EndWatchQuery)
    await services_of(request).files.end_watch(principal, request.path_params["sandbox_id"], asked.watch_id)
    return Response(status_code=204)


async def _watch_lines(stream: HeldWatch) -> AsyncIterator[Line]:
    try:
        yield "watching", wire.dumps({"type": "watching", "watch_id": stream.watch_id, "offset": stream.offset})
        async for event in stream:
            yield event.kind.value, wire.dumps(wire.watch_event(event))
        raise RuntimeError("the watch ended without an error")
    finally:
        await stream.aclose()


_FILE_HEADERS: Final = {
    "X-Skerry-File": "The entry as ASCII JSON",
    "Accept-Ranges": "bytes",
    "Content-Length": "How many bytes follow",
}

operations.add(
    router,
    "GET",
    "",
    read,
    summary="A file's bytes; Range: bytes=FIRST-LAST for a part",
    answers={
        200: operations.Content(operations.BYTES.media, operations.BYTES.schema, _FILE_HEADERS),
        206: operations.Content(
            operations.BYTES.media,
            operations.BYTES.schema,
            {**_FILE_HEADERS, "Content-Range": "bytes FIRST-LAST/SIZE"},
        ),
    },
    errors=(*operations.SANDBOX, 416),
    query=schemas.FileQuery,
    headers={"Range": "One range of bytes"},
)
operations.add(
    router,
    "HEAD",
    "",
    head,
    summary="A file's headers",
    answers={200: operations.Content((), {}, _FILE_HEADERS)},
    errors=operations.SANDBOX,
    query=schemas.FileQuery,
)
operations.add(
    router,
    "PUT",
    "",
    write,
    summary="Write a file, atomically, from the body's bytes",
    answers={200: schemas.Entry},
    errors=operations.FILES,
    query=schemas.WriteQuery,
    raw_body=True,
)
operations.add(
    router,
    "DELETE",
    "",
    remove,
    summary="Remove a file, a link, or a whole tree",
    answers={204: None},
    errors=operations.SANDBOX,
    query=schemas.FileQuery,
)
operations.add(
    router,
    "GET",
    "/stat",
    stat,
    summary="One entry, links not followed",
    answers={200: schemas.Entry},
    errors=operations.SANDBOX,
    query=schemas.FileQuery,
)
operations.add(
    router,
    "GET",
    "/list",
    list_,
    summary="The entries of a directory, one a line",
    answers={200: operations.NDJSON},
    errors=operations.SANDBOX,
    query=schemas.ListQuery,
)
operations.add(
    router,
    "POST",
    "/mkdir",
    make_dir,
    summary="Make a directory and its parents",
    answers={200: schemas.MadeDir},
    errors=operations.FILES,
    query=schemas.UserQuery,
    body=schemas.MakeDir,
)
operations.add(
    router,
    "POST",
    "/move",
    move,
    summary="Move or rename",
    answers={200: schemas.Entry},
    errors=operations.FILES,
    query=schemas.UserQuery,
    body=schemas.Move,
)
operations.add(
    router,
    "POST",
    "/symlink",
    symlink,
    summary="Make a symbolic link",
    answers={200: schemas.Entry},
    errors=operations.FILES,
    query=schemas.UserQuery,
    body=schemas.Symlink,
)
operations.add(
    router,
    "POST",
    "/chmod",
    chmod,
    summary="Change permission bits",
    answers={200: schemas.Entry},
    errors=operations.SANDBOX,
    query=schemas.UserQuery,
    body=schemas.Chmod,
)
operations.add(
    router,
    "GET",
    "/watch",
    watch,
    summary="Changes below a path as they come, of a new watch or of one that was begun before",
    answers={200: operations.NDJSON},
    errors=operations.SANDBOX,
    query=schemas.WatchQuery,
)
operations.add(
    router,
    "DELETE",
    "/watch",
    end_watch,
    summary="End a watch",
    answers={204: None},
    errors=operations.SANDBOX,
    query=schemas.EndWatchQuery,
)
