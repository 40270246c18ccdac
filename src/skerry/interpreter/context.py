"""A context: a place in which code runs, one execution at a time, and what it has defined stays."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from skerry.interpreter import events
from skerry.interpreter.events import Event
from skerry.interpreter.life import Life, Lives

INTERRUPT_AGAIN_S: Final = 1.0
INTERRUPT_S: Final = 10.0
"""How long an execution that was interrupted has to end, before its process is ended."""


class DiedError(Exception):
    """The process behind a context ended. The text says how."""


@dataclass(frozen=True)
class Execution:
    code: str
    env: Mapping[str, str]
    """For this execution alone."""
    life: Life | None
    """Set where the context has not heard of it yet: its variables are to be set, random numbers to be seeded anew."""


class Engine(Protocol):
    """The process behind a context. It is started once, and of no use when it has died."""

    def run(self, execution: Execution) -> AsyncGenerator[Event]:
        """Run code and tell what comes of it, as it is asked for. Raises DiedError.

        An iteration that is given up leaves the code running; `interrupt` and `settle` follow.
        """
        ...

    def interrupt(self) -> bool:
        """False where code cannot be interrupted, but by ending its process."""
        ...

    async def settle(self) -> None:
        """Returns when the code that was interrupted has ended, its output thrown away. Raises DiedError."""
        ...

    @property
    def dead(self) -> str | None:
        """How it ended; None while it lives."""
        ...

    def kill(self) -> None:
        """Let it end: whoever runs code in it hears DiedError. Idempotent."""
        ...

    async def close(self) -> None:
        """End it and all that it has started, and give back what it holds. Nobody may run code in it any more.
        Idempotent."""
        ...


class Launch(Protocol):
    async def __call__(self, cwd: str, env: Mapping[str, str]) -> Engine: ...


class Context:
    def __init__(self, context_id: str, language: str, cwd: str, launch: Launch, lives: Lives) -> None:
        self.id = context_id
        self.language = language
        self.cwd = cwd
        self._launch = launch
        self._lives = lives
        self._engine: Engine | None = None
        self._life = 0
        """The number of the life that the engine knows of."""
        self._turn = asyncio.Lock()
        self._ending: str | None = None
        """Why its process is being ended, where that is meant."""
        self._lost: str | None = None
        """Why its process was ended, while nobody is there to hear it."""

    def told(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self) -> None:
        """Raises OSError, TimeoutError or DiedError where its process does not come up."""
        async with self._turn:
            await self._begin()

    async def _begin(self) -> Engine:
        life = self._lives.now()
        self._engine = await self._launch(self.cwd, life.env)
        self._life, self._lost = life.number, None
        return self._engine

    async def execute(self, code: str, env: Mapping[str, str]) -> AsyncGenerator[Event]:
        """Run code once it is its turn. To be closed by the caller: code whose iteration is given up is interrupted."""
        async with self._turn:
            engine = self._engine
            if engine is None or engine.dead is not None:
                if engine is not None:
                    await engine.close()
                    self._lost = self._lost or engine.dead
                if self._lost is not None:
                    yield events.output("stderr", f"{self._lost}; it was started anew, and what it held is gone\n")
                engine = await self._begin()
            life = self._lives.now()
            news = life if life.number != self._life else None
            self._life = life.number
            ended = False
            try:
                async with contextlib.aclosing(engine.run(Execution(code, env, news))) as told:
                    async for event in told:
                        yield event
                ended = True
            except DiedError as died:
                ended = True
                await engine.close()
                self._engine = None
                yield events.error("ContextDied", self._ending or f"{died}; what it held is gone")
            finally:
                if not ended:
                    self._lost = await _stop(engine)

    async def restart(self) -> None:
        await self._end("the context was restarted")
        await self.start()

    async def close(self) -> None:
        await self._end("the context was removed")

    async def _end(self, why: str) -> None:
        """What it executes ends by it."""
        self._ending = why
        try:
            if self._engine is not None:
                self._engine.kill()
            async with self._turn:  # what was executed has been told how it ended
                engine, self._engine = self._engine, None
                if engine is not None:
                    await engine.close()
        finally:
            self._ending = None


async def _settled(engine: Engine) -> None:
    """Returns when it has stopped. An interrupt can be lost (a shell that is just starting a program sees none), so it
    is sent again. Raises DiedError."""
    settled = asyncio.ensure_future(engine.settle())
    try:
        while not (await asyncio.wait({settled}, timeout=INTERRUPT_AGAIN_S))[0]:
            engine.interrupt()
        settled.result()
    finally:
        settled.cancel()
        with contextlib.suppress(asyncio.CancelledError, DiedError):
            await settled


async def _stop(engine: Engine) -> str | None:
    """Interrupt what runs; end the process if that does not help, and say why. Runs to its end although its task is
    cancelled."""

    async def stop() -> str | None:
        why = "code that cannot be interrupted was given up, so its process was ended"
        if engine.interrupt():
            try:
                async with asyncio.timeout(INTERRUPT_S):
                    await _settled(engine)
            except DiedError as died:
                why = str(died)
            except TimeoutError:
                why = f"code did not stop within {INTERRUPT_S:.0f} s of an interrupt, so its process was ended"
            else:
                return None
        await engine.close()
        return why

    task = asyncio.ensure_future(stop())
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()
