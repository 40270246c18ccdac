"""`skerry port`: the address of a sandbox's port, or a port of this machine that leads there."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import asyncio
import contextlib
import signal
import ssl
import sys
from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from skerry.cli.output import JsonOption, note, write_error, write_json
from skerry.cli.sandboxes import Id
from skerry.core.errors import InvalidRequest, SkerryError, Unavailable
from skerry.sdk import Sandbox
from skerry.sdk.models import PortAddress

HEAD_MAX: Final = 64 * 1024
OPEN_S: Final = 200.0
"""So long a sandbox may take to come back from its rest for a connection."""

Port = Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="A TCP port inside it.")]
Forward = Annotated[
    int | None,
    typer.Option(
        "--forward",
        "-f",
        metavar="LOCAL",
        min=0,
        max=65535,
        help="Lead this port of 127.0.0.1 there; 0: a free one.",
    ),
]


def port(sandbox: Id, port: Port, forward: Forward = None, as_json: JsonOption = False) -> None:
    """Print the address of a sandbox's port; with --forward, lead a local TCP port there until Ctrl-C."""
    with Sandbox.connect(sandbox) as box:
        found = box.port(port)
    if forward is not None:
        asyncio.run(_serve(found, forward, as_json=as_json))
    elif as_json:
        write_json(found)
    else:
        sys.stdout.write(found.url + "\n")
        for name, value in found.headers.items():
            note(f"send with it: {name}: {value}")


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """A signal cancels the task that is in here, and the program exits as one that it ended. Raised from a handler in
    the middle of the loop's own work, an exception could leave connections that never close."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 - called by one
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if not came:
            raise
        raise typer.Exit(128 + came[0]) from None


async def _serve(found: PortAddress, local: int, *, as_json: bool) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _forward(found, reader, writer)
        except SkerryError as error:
            write_error(error, as_json=as_json)
            writer.transport.abort()
        except OSError:
            writer.transport.abort()

    try:
        server = await asyncio.start_server(one, "127.0.0.1", local)
    except OSError as error:
        raise InvalidRequest.of("--forward", f"cannot listen: {error.strerror}", given=local) from error
    with _ending_by_signal():
        async with server:
            await _announce_and_serve(server, as_json=as_json)


async def _announce_and_serve(server: asyncio.Server, *, as_json: bool) -> None:
    host, number = server.sockets[0].getsockname()[:2]
    if as_json:
        write_json({"host": host, "port": number})
    else:
        sys.stdout.write(f"{host}:{number}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def _forward(found: PortAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there = await tunnel(found)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass_on(reader, there[1]))
            group.create_task(_pass_on(there[0], writer))
    except* OSError:
        writer.transport.abort()  # what broke on one side is not to look like an end on the other
        there[1].transport.abort()
    finally:
        writer.close()
        there[1].close()


async def tunnel(found: PortAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The bare bytes of a connection to the port. Raises Unavailable with what the server said."""
    url = urlsplit(found.path_url)
    secure = ssl.create_default_context() if url.scheme == "https" else None
    number = url.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(url.hostname, number, ssl=secure, limit=HEAD_MAX)
        wanted = {"Host": url.netloc, "Connection": "Upgrade", "Upgrade": "skerry-tcp", **found.path_headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in wanted.items())
        writer.write(f"GET {url.path} HTTP/1.1\r\n{head}\r\n".encode("ascii"))
        async with asyncio.timeout(OPEN_S):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            if answer.split(" ", 2)[1:2] == ["101"]:
                return reader, writer
            said = (await reader.read(HEAD_MAX)).decode("utf-8", "replace")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unavailable(f"the server cannot be reached: {error}", code="unavailable") from error
    writer.close()
    raise Unavailable(f"the port cannot be reached: {said.strip() or answer.splitlines()[0]}", code="unavailable")


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()
    else:  # under TLS a side cannot end alone
        target.close()
