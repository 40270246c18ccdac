"""The plain HTTP part of E2B's in-VM API: health, numbers, environment, and files whole."""

import json
import mimetypes
import posixpath
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, Final

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.api import wire
from skerry.api.e2b.envd import errors
from skerry.api.e2b.envd.bodies import Form, Part, body
from skerry.api.e2b.envd.call import Call
from skerry.api.e2b.envd.entries import METADATA
from skerry.api.problems import RangeNotSatisfiable
from skerry.api.streams import attended, hung_up
from skerry.core.errors import InvalidRequest, NotFound, SkerryError
from skerry.core.lifecycle import State
from skerry.core.models import FileInfo, FileKind
from skerry.node.contract import FileDownload

KEY_BYTES_MAX: Final = 246
METADATA_BYTES_MAX: Final = 4096
COMPOSE_BYTES_MAX: Final = 4 * 1024 * 1024
_META_HEADER: Final = "x-metadata-"
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})?-([0-9]{1,18})?")
_MIB: Final = 1024 * 1024

log = structlog.get_logger("skerry.api")


async def health(call: Call, request: Request) -> Response:  # noqa: ARG001 - all handlers have these
    """That there is a call at all says that the sandbox runs, or will. Clients whose stream broke ask here why:
    one that is on its way to rest is not there any more."""
    if call.sandbox.state is State.PAUSING and not call.sandbox.spec.auto_resume:
        return errors.away(call.sandbox_id)
    return Response(None, 204)


async def metrics(call: Call, request: Request) -> Response:  # noqa: ARG001
    found = await call.services.sandboxes.metrics(call.principal, call.sandbox_id)
    return wire.Json(
        {
            "ts": found.at_ms // 1000,
            "cpu_count": found.cpu_count,
            "cpu_used_pct": round(found.cpu_used_pct, 2),
            "mem_total": found.memory_total_bytes,
            "mem_used": found.memory_used_bytes,
            "mem_cache": found.memory_cache_bytes,
            "mem_total_mib": found.memory_total_bytes // _MIB,
            "mem_used_mib": found.memory_used_bytes // _MIB,
            "disk_used": found.disk_used_bytes,
            "disk_total": found.disk_total_bytes,
        }
    )


async def envs(call: Call, request: Request) -> Response:  # noqa: ARG001
    return wire.Json(call.sandbox.spec.env)


# ----------------------------------------------------------------------------------------------------------- download


async def read(call: Call, request: Request) -> Response:
    path = request.query_params.get("path", "")
    accepted = _codings(request.headers.get("accept-encoding", ""))
    if accepted.get("identity", accepted.get("*", 1.0)) == 0 and not accepted.get("gzip"):
        raise _NotAcceptableError("only identity and gzip are possible", allowed="identity, gzip")
    wanted = _range(request)
    packed = wanted is None and bool(accepted.get("gzip")) and not set(accepted) - {"gzip", "identity", "*"}
    download, first = await _open(call, path, wanted)
    return Download(download, path, first=first if wanted is not None else None, packed=packed)


class _NotAcceptableError(SkerryError):
    code = "not_acceptable"
    status = 406


def _codings(value: str) -> dict[str, float]:
    """What an Accept-Encoding header accepts, with how much it likes each."""
    found: dict[str, float] = {}
    for item in value.split(","):
        name, _, rest = item.strip().lower().partition(";")
        if name.strip():
            text = rest.strip().removeprefix("q=")
            try:
                found[name.strip()] = float(text) if rest else 1.0
            except ValueError:
                found[name.strip()] = 1.0
    return found


def _range(request: Request) -> tuple[int | None, int | None] | None:
    """First and last byte of the one range that is asked for: (None, N) is the last N. Others get the whole file."""
    value = request.headers.get("range")
    if value is None or "if-range" in request.headers:
        return None
    match = _RANGE.fullmatch(value.replace(" ", "").lower())
    if match is None or match.groups() == (None, None):
        return None
    first, last = (None if text is None else int(text) for text in match.groups())
    return None if first is not None and last is not None and last < first else (first, last)


