"""Requests to one server: the key, retries, and what a broken line means.

A request is repeated only where nothing can have happened twice: it was never sent, the server says that nothing
happened (`retry: safe`), or the request is one that may be repeated (`again=True`: reads, kills, and creates, which
carry an idempotency key). Else a line that breaks after sending is `OutcomeUnknown`.
"""

import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode, urlsplit

import httpx
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from skerry.core.errors import Gone, InternalError, InvalidRequest, NotFound, SkerryError, Unavailable
from skerry.sdk.config import Target, discover
from skerry.sdk.errors import bad_answer, from_problem, line_broke
from skerry.sdk.io import CREATE_READ_TIMEOUT, IO, REQUEST_READ_TIMEOUT, Reply, Request, Socket
from skerry.sdk.io_async import AsyncIO
from skerry.sdk.models import EgressChange, Image, Key, PoolStatus, ProjectEgress, SecretInfo, Snapshot, parse
from skerry.sdk.text import Ndjson

ATTEMPTS: Final = 4
BACKOFF: Final = 0.1
"""Seconds before the second attempt; doubled at each further one, and spread by half."""
RETRY_AFTER_MAX: Final = 5.0
"""Longest `Retry-After` that is waited for, seconds; beyond it the caller gets the error and decides."""
PROBLEM_MAX: Final = 1024 * 1024

_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

