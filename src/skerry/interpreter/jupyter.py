"""Contexts that are Jupyter kernels: Python (ours, see kernel.py), JavaScript and TypeScript (Deno's)."""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import write_connection_file

from skerry.interpreter import events
from skerry.interpreter.context import DiedError, Execution
from skerry.interpreter.engine import ProcessEngine
from skerry.interpreter.events import Event
from skerry.interpreter.kernels import Process, Zygote, spawn
from skerry.interpreter.pipes import first_readable

START_S: Final = 120.0
DENO: Final = "/usr/local/bin/deno"
Message = dict[str, Any]

DENO_PRELUDE: Final = """
globalThis.require ??= (await import("node:module")).createRequire(Deno.cwd() + "/");
globalThis.process ??= (await import("node:process")).default;
globalThis.Buffer ??= (await import("node:buffer")).Buffer;
"""
"""What code written for Node.js expects to be there."""


MARK: Final = "application/x-skerry-mark"
DENO_RESTORE: Final = (
    "globalThis[Symbol.for('skerry')].forEach(([n, v]) => v === undefined ? Deno.env.delete(n) : Deno.env.set(n, v));"
)
DENO_MARK: Final = (
    f"await Deno.jupyter.broadcast('display_data', {{data: {{'{MARK}': ''}}, metadata: {{}}, transient: {{}}}});"
    "undefined;"
)


