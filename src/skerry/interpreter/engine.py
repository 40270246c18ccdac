"""What every process behind a context has in common."""

import asyncio
import contextlib
import signal

from skerry.interpreter.kernels import Process, signal_group
from skerry.interpreter.pipes import Pipe


class ProcessEngine:
    """Half an Engine: its process, its output, and its rest between executions."""

    def __init__(self) -> None:
        self.stdout, self.stderr = Pipe("stdout"), Pipe("stderr")
        self._process: Process | None = None
        self._idle: asyncio.Task[None] | None = None

    @property
    def dead(self) -> str | None:
        ended = self._process.ended if self._process is not None else None
        return ended.result() if ended is not None and ended.done() else None

    def interrupt(self) -> bool:
        if self._process is not None:
            signal_group(self._process, signal.SIGINT)
        return True

    def kill(self) -> None:
        if self._process is not None:
            signal_group(self._process, signal.SIGKILL)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self.kill()
        if self._process is not None:
            await asyncio.wait({self._process.ended})
        self.stdout.close()
        self.stderr.close()

    def _rest(self) -> None:
        """Nothing is executed: what earlier code still writes is read, and told to nobody."""
        self._idle = asyncio.create_task(self._listen(), name="idle")

    async def _wake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._idle
            self._idle = None

    async def _listen(self) -> None:
        """Read what comes, for as long as it lives."""
        raise NotImplementedError
