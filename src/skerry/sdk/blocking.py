"""The client that blocks: the same methods, each run to its end before it returns.

Nothing is decided here. A class holds its asynchronous twin, over an IO that never suspends; a method is the twin's
method, with its signature and its words.
"""

import builtins
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Concatenate, Generic, ParamSpec, TypeVar, Unpack

import httpx

from skerry.sdk.client import AsyncClient, AsyncEgress, AsyncKeys, AsyncSecrets, AsyncSnapshots, Connection
from skerry.sdk.commands import AsyncCommands
from skerry.sdk.config import discover
from skerry.sdk.either import Either
from skerry.sdk.environment import Env
from skerry.sdk.errors import ForkIncomplete
from skerry.sdk.files import AsyncFiles
from skerry.sdk.io import AsyncStream, finish
from skerry.sdk.io_blocking import BlockingIO
from skerry.sdk.models import CommandResult, ExitInfo, ProcessEvent, SandboxInfo, Snapshot
from skerry.sdk.network import AsyncNetwork
from skerry.sdk.process import AsyncProcess
from skerry.sdk.pty import AsyncPty
from skerry.sdk.sandbox import PAGE, AsyncSandbox, CreateOptions, hold, hold_resumed, make

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
W = TypeVar("W")


class Twin(Generic[A]):
    """Something that has an asynchronous twin."""

    def __init__(self, twin: A) -> None:
        self.twin = twin

    def __repr__(self) -> str:
        return repr(self.twin).replace("<Async", "<", 1)