async def _open(call: Call, path: str, wanted: tuple[int | None, int | None] | None) -> tuple[FileDownload, int]:
    """The download, and the position of its first byte."""
    offset, length = 0, None
    if wanted is not None:
        first, last = wanted
        if first is None:
            info = await _stat(call, path)
            length = min(info.size, last or 0)
            offset = info.size - length
            if length == 0:
                raise RangeNotSatisfiable("the range is outside the file", size=info.size)
        else:
            offset = first
            length = None if last is None else last - first + 1
    found = await call.services.files.read(
        call.principal, call.sandbox_id, path, user=call.user, offset=offset, length=length, privileged=True
    )
    if wanted is not None and found.length == 0:
        await found.aclose()
        raise RangeNotSatisfiable("the range is outside the file", size=found.info.size)
    return found, offset


async def _stat(call: Call, path: str) -> FileInfo:
    download = await call.services.files.read(
        call.principal, call.sandbox_id, path, user=call.user, length=0, privileged=True
    )
    await download.aclose()
    return download.info


class Download(Response):
    """A file's bytes as they come. If they end early the connection is cut, so that a part is not taken for all."""

    def __init__(self, download: FileDownload, path: str, *, first: int | None, packed: bool) -> None:
        info, length = download.info, download.length
        headers = {
            "Accept-Ranges": "bytes",
            "Cache-Control": "no-store",
            "Vary": "Accept-Encoding",
            "Last-Modified": format_datetime(datetime.fromtimestamp(info.mtime_ns // 10**9, UTC), usegmt=True),
            # A browser that is given a signed address must not run what the sandbox has written.
            "Content-Security-Policy": "sandbox",
            "X-Content-Type-Options": "nosniff",
        }
        if packed:
            headers["Content-Encoding"] = "gzip"
        else:
            headers["Content-Length"] = str(length)
        if first is not None:
            headers["Content-Range"] = f"bytes {first}-{first + length - 1}/{max(info.size, first + length)}"
        media = mimetypes.guess_type(path)[0] or "application/octet-stream"
        super().__init__(None, 200 if first is None else 206, headers)
        if packed:
            del self.headers["content-length"]
        self.headers["content-type"] = media
        self._download = download
        self._packer = zlib.compressobj(1, zlib.DEFLATED, 31) if packed else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (ASGI)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await attended(self._send(send), hung_up(receive))
        finally:
            await self._download.aclose()

    async def _send(self, send: Send) -> None:
        async for chunk in self._download:
            data = chunk if self._packer is None else self._packer.compress(chunk)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        rest = b"" if self._packer is None else self._packer.flush()
        await send({"type": "http.response.body", "body": rest, "more_body": False})


# ------------------------------------------------------------------------------------------------------------- upload


async def write(call: Call, request: Request) -> Response:
    """One file as the body, or files as parts of a form."""
    xattrs = {f"{METADATA}{key}": value for key, value in _metadata(request).items()}
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    path = request.query_params.get("path")
    data = body(request)
    if media == "application/octet-stream":
        if not path:
            raise InvalidRequest("path query parameter is required for raw body upload")
        written = [await _write(call, path, data, xattrs)]
    elif media.startswith("multipart/"):
        written = await _write_form(call, Form(data, request.headers["content-type"]), path, xattrs)
    else:
        raise InvalidRequest(
            f"unsupported content type: {media or 'none'}, expected multipart/form-data or application/octet-stream"
        )
    return wire.Json([_written(info, xattrs) for info in written])


async def _write_form(call: Call, form: Form, path: str | None, xattrs: dict[str, str]) -> list[FileInfo]:
    written: list[FileInfo] = []
    asked: set[str] = set()
    async for part in form.parts():
        if part.name != "file":
            continue
        target = path or part.filename
        if not target:
            raise InvalidRequest("a file of the form has no filename, and there is no path query parameter")
        if posixpath.normpath(target) in asked:
            raise _twice(target)
        asked.add(posixpath.normpath(target))
        info = await _write(call, target, _bytes(part), xattrs)
        if any(info.path == other.path for other in written):
            raise _twice(target)
        written.append(info)
    return written


def _twice(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"you cannot upload multiple files to the same path '{path}' in one upload request, "
        "only the first specified file was uploaded"
    )


async def _bytes(part: Part) -> AsyncIterator[bytes]:
    async for chunk in part:
        yield chunk


async def _write(call: Call, path: str, data: AsyncIterator[bytes], xattrs: dict[str, str]) -> FileInfo:
    return await call.services.files.write(
        call.principal,
        call.sandbox_id,
        path,
        data,
        user=call.user,
        xattrs=xattrs,
        in_place=True,
        privileged=True,
    )


def _metadata(request: Request) -> dict[str, str]:
    """Of the headers `X-Metadata-KEY`. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        if not name.startswith(_META_HEADER):
            continue
        key = name.removeprefix(_META_HEADER)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise InvalidRequest(f"invalid metadata key '{key[:80]}': 1 to {KEY_BYTES_MAX} bytes are allowed")
        if any(not " " <= char <= "~" for char in key + value):
            raise InvalidRequest(f"invalid metadata '{key[:80]}': only printable ASCII is allowed")
        found[key] = value
    if sum(len(key) + len(value) for key, value in found.items()) > METADATA_BYTES_MAX:
        raise InvalidRequest(f"the metadata is too long: at most {METADATA_BYTES_MAX} bytes in total are allowed")
    return found


def _written(info: FileInfo, xattrs: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": info.name, "path": info.path, "type": "file"}
    if xattrs:
        told["metadata"] = {name.removeprefix(METADATA): value for name, value in xattrs.items()}
    return told


# ------------------------------------------------------------------------------------------------------------ compose


async def compose(call: Call, request: Request) -> Response:
    """Make one file of several, in order; they are removed once it is whole."""
    sources, target, user = await _compose_body(request)
    call.user = user or call.user
    destination = posixpath.normpath(target)
    for source in sources:
        if posixpath.normpath(source) == destination:
            raise InvalidRequest(f"source path '{source}' cannot be the same as destination")
        try:
            info = await call.services.files.stat(
                call.principal, call.sandbox_id, source, user=call.user, detail=True, privileged=True
            )
        except NotFound as error:
            if error.code == "path_not_found":
                raise NotFound(f"source file not found: {source}") from error
            raise
        if (info.resolved_kind or info.kind) is not FileKind.FILE:
            raise InvalidRequest(f"source path is not a regular file: {source}")
    info = await _write(call, target, _joined(call, sources), {})
    for source in sources:
        await call.services.files.remove(call.principal, call.sandbox_id, source, user=call.user, privileged=True)
    return wire.Json(_written(info, {}))


async def _compose_body(request: Request) -> tuple[list[str], str, str | None]:
    raw = b""
    async for chunk in body(request):
        raw += chunk
        if len(raw) > COMPOSE_BYTES_MAX:
            raise InvalidRequest(f"the body is too long: at most {COMPOSE_BYTES_MAX} bytes are read")
    try:
        said = json.loads(raw)
    except ValueError:
        raise InvalidRequest("invalid request body: it is not JSON") from None
    said = said if isinstance(said, dict) else {}
    sources, target, user = said.get("source_paths"), said.get("destination"), said.get("username")
    if not isinstance(sources, list) or not sources or not all(isinstance(source, str) for source in sources):
        raise InvalidRequest("source_paths must not be empty")
    if not isinstance(target, str) or not target:
        raise InvalidRequest("destination is required")
    if user is not None and not isinstance(user, str):
        raise InvalidRequest("username must be a text")
    return sources, target, user


async def _joined(call: Call, sources: list[str]) -> AsyncIterator[bytes]:
    for source in sources:
        download = await call.services.files.read(
            call.principal, call.sandbox_id, source, user=call.user, privileged=True
        )
        try:
            async for chunk in download:
                yield chunk
        finally:
            await download.aclose()


# ------------------------------------------------------------------------------------------------------------- routes

Handler = Callable[[Call, Request], Awaitable[Response]]

ROUTES: Final[dict[str, dict[str, Handler]]] = {
    "/health": {"GET": health},
    "/metrics": {"GET": metrics},
    "/envs": {"GET": envs},
    "/files": {"GET": read, "POST": write},
    "/files/compose": {"POST": compose},
}


def expired(expires: int) -> bool:
    return time.time() >= expires
