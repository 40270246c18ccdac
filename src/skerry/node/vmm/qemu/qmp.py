"""QEMU's monitor: a thin layer over the `qemu.qmp` library that gives every call a deadline and our errors."""

import asyncio
import base64
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from qemu.qmp import EventListener, QMPClient, QMPError

from skerry.core.errors import InternalError
from skerry.node import host_disk
from skerry.node.aio import finish
from skerry.node.vmm.qemu.argv import MONITOR

CALL_DEADLINE_S: Final = 10.0

logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)  # it logs a lost connection as an error; we handle that


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name of a file, for as long as the context lasts: a socket's address holds 107 bytes at most."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Monitor:
    """A connection to one QEMU. QEMU serves one at a time; a new server connects when the old one is gone."""

    def __init__(self, client: QMPClient, over: EventListener, line: socket.socket) -> None:
        self._client = client
        self._over = over
        self._line = line  # the library's own way to send a descriptor knows asyncio's loop only
        self._sending = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._closed = False

    @classmethod
    async def connect(cls, run_dir: Path, name: str, *, deadline_s: float) -> "Monitor":
        """Raises InternalError (`step` monitor) if QEMU does not answer in time."""
        client = QMPClient(name)
        over = EventListener(names=("SHUTDOWN", "GUEST_PANICKED"))
        client.register_listener(over)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)  # noqa: FBT003 - its name
        line = connection.dup()
        line.setblocking(False)  # noqa: FBT003 - its name
        try:
            async with asyncio.timeout(deadline_s):
                with short_path(run_dir / MONITOR) as path:
                    await asyncio.get_running_loop().sock_connect(connection, path)
                await client.connect(connection)
        except BaseException as error:
            with contextlib.suppress(QMPError, OSError, EOFError):
                await client.disconnect()
            connection.close()
            line.close()
            if isinstance(error, (OSError, QMPError, EOFError, TimeoutError)):
                raise InternalError(f"QEMU's monitor does not answer: {error!r}", step="monitor") from error
            raise
        return cls(client, over, line)

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Raises InternalError (`step` monitor): refused, connection lost, or no answer in ten seconds."""
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                return await self._client.execute(command, arguments)
        except (QMPError, TimeoutError, OSError, EOFError) as error:
            raise InternalError(f"{command}: {error or 'no answer in time'}", step="monitor") from error

    async def send_descriptor(self, name: str, fd: int) -> None:
        """Hand over an open file descriptor, which QEMU then knows by `name`."""
        async with self._sending:
            self._send(fd)
            await self.execute("getfd", {"fdname": name})

    async def add_file(self, path: Path, *ways: int) -> str:
        """Hand over a file that QEMU itself cannot get at, opened in each of these ways (`os.O_…`); gives the path by
        which QEMU opens it, in one of just these ways. QEMU keeps them. Raises NoSpace, InternalError."""
        known: dict[str, int] = {}
        for way in ways:
            try:
                fd = os.open(path, way | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise host_disk.failure(error, f"{path} could not be opened", "monitor") from error
            try:
                async with self._sending:
                    self._send(fd)
                    known = {"fdset-id": int((await self.execute("add-fd", known))["fdset-id"])}
            finally:
                os.close(fd)
        return f"/dev/fdset/{known['fdset-id']}"

    @contextlib.asynccontextmanager
    async def file(self, path: Path, way: int) -> AsyncIterator[str]:
        """`add_file` for as long as the context lasts."""
        name = await self.add_file(path, way)
        try:
            yield name
        finally:
            await finish(self.execute("remove-fd", {"fdset-id": int(name.rpartition("/")[2])}))

    def _send(self, fd: int) -> None:
        """With a space, which QEMU skips: what comes next takes the descriptor."""
        try:
            socket.send_fds(self._line, [b" "], [fd])
        except OSError as error:
            raise InternalError(f"a descriptor could not be handed over: {error}", step="monitor") from error

    async def status(self) -> str:
        """Such as "running", "paused", "shutdown"."""
        return str((await self.execute("query-status"))["status"])

    async def console(self, size: int) -> bytes:
        """Take what the console's ring holds."""
        text = await self.execute("ringbuf-read", {"device": "console", "size": size, "format": "base64"})
        return base64.b64decode(text)

    async def guest_over(self) -> str:
        """Ends when the guest shut down, with QEMU's word for the reason. Never ends if QEMU dies instead."""
        event = await self._over.get()
        data: Any = event.get("data")
        return str(data["reason"] if data and "reason" in data else event["event"])

    async def close(self) -> None:
        """Idempotent, and safe to call concurrently, which the library's own is not."""
        async with self._closing:
            if not self._closed:
                self._closed = True
                self._line.close()
                await self._disconnect()

    async def _disconnect(self) -> None:
        with contextlib.suppress(QMPError, OSError, EOFError, TimeoutError):  # the line may be broken already
            async with asyncio.timeout(CALL_DEADLINE_S):
                await self._client.disconnect()