Query = Mapping[str, str | int | bool | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the native interface. `path` begins with a slash and is quoted already."""

    method: str
    path: str
    query: Query | None = None
    json: Any = None
    content: bytes | AsyncIterator[bytes] | None = None
    headers: Mapping[str, str] | None = None
    again: bool = False
    """Whether it may be repeated although it may have been carried out."""
    read_timeout: float = REQUEST_READ_TIMEOUT
    about: Mapping[str, Any] | None = None
    """Context for an error: which sandbox, which path."""


class Connection:
    """A server, a key and the connections to it. Everything else in the SDK speaks through one of these."""

    def __init__(self, target: Target, io: IO) -> None:
        self.target = target
        self.io = io

    async def aclose(self) -> None:
        await self.io.aclose()

    async def send(self, call: Call) -> Any:
        """The JSON of a 2xx answer, None where it has no body."""
        reply = await self.open(call)
        body = await self.read(call, reply)
        if not body:
            return None
        try:
            return json.loads(body)
        except ValueError:
            raise bad_answer("it is not JSON", **(call.about or {})) from None

    async def read(self, call: Call, reply: Reply) -> bytes:
        """All of an answer's body; closes it."""
        body = bytearray()
        async with contextlib.aclosing(reply):
            async for chunk in self.chunks(call, reply):
                body += chunk
        return bytes(body)

    async def open(self, call: Call) -> Reply:
        """Send, and give a 2xx answer's body to be read. Raises typed errors for all else."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._try(call)
            except SkerryError as error:
                wait = self._wait(call, error, attempt)
                if wait is None:
                    raise
                await self.io.sleep(wait)
        raise InternalError("no attempt was made")

    async def chunks(self, call: Call, reply: Reply) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it comes. Raises Unavailable or OutcomeUnknown where the line breaks."""
        try:
            async for chunk in reply.chunks():
                yield chunk
        except httpx.TransportError as error:
            raise self._broken(call, error, "the end of the answer") from error

    async def events(self, call: Call, reply: Reply) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of an NDJSON answer, without keepalives; an `error` line is raised. Ends where the line ends."""
        lines = Ndjson()
        async for chunk in self.chunks(call, reply):
            for event in lines.feed(chunk):
                kind = event.get("type")
                if kind == "error":
                    problem = event.get("error")
                    raise from_problem(problem, 500)
                if kind != "keepalive":
                    yield event

    async def socket(self, path: str, query: Query, about: Mapping[str, Any]) -> Socket:
        """A WebSocket. Raises typed errors."""
        scheme = "wss" if urlsplit(self.target.url).scheme == "https" else "ws"
        url = f"{scheme}{self.target.url[self.target.url.index('://') :]}{path}{encode_query(query)}"
        try:
            return await self.io.websocket(url, self._headers())
        except InvalidStatus as refused:
            body: Any = None
            with contextlib.suppress(ValueError):
                body = json.loads(refused.response.body or b"")
            raise from_problem(body, refused.response.status_code) from None
        except (OSError, InvalidHandshake, InvalidURI, WebSocketException) as error:
            raise self._unreachable(error, about) from error

    # ------------------------------------------------------------------------------------------------------- inside

    async def _try(self, call: Call) -> Reply:
        headers = {**self._headers(), **(call.headers or {})}
        content = call.content
        if call.json is not None:
            headers["Content-Type"] = "application/json"
            content = encode_json(call.json)
        request = Request(
            call.method,
            f"{self.target.url}{call.path}{encode_query(call.query or {})}",
            headers,
            content,
            call.read_timeout,
        )
        try:
            reply = await self.io.open(request)
        except _NEVER_SENT as error:
            raise self._unreachable(error, call.about) from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError) as error:
            raise InvalidRequest(f"the request cannot be sent: {error}") from error
        except httpx.TransportError as error:
            raise self._broken(call, error, "the answer") from error
        if 200 <= reply.status < 300:
            return reply
        async with contextlib.aclosing(reply):
            raise await self._refusal(call, reply)

    async def _refusal(self, call: Call, reply: Reply) -> SkerryError:
        body = bytearray()
        try:
            async for chunk in reply.chunks():
                body += chunk
                if len(body) > PROBLEM_MAX:
                    break
        except httpx.TransportError:
            pass  # the status was read and says what it says
        problem: Any = None
        with contextlib.suppress(ValueError):
            problem = json.loads(bytes(body)) if body else None
        after = reply.headers.get("retry-after", "")
        error = from_problem(problem, reply.status, retry_after=float(after) if after.isdecimal() else None)
        for name, value in (call.about or {}).items():
            error.context.setdefault(name, value)
        return error

    def _wait(self, call: Call, error: SkerryError, attempt: int) -> float | None:
        """Seconds until the next attempt, None where there is to be none."""
        if attempt == ATTEMPTS or error.retry != "safe":
            return None
        if isinstance(call.content, AsyncIterator) and error.code != "server_unreachable":
            return None  # its content is spent
        if error.retry_after is not None and error.retry_after > RETRY_AFTER_MAX:
            return None
        wait = BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - spreading, not secrecy
        return max(wait, error.retry_after or 0.0)

    def _broken(self, call: Call, error: Exception, what: str) -> SkerryError:
        cause = str(error) or type(error).__name__
        if call.again:
            return Unavailable(
                f"the line to {self.target.url} broke before {what}: {cause}",
                code="connection_lost",
                **(call.about or {}),
            )
        return line_broke(f"{what}: {cause}", **(call.about or {}))

    def _unreachable(self, error: Exception, about: Mapping[str, Any] | None) -> SkerryError:
        cause = str(error) or type(error).__name__
        return Unavailable(
            f"no Skerry server answers at {self.target.url}: {cause}", code="server_unreachable", **(about or {})
        )

    def _headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.target.api_key}",
            "Accept": "application/json, application/x-ndjson",
            "Accept-Encoding": "identity",
            "User-Agent": "skerry-python",
        }


class AsyncKeys:
    """The API keys of a tenant. Needs a key with the scope `keys:write`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(self, name: str, scopes: Sequence[str]) -> Key:
        """A new key; its text is in `secret` and is never shown again."""
        call = Call("POST", "/v1/keys", json={"name": name, "scopes": list(scopes)})
        return parse(Key, await self._connection.send(call))

    async def list(self) -> "list[Key]":
        data = await self._connection.send(Call("GET", "/v1/keys", again=True))
        return [parse(Key, item) for item in items(data)]

    async def revoke(self, key_id: str) -> Key:
        """From now on the key opens nothing. May be repeated."""
        return parse(Key, await self._connection.send(Call("DELETE", f"/v1/keys/{segment(key_id)}", again=True)))


class AsyncSecrets:
    """The secrets of a project. Needs a key with the scopes `secrets:read` and `secrets:write`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def set(self, name: str, value: str) -> SecretInfo:
        """A new secret, or a new version of it. Commands that start from now on get it."""
        return parse(SecretInfo, await self._connection.send(Call("PUT", self._path(name), json={"value": value})))

    async def list(self) -> "list[SecretInfo]":
        """By name, without values."""
        data = await self._connection.send(Call("GET", "/v1/secrets", again=True))
        return [parse(SecretInfo, item) for item in items(data)]

    async def get(self, name: str) -> SecretInfo:
        """What is known of it. Raises NotFound."""
        return parse(SecretInfo, await self._connection.send(Call("GET", self._path(name), again=True)))

    async def delete(self, name: str) -> None:
        """No command gets it any more. Raises NotFound."""
        await self._connection.send(Call("DELETE", self._path(name)))

    @staticmethod
    def _path(name: str) -> str:
        return f"/v1/secrets/{segment(name)}"


class AsyncEgress:
    """The policies of a project. Needs a key with the scopes `egress:read` and `egress:write`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self) -> ProjectEgress:
        """What is in force, and where each rule of the curated list comes from."""
        return parse(ProjectEgress, await self._connection.send(Call("GET", "/v1/egress", again=True)))

    async def set(
        self,
        mode: Literal["deny", "allow", "open"],
        *,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
        template: str | None = None,
    ) -> EgressChange:
        """The project's policy from now on, for what runs and rests too; connections that it forbids are cut.

        "deny": the curated list and `allow`; "allow": `allow` alone; "open": every public address but `deny`. With
        `template`: what its sandboxes may reach of that, "allow" or "open".
        """
        body = {"mode": mode, "allow": list(allow), "deny": list(deny)}
        call = Call("PUT", self._path(template), json=body, again=True)
        return parse(EgressChange, await self._connection.send(call))

    async def reset(self, *, template: str | None = None) -> None:
        """Back to the default, or of a template: it narrows nothing. Raises NotFound where nothing was set."""
        await self._connection.send(Call("DELETE", self._path(template)))

    @staticmethod
    def _path(template: str | None) -> str:
        return "/v1/egress" if template is None else f"/v1/egress/templates/{segment(template)}"


