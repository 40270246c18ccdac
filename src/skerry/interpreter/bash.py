"""Contexts that are shells: bash, told line by line what to do, as a terminal would, so that an interrupted execution
comes back to the shell and its variables stay."""

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from skerry.interpreter import events
from skerry.interpreter.context import DiedError, Execution
from skerry.interpreter.engine import ProcessEngine
from skerry.interpreter.events import Event
from skerry.interpreter.kernels import spawn
from skerry.interpreter.pipes import Pipe, first_readable

BASH: Final = "/bin/bash"
CODE_FD, STATUS_FD = 198, 199
FIRST: Final = "PS1= PS2= PROMPT_COMMAND=; set +H; unset HISTFILE"
RUN: Final = (
    f"IFS= read -r -d '' -u {CODE_FD} SKERRY_CODE; eval \"$SKERRY_CODE\" {CODE_FD}<&- {STATUS_FD}>&- </dev/null"
)
TELL: Final = f"printf '%d\\n' \"$?\" >&{STATUS_FD}"
"""A line of its own: an interrupt takes away the line that runs, and the shell goes on with the next."""


class Shell(ProcessEngine):
    """An Engine."""

    def __init__(self) -> None:
        super().__init__()
        self._status = Pipe("status")
        self._lines_read, self._lines = os.pipe()
        self._code_read, self._code = os.pipe()
        self._count = 0

    async def begin(self, cwd: str, env: Mapping[str, str]) -> None:
        """Raises OSError, DiedError."""
        code, status = self._code_read, self._status.writer
        argv = [
            BASH, "-c", f'exec {CODE_FD}<&{code} {STATUS_FD}>&{status} {code}<&- {status}>&-; exec "$0" "$@"',
            BASH, "--norc", "--noprofile", "--noediting", "-i",
        ]  # fmt: skip
        handed = (self.stdout.writer, self.stderr.writer)
        try:
            self._process = await spawn(argv, cwd, env, handed, stdin=self._lines_read, more=(code, status))
        finally:
            for descriptor in (*handed, self._lines_read, code, status):
                os.close(descriptor)
        await self._tell(FIRST, TELL)
        async for _ in self._follow():  # that it has no terminal to control
            pass
        self._rest()

    async def close(self) -> None:
        await super().close()
        self._status.close()
        for descriptor in (self._lines, self._code):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._lines = self._code = -1

    async def run(self, execution: Execution) -> AsyncGenerator[Event]:
        if "\0" in execution.code:
            yield events.error("ValueError", "the code holds a NUL character, which no shell takes")
            return
        await self._wake()
        self._count += 1
        yield events.count(self._count)
        before, after = _variables(execution)
        await self._tell(before, RUN, TELL, after)
        await asyncio.to_thread(_write, self._code, execution.code.encode("utf-8", "surrogateescape") + b"\0")
        async with contextlib.aclosing(self._follow()) as told:
            async for event in told:
                yield event
        self._rest()

    async def settle(self) -> None:
        async for _ in self._follow():
            pass
        self._rest()

    async def _tell(self, *lines: str) -> None:
        await asyncio.to_thread(_write, self._lines, "".join(f"{line}\n" for line in lines if line).encode())

    async def _follow(self) -> AsyncGenerator[Event]:
        """What the execution writes, to its end."""
        assert self._process is not None  # noqa: S101 - it was begun
        readable = None
        try:
            while True:
                readable = readable or asyncio.ensure_future(first_readable(self.stdout, self.stderr, self._status))
                await asyncio.wait({readable, self._process.ended}, return_when=asyncio.FIRST_COMPLETED)
                status = self._status.read()
                for pipe in (self.stdout, self.stderr):
                    for event in pipe.drain() if status or self.dead else _one(pipe):
                        yield event
                if status is not None:
                    code = status["text"].strip()
                    if code != "0":
                        yield events.error("ExitStatus", code, f"the code ended with exit status {code}")
                    return
                if self.dead is not None:
                    raise DiedError(self.dead)
                if readable.done():
                    readable = None
        finally:
            if readable is not None:
                readable.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await readable

    async def _listen(self) -> None:
        while self.dead is None:
            await first_readable(self.stdout, self.stderr)
            for pipe in (self.stdout, self.stderr):
                pipe.read()


def _one(pipe: Pipe) -> list[Event]:
    event = pipe.read()
    return [] if event is None else [event]


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _variables(execution: Execution) -> tuple[str, str]:
    """Lines that set the execution's variables, and that set them back."""
    before, after = [], []
    if execution.life is not None:
        before.append(f"RANDOM={int.from_bytes(os.urandom(4))}")
        before += [f"export {name}={shlex.quote(value)}" for name, value in execution.life.env.items()]
    for name, value in execution.env.items():
        kept = f"SKERRY_WAS_{name}"
        before.append(f"{kept}=${{{name}-}}; [[ -v {name} ]] || unset {kept}; export {name}={shlex.quote(value)}")
        after.append(f"if [[ -v {kept} ]]; then {name}=${kept}; unset {kept}; else unset {name}; fi")
    return "; ".join(before), "; ".join(after)


async def launch(cwd: str, env: Mapping[str, str]) -> Shell:
    """Raises OSError, DiedError."""
    shell = Shell()
    try:
        await shell.begin(cwd, env)
    except BaseException:
        await shell.close()
        raise
    return shell