def blocking(method: Callable[Concatenate[A, P], Awaitable[T]]) -> Callable[Concatenate[Twin[A], P], T]:
    """The twin's method, run to its end."""

    @functools.wraps(method)
    def call(self: Twin[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(self.twin, *args, **kwargs))

    return call


def wrapping(
    wrap: Callable[[T], W], method: Callable[Concatenate[A, P], Awaitable[T]]
) -> Callable[Concatenate[Twin[A], P], W]:
    """The twin's method, whose result has a blocking form of its own."""

    @functools.wraps(method)
    def call(self: Twin[A], *args: P.args, **kwargs: P.kwargs) -> W:
        return wrap(finish(method(self.twin, *args, **kwargs)))

    return call


class Stream(Generic[T]):
    """Values as they come: `for`. Use it with `with`, or `close` it, unless it is read to its end."""

    def __init__(self, twin: AsyncStream[T]) -> None:
        self._twin = twin

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return finish(anext(self._twin))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> "Stream[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and free the connection. May be called twice."""
        finish(self._twin.aclose())


def streaming(method: Callable[Concatenate[A, P], AsyncStream[T]]) -> Callable[Concatenate[Twin[A], P], Stream[T]]:
    """The twin's method that gives a stream."""

    @functools.wraps(method)
    def call(self: Twin[A], *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        return Stream(method(self.twin, *args, **kwargs))

    return call


class Keys(Twin[AsyncKeys]):
    """The API keys of a tenant. Needs a key with the scope `keys:write`."""

    create = blocking(AsyncKeys.create)
    list = blocking(AsyncKeys.list)
    revoke = blocking(AsyncKeys.revoke)


class Snapshots(Twin[AsyncSnapshots]):
    """The snapshots of a project. `snapshot` is one, its id, or its name."""

    list = blocking(AsyncSnapshots.list)
    get = blocking(AsyncSnapshots.get)
    delete = blocking(AsyncSnapshots.delete)


class Secrets(Twin[AsyncSecrets]):
    """The secrets of a project. Needs a key with the scopes `secrets:read` and `secrets:write`."""

    set = blocking(AsyncSecrets.set)
    list = blocking(AsyncSecrets.list)
    get = blocking(AsyncSecrets.get)
    delete = blocking(AsyncSecrets.delete)


class Egress(Twin[AsyncEgress]):
    """The policies of a project. Needs a key with the scopes `egress:read` and `egress:write`."""

    get = blocking(AsyncEgress.get)
    set = blocking(AsyncEgress.set)
    reset = blocking(AsyncEgress.reset)


class Network(Twin[AsyncNetwork]):
    """What may leave a sandbox."""

    get = blocking(AsyncNetwork.get)
    update = blocking(AsyncNetwork.update)
    events = streaming(AsyncNetwork.events)


class Client(Twin[AsyncClient]):
    """A connection to one server, to be shared by many sandboxes: `Sandbox.create(…, client=client)`.

    `transport` replaces the network, as httpx knows it. May be used from several threads.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        target = discover(url, api_key)
        io = BlockingIO(target, transport=transport)
        super().__init__(AsyncClient.over(Connection(target, io)))
        self.keys = Keys(self.twin.keys)
        self.snapshots = Snapshots(self.twin.snapshots)
        self.secrets = Secrets(self.twin.secrets)
        self.egress = Egress(self.twin.egress)

    @property
    def url(self) -> str:
        return self.twin.url

    server = blocking(AsyncClient.server)
    pool = blocking(AsyncClient.pool)
    images = blocking(AsyncClient.images)
    collect_images = blocking(AsyncClient.collect_images)
    close = blocking(AsyncClient.aclose)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process(Twin[AsyncProcess]):
    """A process in a sandbox. It runs on whether or not anybody holds this.

    What it wrote is kept here as far as it was received: by iterating, by `wait`, or by `poll`.
    """

    @property
    def process_id(self) -> str:
        """For `commands.attach`."""
        return self.twin.process_id

    @property
    def pid(self) -> int:
        """In the guest."""
        return self.twin.pid

    @property
    def stdout(self) -> str:
        """What was received of it so far, as text."""
        return self.twin.stdout

    @property
    def stderr(self) -> str:
        return self.twin.stderr

    @property
    def stdout_bytes(self) -> bytes:
        return self.twin.stdout_bytes

    @property
    def stderr_bytes(self) -> bytes:
        return self.twin.stderr_bytes

    @property
    def stdout_offset(self) -> int:
        return self.twin.stdout_offset

    @property
    def stderr_offset(self) -> int:
        return self.twin.stderr_offset

    @property
    def result(self) -> CommandResult | None:
        """How it ended, once that was received; None before."""
        return self.twin.result

    def __iter__(self) -> Iterator[ProcessEvent]:
        return self.events()

    info = blocking(AsyncProcess.info)
    events = streaming(AsyncProcess.events)
    wait = blocking(AsyncProcess.wait)
    poll = blocking(AsyncProcess.poll)
    signal = blocking(AsyncProcess.signal)
    kill = blocking(AsyncProcess.kill)
    send_stdin = blocking(AsyncProcess.send_stdin)
    close_stdin = blocking(AsyncProcess.close_stdin)
    resize = blocking(AsyncProcess.resize)


class Commands(Twin[AsyncCommands]):
    """The processes of a sandbox."""

    run = blocking(AsyncCommands.run)
    stream = streaming(AsyncCommands.stream)
    list = blocking(AsyncCommands.list)
    get = blocking(AsyncCommands.get)
    kill = blocking(AsyncCommands.kill)
    start = wrapping(Process, AsyncCommands.start)
    attach = wrapping(Process, AsyncCommands.attach)


class Files(Twin[AsyncFiles]):
    """Read, write, list, move, watch. Paths are the guest's unless they are called `local`."""

    read = blocking(AsyncFiles.read)
    read_bytes = blocking(AsyncFiles.read_bytes)
    stream = streaming(AsyncFiles.stream)
    write = blocking(AsyncFiles.write)
    write_many = blocking(AsyncFiles.write_many)
    upload = blocking(AsyncFiles.upload)
    download = blocking(AsyncFiles.download)
    walk = streaming(AsyncFiles.walk)
    list = blocking(AsyncFiles.list)
    stat = blocking(AsyncFiles.stat)
    exists = blocking(AsyncFiles.exists)
    mkdir = blocking(AsyncFiles.mkdir)
    move = blocking(AsyncFiles.move)
    symlink = blocking(AsyncFiles.symlink)
    chmod = blocking(AsyncFiles.chmod)
    remove = blocking(AsyncFiles.remove)
    watch = wrapping(Stream, AsyncFiles.watch)


class Pty(Twin[AsyncPty]):
    """An open terminal. Leaving its `with` block kills what runs in it, unless it was attached to.

    One thread may read while another writes.
    """

    @property
    def process(self) -> Process:
        """The process in it."""
        return Process(self.twin.process)

    @property
    def exit(self) -> ExitInfo | None:
        """How it ended, once that was received."""
        return self.twin.exit

    send = blocking(AsyncPty.send)
    recv = blocking(AsyncPty.recv)
    resize = blocking(AsyncPty.resize)
    wait = blocking(AsyncPty.wait)
    close = blocking(AsyncPty.aclose)

    def __iter__(self) -> Iterator[bytes]:
        while (data := self.recv()) is not None:
            yield data

    def __enter__(self) -> "Pty":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        finish(self.twin.__aexit__(kind))


def resumed(
    cls: "type[Sandbox]",
    sandbox_id: str,
    *,
    timeout: float | None = None,
    memory: bool = True,
    client: Client | None = None,
    url: str | None = None,
    api_key: str | None = None,
    kill_on_exit: bool = False,
) -> "Sandbox":
    """Resume a paused sandbox and hold it, as `connect` does. One that runs is simply held; its timeout is only
    ever extended. `memory=False`: drop the memory that was kept and boot from the disk; Conflict for one that runs."""
    own = client or Client(url, api_key)
    owned = client is None
    held = hold_resumed(own.twin, sandbox_id, timeout, memory=memory, owned=owned, kill_on_exit=kill_on_exit)
    return cls(finish(held))


class Sandbox(Twin[AsyncSandbox]):
    """A running Linux microVM. Made by `create`, found by `connect`.

    `create` gives one that is killed when its `with` block is left; `connect` one that is not, unless
    `kill_on_exit=True`. `close` ends the connection and never the sandbox.
    """

    def __init__(self, twin: AsyncSandbox) -> None:
        super().__init__(twin)
        self.id = twin.id
        self.created = twin.created
        """What was recorded when it was made or found; `info()` asks anew."""
        self.commands = Commands(twin.commands)
        self.files = Files(twin.files)
        self.network = Network(twin.network)
        self.run = self.commands.run
        self.watch = self.files.watch

    @classmethod
    def create(
        cls,
        template: str | Snapshot = "base",
        *,
        client: Client | None = None,
        url: str | None = None,
        api_key: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> "Sandbox":
        """Make a sandbox of a template or a snapshot (its id or name, too) and wait until it runs.

        An answer that is lost is asked for again: never two are made.
        """
        own = client or Client(url, api_key)
        return cls(finish(make(own.twin, template, options, idempotency_key, owned=client is None)))

    @classmethod
    def connect(
        cls,
        sandbox_id: str,
        *,
        client: Client | None = None,
        url: str | None = None,
        api_key: str | None = None,
        kill_on_exit: bool = False,
    ) -> "Sandbox":
        """Find a sandbox. Its timeout stays as it is. Raises NotFound."""
        own = client or Client(url, api_key)
        return cls(finish(hold(own.twin, sandbox_id, owned=client is None, kill_on_exit=kill_on_exit)))

    @classmethod
    def list(
        cls,
        *,
        state: str | Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        page_size: int = PAGE,
        client: Client | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> Iterator[SandboxInfo]:
        """The tenant's sandboxes, newest first; pages are fetched as they are needed."""
        own = client or Client(url, api_key)
        try:
            with Stream(
                AsyncSandbox.list(
                    state=state, metadata=metadata, template=template, page_size=page_size, client=own.twin
                )
            ) as found:
                yield from found
        finally:
            if client is None:
                own.close()

    info = blocking(AsyncSandbox.info)
    set_timeout = blocking(AsyncSandbox.set_timeout)
    extend_timeout = blocking(AsyncSandbox.extend_timeout)
    kill = blocking(AsyncSandbox.kill)
    pause = blocking(AsyncSandbox.pause)
    resume = Either(resumed, blocking(AsyncSandbox._resume))
    """`Sandbox.resume(id)` gives a sandbox, `sandbox.resume()` its `SandboxInfo`."""
    snapshot = blocking(AsyncSandbox.snapshot)
    metrics = blocking(AsyncSandbox.metrics)
    port = blocking(AsyncSandbox.port)
    url = blocking(AsyncSandbox.url)
    logs = streaming(AsyncSandbox.logs)
    console = blocking(AsyncSandbox.console)
    pty = wrapping(Pty, AsyncSandbox.pty)
    close = blocking(AsyncSandbox.aclose)

    def fork(
        self,
        count: int = 1,
        *,
        timeout: float | None = None,
        env: Env | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> "builtins.list[Sandbox]":
        """Running copies of it, 1 to 20, with all that runs in it. It goes on. What is None is the original's; `env`
        is laid over the original's. An answer that is lost is asked for again: no copy is made twice.

        Raises ForkIncomplete where some did not come up; those that did are in its `copies`. A copy's `with` block
        kills it at its end, as one of `create` does; it shares the original's connections.
        """
        try:
            made = self.twin.fork(count, timeout=timeout, env=env, metadata=metadata, idempotency_key=idempotency_key)
            twins = finish(made)
        except ForkIncomplete as incomplete:
            incomplete.copies = tuple(Sandbox(twin) for twin in incomplete.copies)
            raise
        return [Sandbox(twin) for twin in twins]

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        finish(self.twin.__aexit__(kind))
