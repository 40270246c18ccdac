"""`contract.Guest` over TCP: a connection for each operation, none reopened by itself. One that a command or a short
question has done with is kept for the next: a new one costs an emulated guest more than a millisecond."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from skerry.core import ids, limits
from skerry.core.errors import GuestUnreachable, InvalidRequest, SkerryError
from skerry.core.models import FileInfo, GuestMetrics, Identity, ProcessInfo, ProcessSpec, PtySize
from skerry.guest import protocol
from skerry.guest.protocol import ProtocolError
from skerry.node.guestlink import parse
from skerry.node.guestlink.channel import MATCHED_BUFFER, WATCH_BUFFER, Channel, Gone, prepare
from skerry.node.guestlink.streams import (
    LinkConnection,
    LinkFileDownload,
    LinkItems,
    LinkProcessStream,
    LinkWatchStream,
)
from skerry.node.guestlink.upload import upload

CONNECT_S = 10.0
ANSWER_S = 30.0
START_S = 90.0
"""For a process: in a guest that is busy, or told to start a hundred at once, the last of them waits long. Callers have
deadlines of their own, which are shorter."""
LONG_S = 600.0
"""For what takes as long as there are files: remove, move, the end of a write, the arming of a recursive watch."""


IDLE_MAX = 4
"""Connections that are kept while nothing is asked."""


class GuestLink:
    """Speaks to the agent of one sandbox.

    `open_socket` gives a fresh TCP socket, not connected, in the sandbox's network namespace. `gone` may be set by
    the owner: once it returns an error, every broken line and every new call raises that instead.
    """

    def __init__(
        self,
        sandbox_id: str,
        open_socket: Callable[[], socket.socket],
        *,
        address: tuple[str, int] = (protocol.GUEST_ADDRESS, protocol.PORT),
        token: str | None = None,
        generation: int = 0,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.gone: Gone = _not_gone
        self._open_socket = open_socket
        self._address = address
        self._token = token
        self._generation = generation
        self._channels: set[Channel] = set()
        self._idle: list[socket.socket] = []

    # ------------------------------------------------------------------------------------------------------ the link

    @property
    def open_connections(self) -> int:
        """Operations and streams under way."""
        return len(self._channels)

    def abort(self, error: SkerryError | None = None) -> None:
        """Break every connection: those who wait on them get `error`, or what `gone` says, or a broken line's."""
        self._close_idle()
        for channel in tuple(self._channels):
            channel.abort(error)

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _keep(self, sock: socket.socket) -> None:
        if self.gone() is not None or len(self._idle) >= IDLE_MAX:
            sock.close()
            return
        # A guest that stands still for long answers no probe, and is none the less there when it goes on.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        self._idle.append(sock)

    def _kept(self) -> socket.socket | None:
        """An idle connection that the agent has not closed."""
        while self._idle:
            sock = self._idle.pop()
            try:
                sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return sock
            except OSError:
                pass
            sock.close()
        return None

    async def ping(self, *, timeout: float = CONNECT_S) -> bool:
        """Whether the agent has been identified. GuestUnreachable where it does not answer within `timeout` seconds."""
        try:
            answer = await self._call("ping", {}, safe=True, connect_s=timeout, answer_s=timeout)
        except SkerryError as e:
            if e.code == "outcome_unknown":
                raise GuestUnreachable(e.message, sandbox_id=self.sandbox_id) from e
            raise
        return bool(answer.get("identified"))

    async def identify(self, identity: Identity) -> list[str]:
        """Tell the guest who it is; from then on this link speaks with that token and generation.

        Returns what the guest could not do (a line each; an odd image may have no /etc). Every connection that was
        open to it before is closed by the agent."""
        answer = await self._call(
            "identify",
            {
                "token": identity.token,
                "generation": identity.generation,
                "hostname": identity.hostname,
                "machine_id": identity.machine_id,
                "wall_clock_ns": identity.wall_clock_ns,
                "entropy": identity.entropy.hex(),
                "env": identity.env,
                "default_user": identity.default_user,
                "default_cwd": identity.default_cwd,
                "fresh": identity.fresh,
            },
            answer_s=LONG_S,
        )
        self._token, self._generation = identity.token, identity.generation
        problems = answer.get("problems")
        return [str(p)[:300] for p in problems[:20]] if isinstance(problems, list) else []

    async def freeze(self, *, sync: bool) -> bool:
        """Let all commands stand still until `thaw` or the next identity; `sync`: write the disk's cache out too.

        False where some could not be stopped."""
        self._close_idle()  # what is saved of the guest is to know of no connection
        answer = await self._call("freeze", {"sync": sync}, safe=True, answer_s=LONG_S, keep=False)
        return bool(answer.get("frozen"))

    async def thaw(self) -> None:
        await self._call("thaw", {}, safe=True)

    # ----------------------------------------------------------------------------------------------------- processes

    async def start(self, spec: ProcessSpec) -> LinkProcessStream:
        request = dataclasses.asdict(spec)
        channel, answer = await self._open("start", request, answer_s=START_S, keep=True)
        return LinkProcessStream(channel, channel.parse(parse.process_info, answer.get("process")))

    async def attach(
        self,
        process_id: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        before: int = 0,
        follow: bool = True,
    ) -> LinkProcessStream:
        request = {
            "process_id": process_id,
            "stdout_offset": stdout_offset,
            "stderr_offset": stderr_offset,
            "before": before,
            "follow": follow,
        }
        channel, answer = await self._open("attach", request, safe=True, keep=True)
        process = channel.parse(parse.process_info, answer.get("process"))
        begins = channel.parse(parse.begins, answer.get("begins"))
        return LinkProcessStream(channel, process, begins, follow=follow)

    async def processes(self) -> list[ProcessInfo]:
        channel = await self._connect("processes", {}, safe=True)
        try:
            async with asyncio.timeout(ANSWER_S):
                return [channel.parse(parse.process_info, item) async for item in LinkItems(channel, endless=False)]
        except TimeoutError:
            raise channel.failure("no answer in time") from None
        finally:
            channel.close()

    async def signal(self, process_id: str, signal: str) -> None:
        await self._call("signal", {"process_id": process_id, "signal": signal})

    async def kill_process(self, process_id: str) -> bool:
        return (await self._call("kill_process", {"process_id": process_id})).get("killed") is True

    async def write_stdin(self, process_id: str, data: AsyncIterator[bytes]) -> int:
        channel = await self._connect("write_stdin", {"process_id": process_id})
        answer = await upload(channel, data, LONG_S)
        return channel.parse(parse.integer, answer, "written")

    async def close_stdin(self, process_id: str) -> None:
        await self._call("close_stdin", {"process_id": process_id})

    async def resize_pty(self, process_id: str, size: PtySize) -> None:
        request = {"process_id": process_id, "pty": {"cols": size.cols, "rows": size.rows}}
        await self._call("resize_pty", request)

    # --------------------------------------------------------------------------------------------------------- files

    async def stat(
        self, path: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo:
        request = {"path": path, "user": user, "detail": detail, "privileged": privileged}
        return await self._info("stat", request, safe=True)

    async def list_dir(
        self, path: str, *, depth: int = 1, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> AsyncIterator[FileInfo]:
        request = {"path": path, "depth": depth, "user": user, "detail": detail, "privileged": privileged}
        channel, _ = await self._open("list_dir", request, safe=True)
        try:
            async for item in LinkItems(channel, endless=False):
                yield channel.parse(parse.file_info, item)
        finally:
            channel.close()

    async def read_file(
        self, path: str, *, user: str | None = None, offset: int = 0, length: int | None = None,
        privileged: bool = False,
    ) -> LinkFileDownload:  # fmt: skip
        request = {"path": path, "user": user, "offset": offset, "length": length, "privileged": privileged}
        channel, answer = await self._open("read_file", request, safe=True)
        info = channel.parse(parse.file_info, answer.get("info"))
        return LinkFileDownload(channel, info, channel.parse(parse.integer, answer, "length"))

    async def write_file(
        self,
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
        request = {
            "path": path,
            "user": user,
            "mode": mode,
            "mtime_ns": mtime_ns,
            "size": size,
            "xattrs": None if xattrs is None else dict(xattrs),
            "in_place": in_place,
            "privileged": privileged,
        }
        channel = await self._connect("write_file", request)
        answer = await upload(channel, data, LONG_S)
        return self._info_of(channel, answer)

    async def make_dir(
        self, path: str, *, user: str | None = None, mode: int | None = None, detail: bool = False,
        privileged: bool = False,
    ) -> tuple[FileInfo, bool]:  # fmt: skip
        request = {"path": path, "user": user, "mode": mode, "detail": detail, "privileged": privileged}
        channel, answer = await self._open("make_dir", request)
        channel.close()
        return self._info_of(channel, answer), channel.parse(parse.flag, answer, "new")

    async def move(
        self, source: str, target: str, *, user: str | None = None, detail: bool = False, privileged: bool = False
    ) -> FileInfo:
        request = {"source": source, "target": target, "user": user, "detail": detail, "privileged": privileged}
        return await self._info("move", request, answer_s=LONG_S)

    async def remove(self, path: str, *, user: str | None = None, privileged: bool = False) -> None:
        await self._call("remove", {"path": path, "user": user, "privileged": privileged}, answer_s=LONG_S)

    async def symlink(self, target: str, path: str, *, user: str | None = None) -> FileInfo:
        return await self._info("symlink", {"target": target, "path": path, "user": user})

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> FileInfo:
        return await self._info("chmod", {"path": path, "mode": mode, "user": user})

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None, privileged: bool = False
    ) -> LinkWatchStream:
        watch_id = ids.new_id(ids.WATCH)
        request = {
            "watch_id": watch_id, "path": path, "recursive": recursive, "user": user, "privileged": privileged,
        }  # fmt: skip
        channel, _ = await self._open("watch", request, safe=True, answer_s=LONG_S, receive_buffer=WATCH_BUFFER)
        return LinkWatchStream(channel, watch_id, 0)

    async def attach_watch(self, watch_id: str, *, offset: int = 0) -> LinkWatchStream:
        request = {"watch_id": watch_id, "offset": offset}
        channel, _ = await self._open("attach_watch", request, safe=True, receive_buffer=WATCH_BUFFER)
        return LinkWatchStream(channel, watch_id, offset)

    async def settle_watch(self, watch_id: str) -> int:
        channel, answer = await self._open("settle_watch", {"watch_id": watch_id}, safe=True)
        channel.close()
        return channel.parse(parse.integer, answer, "offset")

    async def end_watch(self, watch_id: str) -> None:
        await self._call("end_watch", {"watch_id": watch_id})

    # ------------------------------------------------------------------------------------------------- machine, ports

    async def metrics(self) -> GuestMetrics:
        channel, answer = await self._open("metrics", {}, safe=True)
        channel.close()
        return channel.parse(parse.metrics, answer.get("metrics"))

    async def connect(self, port: int) -> LinkConnection:
        channel, _ = await self._open("connect", {"port": port})
        return LinkConnection(channel)

    async def power_off(self) -> None:
        """The guest writes its disks and ends. Returns when it has heard."""
        await self._call("poweroff", {})

    # ----------------------------------------------------------------------------------------------------- the calls

    def _is_gone(self) -> SkerryError | None:
        return self.gone()  # looked up late: the owner may set it while connections are open

    async def _connect(
        self, op: str, request: dict[str, Any], *, safe: bool = False, connect_s: float = CONNECT_S,
        receive_buffer: int | None = None, keep: bool = False,
    ) -> Channel:  # fmt: skip
        """A connection on which the request has been sent. `keep`: a kept one will do, and it may be kept again."""
        over = self.gone()
        if over is not None:
            raise over
        hello = {"v": protocol.VERSION, "op": op, "token": self._token, "generation": self._generation}
        if keep:
            hello["keep"] = True
        kept = self._kept() if keep else None
        try:
            sock = kept or self._open_socket()
            if kept is None:
                prepare(sock)
                size = MATCHED_BUFFER if keep else receive_buffer
                if size is not None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        except OSError as e:
            raise self.gone() or GuestUnreachable(
                f"sandbox {self.sandbox_id}: cannot open a socket: {e.strerror or e}", sandbox_id=self.sandbox_id
            ) from e
        channel = Channel(
            sock, self.sandbox_id, self._is_gone, self._channels.discard,
            keep=self._keep if keep else None, connected=kept is not None,
        )  # fmt: skip
        channel.safe = safe
        self._channels.add(channel)
        try:
            async with asyncio.timeout(connect_s):
                await channel.call(hello, request, self._address)
        except ProtocolError:
            channel.close()
            raise _too_long() from None
        except TimeoutError:
            channel.fail("cannot connect: no answer in time")
        except BaseException:
            channel.close()
            raise
        return channel

    async def _open(
        self, op: str, request: dict[str, Any], *, safe: bool = False, connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S, receive_buffer: int | None = None, keep: bool = False,
    ) -> tuple[Channel, dict[str, Any]]:  # fmt: skip
        """A connection on which the agent has said OK, and what it said."""
        channel = await self._connect(
            op, request, safe=safe, connect_s=connect_s, receive_buffer=receive_buffer, keep=keep
        )
        try:
            async with asyncio.timeout(answer_s):
                answer = await channel.expect(protocol.OK)
            if not isinstance(answer, dict):
                channel.fail("the guest breaks the protocol: not an object")
        except TimeoutError:
            channel.fail("no answer in time")
        except BaseException:
            channel.close()
            raise
        return channel, answer

    async def _call(
        self, op: str, request: dict[str, Any], *, safe: bool = False, connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S, keep: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        channel, answer = await self._open(op, request, safe=safe, connect_s=connect_s, answer_s=answer_s, keep=keep)
        channel.done()
        return answer

    async def _info(
        self, op: str, request: dict[str, Any], *, safe: bool = False, answer_s: float = ANSWER_S
    ) -> FileInfo:
        channel, answer = await self._open(op, request, safe=safe, answer_s=answer_s)
        channel.close()
        return self._info_of(channel, answer)

    @staticmethod
    def _info_of(channel: Channel, answer: Any) -> FileInfo:
        said = answer.get("info") if isinstance(answer, dict) else None
        return channel.parse(parse.file_info, said)


def _not_gone() -> SkerryError | None:
    return None


def _too_long() -> InvalidRequest:
    return InvalidRequest.of(
        "argv",
        "command, environment and paths together are too long",
        allowed=f"{limits.COMMAND_BYTES_MAX} bytes of command, {limits.ENV_BYTES_MAX} bytes of environment",
        code="command_too_long",
    )