class Kernel(ProcessEngine):
    """An Engine. Its client hears everything that the kernel tells; nothing is dropped for being told too fast."""

    def __init__(self, directory: Path, transport: str) -> None:
        super().__init__()
        self._directory = directory
        self.connection_file = str(directory / "connection.json")
        write_connection_file(
            self.connection_file,
            transport=transport,
            ip=str(directory / "ipc") if transport == "ipc" else "127.0.0.1",
        )
        self._client = AsyncKernelClient(context=_sockets())
        self._client.load_connection_file(self.connection_file)
        self._running: str | None = None
        """The request that is being executed."""

    # ------------------------------------------------------------------------------------------------ life and death

    async def begin(self, process: Process) -> None:
        """Wait until it answers. Raises DiedError, TimeoutError."""
        self._process = process
        self._client.start_channels(stdin=False, hb=False, control=False)
        ready = asyncio.ensure_future(self._client.wait_for_ready(timeout=START_S))
        await asyncio.wait({ready, process.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            said = "".join(event["text"] for event in [*self.stdout.drain(), *self.stderr.drain()])
            raise DiedError(f"{process.ended.result()} while it started: {said[-2000:]}".rstrip(": "))
        try:
            ready.result()
        except RuntimeError as error:  # what jupyter_client makes of a timeout
            raise TimeoutError(str(error)) from error
        for pipe in (self.stdout, self.stderr):  # what it has to say about itself
            for _ in pipe.drain():
                pass
        self._rest()

    def acknowledge(self) -> None:
        """Something that was displayed has been taken."""

    async def close(self) -> None:
        await super().close()
        if self._client.channels_running:
            self._client.stop_channels()
        shutil.rmtree(self._directory, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------- executions

    async def run(self, execution: Execution) -> AsyncGenerator[Event]:
        await self._wake()
        self._running = self._send(execution)
        async with contextlib.aclosing(self._follow(self._running)) as told:
            async for event in told:
                yield event
        await self._ended()

    async def settle(self) -> None:
        if self._running is not None:
            async for _ in self._follow(self._running):
                pass
        await self._ended()

    async def _ended(self) -> None:
        self._running = None
        while await self._client.shell_channel.msg_ready():  # replies, which say nothing new
            await self._client.get_shell_msg(timeout=0)
        self._rest()

    def _send(self, execution: Execution) -> str:
        content = {
            "code": execution.code, "silent": False, "store_history": True, "user_expressions": {},
            "allow_stdin": False, "stop_on_error": False,
        }  # fmt: skip
        wanted: dict[str, Any] = {"env": dict(execution.env)}
        if execution.life is not None:
            wanted |= {"sandbox_env": execution.life.env, "reseed": True}
        message = self._client.session.msg("execute_request", content, metadata={"skerry": wanted})
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"]

    async def _follow(self, request: str) -> AsyncGenerator[Event]:
        """What comes of a request, to its end."""
        assert self._process is not None  # noqa: S101 - it was begun
        output = told = None
        try:
            while True:
                output = output or asyncio.ensure_future(first_readable(self.stdout, self.stderr))
                told = told or asyncio.ensure_future(self._client.get_iopub_msg())
                await asyncio.wait({output, told, self._process.ended}, return_when=asyncio.FIRST_COMPLETED)
                if output.done():
                    output = None
                    for pipe in (self.stdout, self.stderr):
                        if (event := pipe.read()) is not None:
                            yield event
                if told.done():
                    message, told = told.result(), None
                    for pipe in (self.stdout, self.stderr):  # it was written before this was said
                        for event in pipe.drain():
                            yield event
                    if message["parent_header"].get("msg_id") == request and self._is_end(message):
                        return
                    for event in self._events(message):
                        yield event
                elif self._process.ended.done():
                    for pipe in (self.stdout, self.stderr):
                        for event in pipe.drain():
                            yield event
                    raise DiedError(self._process.ended.result())
        finally:
            for wait in (output, told):
                if wait is not None:
                    wait.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await wait

    def _is_end(self, message: Message) -> bool:
        return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"

    def _events(self, message: Message) -> list[Event]:
        kind, content = message["msg_type"], message["content"]
        match kind:
            case "stream":
                return [events.output(content["name"], content["text"])]
            case "display_data" | "execute_result" | "update_display_data":
                self.acknowledge()
                return [events.result(content["data"], main=kind == "execute_result")]
            case "error":
                return [events.error(content["ename"], content["evalue"], "\n".join(content["traceback"]))]
            case "execute_input":
                return [events.count(content["execution_count"])]
        return []

    # ------------------------------------------------------------------------------------------------- in the meantime

    async def _listen(self) -> None:
        async for _ in self._follow(""):
            pass


class PythonKernel(Kernel):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "ipc")
        self.acknowledged, self._acknowledge = os.pipe()
        os.set_blocking(self._acknowledge, False)

    def acknowledge(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, or does not wait
            os.write(self._acknowledge, b"\0")

    async def close(self) -> None:
        await super().close()
        if self._acknowledge >= 0:
            os.close(self._acknowledge)
            self._acknowledge = -1


class DenoKernel(Kernel):
    """It cannot be told of variables with a request, so code of our own around it sets them; it cannot be interrupted;
    and it may tell a result after it has said that it is idle, so our own code ends with a mark that comes last."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "tcp")
        self._count = 0
        self._heard = ""
        """The request that clients hear of."""
        self._awaited: set[str] = set()
        """What is still to come before our own code has ended."""

    def interrupt(self) -> bool:
        return False

    async def run(self, execution: Execution) -> AsyncGenerator[Event]:
        lasting = execution.life.env if execution.life is not None else {}
        before = _assign(lasting)
        if execution.env:
            names = json.dumps(sorted(execution.env))
            before += f"globalThis[Symbol.for('skerry')] = {names}.map(n => [n, Deno.env.get(n)]);"
            before += _assign(execution.env)
        if before:
            await self.hide(before)
        self._count += 1
        async with contextlib.aclosing(super().run(Execution(execution.code, {}, None))) as told:
            async for event in told:
                yield event
        async with contextlib.aclosing(self._run_own(DENO_RESTORE if execution.env else "")) as told:
            async for event in told:  # results that were late
                yield event
        self._heard = ""

    async def hide(self, code: str) -> None:
        """Run code of ours, of which nobody hears."""
        self._heard = ""
        async for _ in self._run_own(code):
            pass

    async def _run_own(self, code: str) -> AsyncGenerator[Event]:
        self._awaited = {"idle", "mark"}
        async with contextlib.aclosing(super().run(Execution(code + DENO_MARK, {}, None))) as told:
            async for event in told:
                yield event

    def _send(self, execution: Execution) -> str:
        request = super()._send(execution)
        if not self._awaited:
            self._heard = request
        return request

    def _is_end(self, message: Message) -> bool:
        if not self._awaited:
            return super()._is_end(message)
        if super()._is_end(message):
            self._awaited.discard("idle")
        elif message["msg_type"] == "display_data" and MARK in message["content"]["data"]:
            self._awaited.discard("mark")
        return not self._awaited

    def _events(self, message: Message) -> list[Event]:
        if message["parent_header"].get("msg_id") != self._heard:
            return []
        told = super()._events(message)
        for event in told:
            if event["type"] == "number_of_executions":
                event["execution_count"] = self._count  # without those of our own
            elif event.get("is_main_result") and event.get("text", "")[:1] == '"':
                event["text"] = event["text"].removeprefix('"').removesuffix('"')  # a string's value, as in Python
        return told


def _assign(env: Mapping[str, str]) -> str:
    return f"Object.entries({json.dumps(dict(env))}).forEach(([n, v]) => Deno.env.set(n, v));" if env else ""


@functools.cache
def _sockets() -> zmq.asyncio.Context:
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.RCVHWM, 0)  # what a kernel tells too fast for us waits, instead of being dropped
    return context


def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kernel-"))


class Kernels:
    """Launches kernels."""

    def __init__(self, zygote: Zygote, deno: str = DENO) -> None:
        self._zygote = zygote
        self._deno = deno

    async def python(self, cwd: str, env: Mapping[str, str]) -> Kernel:
        kernel = PythonKernel(_directory())
        descriptors = (kernel.stdout.writer, kernel.stderr.writer, kernel.acknowledged)
        try:
            try:
                process = await self._zygote.fork(kernel.connection_file, cwd, env, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            await kernel.begin(process)
        except BaseException:
            await kernel.close()
            raise
        return kernel

    async def javascript(self, cwd: str, env: Mapping[str, str]) -> Kernel:
        kernel = DenoKernel(_directory())
        argv = [self._deno, "jupyter", "--kernel", "--conn", kernel.connection_file]
        try:
            try:
                colourless = {"NO_COLOR": "1", **env}  # of results
                process = await spawn(argv, cwd, colourless, (kernel.stdout.writer, kernel.stderr.writer))
            finally:
                kernel.stdout.close_writer()
                kernel.stderr.close_writer()
            await kernel.begin(process)
            await kernel.hide(DENO_PRELUDE)
        except BaseException:
            await kernel.close()
            raise
        return kernel