class AsyncSnapshots:
    """The snapshots of a project. `snapshot` is one, its id, or its name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, *, name: str | None = None, sandbox_id: str | None = None) -> "list[Snapshot]":
        """All of them, or those of a name or a sandbox, newest first."""
        query = {"name": name, "sandbox_id": sandbox_id, "limit": 100}
        return [parse(Snapshot, item) async for item in pages(self._connection, "/v1/snapshots", query)]

    async def get(self, snapshot: "str | Snapshot") -> Snapshot:
        return parse(Snapshot, await self._connection.send(Call("GET", self._path(snapshot), again=True)))

    async def delete(self, snapshot: "str | Snapshot") -> bool:
        """Forget it; sandboxes made of it live on. False if there was none."""
        try:
            await self._connection.send(Call("DELETE", self._path(snapshot), again=True))
        except NotFound:
            return False
        return True

    def _path(self, snapshot: "str | Snapshot") -> str:
        return f"/v1/snapshots/{segment(snapshot_ref(snapshot))}"


def snapshot_ref(snapshot: str | Snapshot) -> str:
    return snapshot.id if isinstance(snapshot, Snapshot) else snapshot


class AsyncClient:
    """A connection to one server, to be shared by many sandboxes: `AsyncSandbox.create(…, client=client)`.

    `transport` replaces the network, as httpx knows it.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        target = discover(url, api_key)
        self.connection = Connection(target, AsyncIO(target, transport=transport))
        self.keys = AsyncKeys(self.connection)
        self.snapshots = AsyncSnapshots(self.connection)
        self.secrets = AsyncSecrets(self.connection)
        self.egress = AsyncEgress(self.connection)

    @classmethod
    def over(cls, connection: Connection) -> "AsyncClient":
        """A client over a connection that there is."""
        made = cls.__new__(cls)
        made.connection = connection
        made.keys = AsyncKeys(connection)
        made.snapshots = AsyncSnapshots(connection)
        made.secrets = AsyncSecrets(connection)
        made.egress = AsyncEgress(connection)
        return made

    @property
    def url(self) -> str:
        return self.connection.target.url

    async def server(self) -> dict[str, Any]:
        """What the server says of itself: version, node_id, accelerator, vmm, templates."""
        return await self.connection.send(Call("GET", "/v1/server", again=True))

    async def pool(self) -> list[PoolStatus]:
        """The warm clones that stand ready, by template and shape. Needs the scope `admin`, as do the next two."""
        return [
            parse(PoolStatus, item) for item in items(await self.connection.send(Call("GET", "/v1/pool", again=True)))
        ]

    async def images(self, *, verify: bool = False) -> list[Image]:
        """What the node keeps. `verify`: every byte is read; what is wrong with an image stands in its `damage`."""
        timeout = CREATE_READ_TIMEOUT if verify else REQUEST_READ_TIMEOUT
        call = Call("GET", "/v1/images", {"verify": verify}, again=True, read_timeout=timeout)
        return [parse(Image, item) for item in items(await self.connection.send(call))]

    async def collect_images(self) -> list[str]:
        """Remove those that nothing needs; gives their ids."""
        data = await self.connection.send(Call("POST", "/v1/images/collect", again=True))
        return [str(image_id) for image_id in (data or {}).get("removed") or ()]

    async def aclose(self) -> None:
        """Close its connections. Sandboxes run on."""
        await self.connection.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def items(data: Any) -> "list[Any]":
    found = data.get("items") if isinstance(data, Mapping) else None
    if not isinstance(found, list):
        raise bad_answer("a list has no items")
    return found


