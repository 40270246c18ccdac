"""Network slots: namespaces made ahead of time, because one costs some fifty milliseconds."""

import asyncio
import os
import secrets
import socket
from collections import deque
from dataclasses import dataclass

from skerry.core.errors import SkerryError
from skerry.node.aio import TaskSet, in_thread, log
from skerry.node.net import namespace, rules

RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Slot:
    """One sandbox's network."""

    netns: str
    fd: int
    """Of the namespace, open as long as the slot is ours."""
    tap: str = rules.TAP

    def open_socket(self) -> socket.socket:
        """A non-blocking TCP socket inside."""
        return namespace.socket_in(self.fd)


class SlotPool:
    """Hands out slots, keeps `size` of them ready, and takes them away. A slot is never used twice."""

    def __init__(self, instance: str, size: int) -> None:
        self.prefix = f"sk-{instance}-"
        self._size = size
        self._ready: deque[Slot] = deque()
        self._refill = asyncio.Event()
        self._tasks = TaskSet()

    def start(self) -> None:
        if self._size > 0:
            self._refill.set()
            self._tasks.spawn(self._keep_full(), name="slots")

    async def _keep_full(self) -> None:
        while True:
            await self._refill.wait()
            self._refill.clear()
            while len(self._ready) < self._size:
                try:
                    self._ready.append(await self._make())
                except SkerryError as error:
                    log.warning("no network slot could be made ready", error=str(error))
                    await asyncio.sleep(RETRY_S)

    async def _make(self) -> Slot:
        name = self.prefix + secrets.token_hex(4)
        made: list[Slot] = []

        def body() -> None:
            namespace.create(name)
            made.append(Slot(name, namespace.open_namespace(name)))

        try:
            await in_thread(body)
        except asyncio.CancelledError:
            if made:
                await in_thread(self.remove, made[0])
            raise
        return made[0]

    async def take(self) -> Slot:
        """A slot of its own. Raises InternalError (`step` netns). Nothing is left of it if the call is cancelled."""
        if self._ready:
            self._refill.set()
            return self._ready.popleft()
        return await self._make()

    def adopt(self, name: str) -> Slot:
        """The slot of a VM that was started by an earlier server. Raises InternalError if it is gone."""
        return Slot(name, namespace.open_namespace(name))

    def let_go(self, slot: Slot) -> None:
        """Forget a slot that stays in use."""
        os.close(slot.fd)

    def remove(self, slot: Slot) -> None:
        """Blocking. To be called once per slot."""
        os.close(slot.fd)
        namespace.delete(slot.netns)

    async def aclose(self) -> None:
        """Remove the unused ones."""
        await self._tasks.aclose()
        while self._ready:
            await in_thread(self.remove, self._ready.popleft())
