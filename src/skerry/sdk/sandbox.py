"""A sandbox: made, found, used, killed. The asynchronous form, which holds the logic of both."""

import contextlib
import json
import os
import shlex
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

from skerry.core.errors import InvalidRequest, SkerryError
from skerry.core.models import GuestMetrics
from skerry.sdk.client import (
    AsyncClient,
    Call,
    Connection,
    items,
    let_go,
    milliseconds,
    pages,
    segment,
    snapshot_ref,
)
from skerry.sdk.commands import AsyncCommands, Command
from skerry.sdk.either import Either
from skerry.sdk.environment import Env, env_body
from skerry.sdk.errors import ForkIncomplete, bad_answer, from_problem
from skerry.sdk.files import AsyncFiles
from skerry.sdk.io import CREATE_READ_TIMEOUT, AsyncStream, opening
from skerry.sdk.models import PortAddress, SandboxInfo, Snapshot, parse
from skerry.sdk.network import AsyncNetwork, Network, network_body
from skerry.sdk.pty import AsyncPty

PAGE: Final = 100
PORT_MAX: Final = 65535
TRAFFIC_TOKEN: Final = "e2b-traffic-access-token"  # noqa: S105 - a header's name


class CreateOptions(TypedDict, total=False):
    """What a new sandbox may be given; what is left out is the server's default."""

    cpu: int
    memory_mb: int
    disk_mb: int
    timeout: float
    """Seconds until it is killed: 60 to 14400, 300 by default."""
    idle_timeout: float | None
    """Seconds without a request, a running command or an open stream until it is killed; None: never for that."""
    auto_pause: bool
    """Paused instead of killed, at its timeout or idle time (900 seconds then, if none is given)."""
    auto_pause_memory: bool
    """False: `auto_pause` keeps the disk alone, and a resume boots. Not with `auto_resume`."""
    auto_resume: bool
    """The first request to it while it is paused resumes it, and waits."""
    public_ports: bool
    """False: its ports can be reached with its traffic token only."""
    mask_request_host: str | None
    """What its servers see as `Host`; `${PORT}` stands for the port."""
    network: Network | None
    """What may leave it, within what its project allows: False is nothing; `{"allow": […], "deny": […]}`."""
    env: Env
    """For every command, secrets among it. Never given back by the server."""
    metadata: Mapping[str, str]


def create_call(template: str | Snapshot, options: CreateOptions, idempotency_key: str | None) -> Call:
    """The request that makes a sandbox: safe to repeat, since it carries an idempotency key."""
    unknown = set(options) - set(CreateOptions.__annotations__)
    if unknown:
        raise TypeError(f"create() got an unexpected argument {sorted(unknown)[0]!r}")
    body: dict[str, Any] = {"template": snapshot_ref(template)}
    for name, value in options.items():
        if name in ("timeout", "idle_timeout"):
            body[f"{name}_ms"] = None if value is None else milliseconds(name, value)  # pyright: ignore[reportArgumentType]
        elif name == "env":
            body[name] = env_body(value)  # pyright: ignore[reportArgumentType]
        elif name == "network":
            body[name] = network_body(value)  # pyright: ignore[reportArgumentType]
        else:
            body[name] = dict(value) if isinstance(value, Mapping) else value
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return Call("POST", "/v1/sandboxes", json=body, headers=headers, again=True, read_timeout=CREATE_READ_TIMEOUT)


async def find(connection: Connection, sandbox_id: str) -> SandboxInfo:
    path = f"/v1/sandboxes/{segment(sandbox_id)}"
    return parse(SandboxInfo, await connection.send(Call("GET", path, again=True, about={"sandbox_id": sandbox_id})))


async def sandboxes(connection: Connection, filters: Mapping[str, Any]) -> AsyncGenerator[SandboxInfo, None]:
    async for item in pages(connection, "/v1/sandboxes", filters):
        yield parse(SandboxInfo, item)


def list_filters(
    state: str | Iterable[str] | None, metadata: Mapping[str, str] | None, template: str | None
) -> dict[str, Any]:
    for key in metadata or {}:
        if "=" in key:  # the filter is KEY=VALUE: it would look for another key
            raise InvalidRequest.of(
                "metadata", "cannot be looked for by this key", given=key, allowed="a key without ="
            )
    states = [state] if isinstance(state, str) else list(state or ())
    return {
        "state": states or None,
        "metadata": [f"{k}={v}" for k, v in (metadata or {}).items()] or None,
        "template": template,
    }