async def pages(connection: Connection, path: str, query: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
    """The items of a list, page after page."""
    cursor: str | None = None
    while True:
        data = await connection.send(Call("GET", path, {**query, "cursor": cursor}, again=True))
        for item in items(data):
            yield item
        following = data.get("next_cursor")
        if following is None:
            return
        if following == cursor:
            raise bad_answer("a page leads to itself")
        cursor = following


def segment(value: str | int) -> str:
    """An id as one piece of a path."""
    text = str(value)
    if text in ("", ".", ".."):
        raise InvalidRequest.of("id", "is no identifier", given=text)
    return quote(text, safe="", errors="surrogateescape")


def encode_query(query: Query) -> str:
    """A query with what is None left out; odd bytes of file names go as they are."""
    pairs = [
        (name, str(one).lower() if isinstance(one, bool) else str(one))
        for name, value in query.items()
        if value is not None
        for one in ([value] if isinstance(value, (str, int)) else value)
    ]
    try:
        return "?" + urlencode(pairs, quote_via=quote, safe="/", errors="surrogateescape") if pairs else ""
    except UnicodeEncodeError:
        raise InvalidRequest("a parameter holds half of a surrogate pair, which no name can hold") from None


def encode_json(value: Any) -> bytes:
    """ASCII JSON, in which lone surrogates (odd bytes of names) survive."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def milliseconds(field: str, seconds: float) -> int:
    """Seconds as the whole milliseconds of the interface."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        raise InvalidRequest.of(field, "must be a number of seconds", given=seconds, allowed="0..")
    return round(seconds * 1000)


async def stream_events(connection: Connection, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """Send, and give the objects of the answer as they come. The request is sent at the first step."""
    reply = await connection.open(call)
    async with contextlib.aclosing(reply), contextlib.aclosing(connection.events(call, reply)) as events:
        async for event in events:
            yield event


async def let_go(act: Callable[[], Awaitable[Any]], *, raising: bool) -> None:
    """End something on the way out. That it is over already is no error; another error is raised unless one is already
    on its way (`raising=False`)."""
    try:
        await act()
    except (Gone, NotFound):
        pass
    except SkerryError:
        if raising:
            raise
