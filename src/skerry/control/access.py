"""Getting into a sandbox: is it there, is it yours, does it run; and saying why it ended if it ends meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from skerry.control.live import Live
from skerry.control.passages import Passages, paused_error
from skerry.control.principal import Principal, Scope
from skerry.control.redaction import clean_error
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import Conflict, Gone, GuestUnreachable, NotFound, OutcomeUnknown, SkerryError
from skerry.core.lifecycle import FINAL, State, gone
from skerry.core.models import Sandbox
from skerry.node.contract import Guest
from skerry.store import not_found

ENDING_S: Final = 1.0
"""A broken line to a guest is often the first sign of its end. So long do we wait for the node to say so."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A running sandbox that the caller may use, held as active."""

    live: Live
    guest: Guest


class Access(Service):
    def __init__(self, context: Context, passages: Passages) -> None:
        super().__init__(context)
        self._passages = passages

    async def record(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """The record, over or not. NotFound for what never was and for what is not the caller's: the same words."""
        live = self._live.get(sandbox_id)
        if live is not None:
            record = live.record
        else:
            record = await self._stored(sandbox_id)
        if not principal.sees(record):
            raise not_found(sandbox_id)
        return record

    async def _stored(self, sandbox_id: str) -> Sandbox:
        if not ids.is_id(sandbox_id, ids.SANDBOX):
            raise not_found(sandbox_id)
        async with self._store.read() as tx:
            return await tx.sandboxes.get(sandbox_id)

    async def running(self, principal: Principal, sandbox_id: str, scope: Scope) -> Live:
        """One that runs. One that is just being paused or resumed is waited for; one that rests is resumed if it has
        `auto_resume`.

        Raises as `present` does, Conflict `sandbox_paused`, and what a resume raises.
        """
        live = await self.present(principal, sandbox_id, scope)
        if live.moving or live.record.state is not State.RUNNING:
            await self._passages.awake(live, principal.key_id)
        return live

    async def present(self, principal: Principal, sandbox_id: str, scope: Scope) -> Live:
        """One that is up or rests.

        Raises Forbidden, NotFound, Gone with the reason, or Conflict `sandbox_state` where it is not up yet.
        """
        principal.require(scope)
        record = await self.record(principal, sandbox_id)
        if record.state in FINAL:
            raise gone(sandbox_id, record.end_reason)
        live = self._live.get(sandbox_id)
        if live is None or live.record.state is State.CREATING:
            raise Conflict(
                f"sandbox {sandbox_id} is {record.state.value}",
                code="sandbox_state",
                sandbox_id=sandbox_id,
                state=record.state.value,
                retry="safe",
                retry_after=1,
            )
        return live

    async def enter(self, principal: Principal, sandbox_id: str, scope: Scope = Scope.USE) -> Entry:
        """Get in, and count as active until `leave`."""
        live = await self.running(principal, sandbox_id, scope)
        self._live.enter(live)
        try:
            async with self.explained(live):
                return Entry(live, self._nodes.get(live.record.node_id).guest(sandbox_id))
        except BaseException:
            self._live.leave(live)
            raise

    async def settled(self, live: Live) -> None:
        """Wait until it is neither being paused nor resumed. Raises Gone, Conflict `sandbox_state`."""
        await self._passages.settled(live)

    async def enter_again(self, live: Live) -> Entry:
        """Get in again once it runs, however long it rests: this wakes nothing. Raises Gone."""
        while True:
            await live.awake.wait()
            await live.settled.wait()
            if live.ended is not None:
                raise gone(live.id, live.ended)
            if live.record.state is State.RUNNING:
                break
        self._live.enter(live)
        try:
            async with self.explained(live):
                return Entry(live, self._nodes.get(live.record.node_id).guest(live.id))
        except BaseException:
            self._live.leave(live)
            raise

    def leave(self, live: Live) -> None:
        self._live.leave(live)

    @asynccontextmanager
    async def use(self, principal: Principal, sandbox_id: str, scope: Scope = Scope.USE) -> AsyncIterator[Entry]:
        """Enter for one question that is answered within the guest's deadline."""
        entry = await self.enter(principal, sandbox_id, scope)
        try:
            async with self.answered(entry.live):
                yield entry
        finally:
            self.leave(entry.live)

    @asynccontextmanager
    async def answered(self, live: Live) -> AsyncIterator[None]:
        """One question to the guest: with a deadline, and explained."""
        async with self.explained(live):
            try:
                async with asyncio.timeout(self._config.guest_deadline_s):
                    yield
            except TimeoutError:
                raise OutcomeUnknown(
                    f"the guest did not answer within {self._config.guest_deadline_s:g} s", sandbox_id=live.id
                ) from None

    @asynccontextmanager
    async def explained(self, live: Live) -> AsyncIterator[None]:
        """Turn the errors of a sandbox that ends into Gone with its reason."""
        try:
            yield
        except SkerryError as error:
            raise await self.explain(live, error) from error

    async def explain(self, live: Live, error: SkerryError) -> SkerryError:
        """What to raise in place of `error`; no secret is in it."""
        error = clean_error(error, live.redactor)
        if not _may_be_the_end(error):
            return error
        if live.ended is None and (live.moving or live.record.state is not State.RUNNING):
            return paused_error(live, retry=error.retry)
        if live.ended is None:
            try:
                async with asyncio.timeout(ENDING_S):
                    await live.over.wait()
            except TimeoutError:
                return error
        return gone(live.id, live.ended)


def _may_be_the_end(error: SkerryError) -> bool:
    if isinstance(error, (Gone, GuestUnreachable, OutcomeUnknown)):
        return True
    return isinstance(error, NotFound) and error.code == "sandbox_not_found"