@opening
async def resumed(
    _cls: "type[AsyncSandbox]",
    sandbox_id: str,
    *,
    timeout: float | None = None,
    memory: bool = True,
    client: AsyncClient | None = None,
    url: str | None = None,
    api_key: str | None = None,
    kill_on_exit: bool = False,
) -> "AsyncSandbox":
    """Resume a paused sandbox and hold it, as `connect` does. One that runs is simply held; its timeout is only
    ever extended. `memory=False`: drop the memory that was kept and boot from the disk; Conflict for one that runs."""
    own = client or AsyncClient(url, api_key)
    return await hold_resumed(own, sandbox_id, timeout, memory=memory, owned=client is None, kill_on_exit=kill_on_exit)


class AsyncSandbox:
    """A running Linux microVM. Made by `create`, found by `connect`.

    `create` gives one that is killed when its `async with` block is left; `connect` one that is not, unless
    `kill_on_exit=True`. `aclose` ends the connection and never the sandbox.
    """

    def __init__(self, client: AsyncClient, info: SandboxInfo, *, owns_client: bool, kill_on_exit: bool) -> None:
        self._client = client
        self._owns_client = owns_client
        self._kill_on_exit = kill_on_exit
        self._connection = client.connection
        self._path = f"/v1/sandboxes/{segment(info.id)}"
        self._about = {"sandbox_id": info.id}
        self.id = info.id
        self.created = info
        """What was recorded when it was made or found; `info()` asks anew."""
        self.commands = AsyncCommands(self._connection, info.id)
        self.files = AsyncFiles(self._connection, info.id)
        self.network = AsyncNetwork(self._connection, info.id)
        self.run = self.commands.run
        self.watch = self.files.watch

    # ------------------------------------------------------------------------------------------------------- finding

    @classmethod
    @opening
    async def create(
        cls,
        template: str | Snapshot = "base",
        *,
        client: AsyncClient | None = None,
        url: str | None = None,
        api_key: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> "AsyncSandbox":
        """Make a sandbox of a template or a snapshot (its id or name, too) and wait until it runs.

        An answer that is lost is asked for again: never two are made.
        """
        own = client or AsyncClient(url, api_key)
        return await make(own, template, options, idempotency_key, owned=client is None)

    @classmethod
    @opening
    async def connect(
        cls,
        sandbox_id: str,
        *,
        client: AsyncClient | None = None,
        url: str | None = None,
        api_key: str | None = None,
        kill_on_exit: bool = False,
    ) -> "AsyncSandbox":
        """Find a sandbox. Its timeout stays as it is. Raises NotFound."""
        own = client or AsyncClient(url, api_key)
        return await hold(own, sandbox_id, owned=client is None, kill_on_exit=kill_on_exit)

    @classmethod
    def list(
        cls,
        *,
        state: str | Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        page_size: int = PAGE,
        client: AsyncClient | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> AsyncStream[SandboxInfo]:
        """The tenant's sandboxes, newest first; pages are fetched as they are needed."""
        own = client or AsyncClient(url, api_key)
        filters = list_filters(state, metadata, template)

        async def found() -> AsyncGenerator[SandboxInfo, None]:
            try:
                async for info in sandboxes(own.connection, {**filters, "limit": page_size}):
                    yield info
            finally:
                if client is None:
                    await own.aclose()

        return AsyncStream(found())

    # --------------------------------------------------------------------------------------------------------- using

    async def info(self) -> SandboxInfo:
        """What is recorded now."""
        return await find(self._connection, self.id)

    async def set_timeout(self, seconds: float) -> SandboxInfo:
        """It is killed `seconds` from now (60 to 14400), whatever was set before."""
        return await self._patch({"timeout_ms": milliseconds("timeout", seconds)})

    async def extend_timeout(self, seconds: float) -> SandboxInfo:
        """It lives at least `seconds` from now. Never shortens."""
        return await self._patch({"extend_timeout_ms": milliseconds("timeout", seconds)})

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Keep it on disk and free its CPU and memory, until it is resumed. Of one that is paused: nothing changes.

        `memory=False` keeps its disk alone: a resume boots, and no process is left.
        """
        body = {"memory": memory}
        return parse(
            SandboxInfo, await self._send("POST", "/pause", json=body, again=True, read_timeout=CREATE_READ_TIMEOUT)
        )

    async def _resume(self, *, timeout: float | None = None, memory: bool = True) -> SandboxInfo:
        """Let it go on: its processes, open files and terminals too. Of one that runs: its timeout is only ever
        extended.

        It lives at least `timeout` seconds from now; its own timeout by default. `memory=False`: drop the memory that
        was kept and boot from the disk; Conflict if it runs.
        """
        return await wake(self._connection, self.id, timeout, memory=memory)

    async def snapshot(
        self,
        name: str | None = None,
        *,
        memory: bool = True,
        secrets: Literal["refuse", "keep"] = "refuse",
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """Keep its state, for `Sandbox.create(snapshot)`. It goes on. `memory=False`: its disk alone.

        The memory of a sandbox that was given secrets may hold them: it is kept with `secrets="keep"` only, else it is
        Conflict `secrets_in_memory`.

        A name that is used again stands for the new one; the one before is found by its id. An answer that is lost is
        asked for again: never two are taken.
        """
        body = {"name": name, "memory": memory, "secrets": secrets}
        return parse(Snapshot, await self._make("/snapshots", body, idempotency_key))

    async def fork(
        self,
        count: int = 1,
        *,
        timeout: float | None = None,
        env: Env | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> "list[AsyncSandbox]":
        """Running copies of it, 1 to 20, with all that runs in it. It goes on. What is None is the original's; `env`
        is laid over the original's. An answer that is lost is asked for again: no copy is made twice.

        Raises ForkIncomplete where some did not come up; those that did are in its `copies`. A copy's `with` block
        kills it at its end, as one of `create` does; it shares the original's connections.
        """
        body: dict[str, Any] = {"count": count}
        if timeout is not None:
            body["timeout_ms"] = milliseconds("timeout", timeout)
        if env is not None:
            body["env"] = env_body(env)
        if metadata is not None:
            body["metadata"] = dict(metadata)
        return self._copies(items(await self._make("/fork", body, idempotency_key)))

    async def _make(self, path: str, body: Mapping[str, Any], idempotency_key: str | None) -> Any:
        """What is safe to repeat, since it carries an idempotency key."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return await self._send("POST", path, json=body, headers=headers, again=True, read_timeout=CREATE_READ_TIMEOUT)

    def _copies(self, found: Sequence[Any]) -> "list[AsyncSandbox]":
        copies: list[AsyncSandbox] = []
        errors: list[SkerryError] = []
        for item in found:
            if isinstance(item, Mapping) and item.get("sandbox") is not None:
                info = parse(SandboxInfo, item["sandbox"])
                copies.append(AsyncSandbox(self._client, info, owns_client=False, kill_on_exit=True))
            else:
                errors.append(from_problem(item.get("error") if isinstance(item, Mapping) else None, 500))
        if errors:
            raise ForkIncomplete(
                f"{len(errors)} of {len(found)} copies of {self.id} did not come up: {errors[0].message}",
                copies=copies,
                errors=errors,
                sandbox_id=self.id,
            )
        return copies

    async def kill(self) -> SandboxInfo:
        """End it. Of one that is over: no error, nothing changes."""
        return parse(SandboxInfo, await self._send("DELETE", "", again=True))

    async def metrics(self) -> GuestMetrics:
        """CPU, memory and disk of the guest."""
        return parse(GuestMetrics, await self._send("GET", "/metrics", again=True))

    async def port(self, port: int) -> PortAddress:
        """Where a port of it is, with the headers that open it. Whether something listens there is another matter."""
        if not 1 <= port <= PORT_MAX:
            raise InvalidRequest.of("port", "must be from 1 to 65535", given=port, allowed="1..65535")
        found = await self._send("GET", "/ports", again=True)
        try:
            url, path, public, token = (found[name] for name in ("url", "path", "public", "token"))
        except (KeyError, TypeError):
            raise bad_answer("ports") from None
        headers = {TRAFFIC_TOKEN: token}
        path_url = self._connection.target.url + path.replace("{port}", str(port))
        return PortAddress(url.replace("{port}", str(port)), {} if public else headers, path_url, headers)

    async def url(self, port: int) -> str:
        """The address of a port, by name. Where ports are not public, `port` gives the headers that it takes, too."""
        return (await self.port(port)).url

    def logs(self) -> AsyncStream[dict[str, Any]]:
        """What was done to it, oldest first: id, at, action, actor, outcome, detail."""
        return AsyncStream(pages(self._connection, f"{self._path}/logs", {"limit": 1000}))

    async def console(self) -> str:
        """The end of its serial console: what its kernel said."""
        data = await self._send("GET", "/logs", query={"console": True}, again=True)
        return str((data or {}).get("console") or "")

    @opening
    async def pty(
        self,
        command: Command | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | os.PathLike[str] | None = None,
        env: Env | None = None,
        user: str | None = None,
        process: str | int | None = None,
        stdout_offset: int = 0,
    ) -> AsyncPty:
        """A terminal with a login shell or `command` in it, or (`process`) one that was left.

        Leaving the `async with` block kills what was started; what was attached to runs on. `stdout_offset`: from
        where on what a terminal that was left has written is given again.
        """
        query = {
            "cols": cols,
            "rows": rows,
            "command": command if command is None or isinstance(command, str) else shlex.join(command),
            "cwd": None if cwd is None else os.fsdecode(cwd),
            "env": json.dumps(env_body(env)) if env else None,
            "user": user,
            "process": None if process is None else str(process),
            "stdout_offset": None if process is None else stdout_offset,
        }
        if process is not None and any(v is not None for v in (command, cwd, env, user)):
            raise InvalidRequest.of("process", "is there already: command, cwd, env and user cannot be given")
        terminal = AsyncPty(self._connection, self.id, kill_on_exit=process is None)
        return await terminal.open(f"{self._path}/pty", query)

    async def aclose(self) -> None:
        """End the connection. The sandbox runs on. May be called twice."""
        if self._owns_client:
            await self._client.aclose()

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._kill_on_exit:
                await let_go(self.kill, raising=kind is None)
        finally:
            await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    resume = Either(resumed, _resume)
    """`AsyncSandbox.resume(id)` gives a sandbox, `sandbox.resume()` its `SandboxInfo`."""

    # -------------------------------------------------------------------------------------------------------- inside

    async def _send(self, method: str, path: str, **options: Any) -> Any:
        return await self._connection.send(Call(method, self._path + path, about=self._about, **options))

    async def _patch(self, change: Mapping[str, int]) -> SandboxInfo:
        return parse(SandboxInfo, await self._send("PATCH", "", json=change, again=True))


@contextlib.asynccontextmanager
async def _closing(client: AsyncClient, *, owned: bool) -> AsyncGenerator[None, None]:
    """Close an own client if what it was made for fails."""
    try:
        yield
    except BaseException:
        if owned:
            await client.aclose()
        raise


async def wake(connection: Connection, sandbox_id: str, timeout: float | None, *, memory: bool = True) -> SandboxInfo:
    """Resume it. May be repeated: it never shortens anything. A boot may not: the first could have been heard."""
    body: dict[str, Any] = {} if timeout is None else {"timeout_ms": milliseconds("timeout", timeout)}
    if not memory:
        body["memory"] = False
    call = Call(
        "POST",
        f"/v1/sandboxes/{segment(sandbox_id)}/resume",
        json=body,
        again=memory,
        read_timeout=CREATE_READ_TIMEOUT,
        about={"sandbox_id": sandbox_id},
    )
    return parse(SandboxInfo, await connection.send(call))


async def hold_resumed(
    client: AsyncClient, sandbox_id: str, timeout: float | None, *, memory: bool, owned: bool, kill_on_exit: bool
) -> AsyncSandbox:
    """A sandbox that was resumed; with `owned`, the client is closed with it."""
    async with _closing(client, owned=owned):
        info = await wake(client.connection, sandbox_id, timeout, memory=memory)
        return AsyncSandbox(client, info, owns_client=owned, kill_on_exit=kill_on_exit)


async def make(
    client: AsyncClient, template: str | Snapshot, options: CreateOptions, idempotency_key: str | None, *, owned: bool
) -> AsyncSandbox:
    """A new sandbox; with `owned`, the client is closed with it."""
    async with _closing(client, owned=owned):
        data = await client.connection.send(create_call(template, options, idempotency_key))
        return AsyncSandbox(client, parse(SandboxInfo, data), owns_client=owned, kill_on_exit=True)


async def hold(client: AsyncClient, sandbox_id: str, *, owned: bool, kill_on_exit: bool) -> AsyncSandbox:
    """A sandbox that there is; with `owned`, the client is closed with it."""
    async with _closing(client, owned=owned):
        info = await find(client.connection, sandbox_id)
        return AsyncSandbox(client, info, owns_client=owned, kill_on_exit=kill_on_exit)
