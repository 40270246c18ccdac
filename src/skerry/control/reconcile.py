"""Making records and VMs agree: when the server starts, and when the line of a node's news was lost."""

import asyncio
from typing import Final

import structlog

from skerry.control.delivery import Delivery
from skerry.control.endings import Endings
from skerry.control.live import Live
from skerry.control.passages import Passages
from skerry.control.service import Context, Service
from skerry.core.errors import InternalError, SkerryError
from skerry.core.lifecycle import EndReason, Event, State
from skerry.core.models import Sandbox
from skerry.node.contract import Ended, Node

RESUBSCRIBE_S: Final = 1.0

log = structlog.get_logger(__name__)


class Reconcile(Service):
    def __init__(self, context: Context, endings: Endings, passages: Passages, delivery: Delivery) -> None:
        super().__init__(context)
        self._endings = endings
        self._delivery = delivery
        self._passages = passages

    async def at_start(self) -> None:
        """Before anybody is served. What runs goes on, with the deadline of its record; what rests, rests; what was
        between the two is where its node says; a record without a VM is lost; a VM or an image at rest without a record
        that is not over is removed."""
        there = [
            (vm.id, node_id) for node_id, node in self._nodes.items() for vm in (*node.sandboxes(), *node.paused())
        ]
        vms = dict(there)
        async with self._store.read() as tx:
            rows = await tx.sandboxes.live()
        for row in rows:
            await self._adopt_or_end(row)
        try:
            await self._delivery.recall(self._live)
        except InternalError as error:  # no reason to serve nobody
            log.warning(
                "a secret that a sandbox was given is damaged, and cannot be masked in its output", error=str(error)
            )
        known = {row.id for row in rows if self._live.get(row.id) is not None}
        await asyncio.gather(*(self._kill_stray(vm, node_id) for vm, node_id in vms.items() if vm not in known))

    async def _adopt_or_end(self, row: Sandbox) -> None:
        if row.state is State.CREATING:
            # Whoever asked for it is gone, and whether its guest was told who it is cannot be known.
            await self._endings.end(
                row.id, Event.START_FAILED, EndReason.START_FAILED, error="the server stopped while it was starting"
            )
        else:
            await self._passages.settle_at_start(row)

    async def _kill_stray(self, sandbox_id: str, node_id: str) -> None:
        log.warning("killing a VM without a record", sandbox=sandbox_id)
        async with self._store.read() as tx:
            row = await tx.sandboxes.find(sandbox_id)
        if row is not None:
            self._endings.reap(row)
        else:
            self._endings.reap_stray(sandbox_id, node_id)

    async def follow(self, node_id: str, node: Node, subscribed: asyncio.Event) -> None:
        """For ever: take the node's news. After a broken line, look whether something was missed."""
        while True:
            try:
                async with node.ended() as news:
                    missed = subscribed.is_set()
                    subscribed.set()
                    if missed:
                        self._catch_up(node_id)
                    async for ended in news:
                        self._owned.spawn(self._note(ended), f"note the end of {ended.sandbox_id}")
            except Exception as error:  # noqa: BLE001 - whatever it is, without news every crash would go unseen
                log.warning("the news of a node broke off", node=node_id, error=str(error) or type(error).__name__)
            await asyncio.sleep(RESUBSCRIBE_S)

    async def _note(self, ended: Ended) -> None:
        live = self._live.get(ended.sandbox_id)
        if live is not None:
            await live.decided.wait()  # a create under way is about to say so itself, or has succeeded just before
            await live.settled.wait()  # so is a pause or a resume: whoever asked the node learns it there
        while True:
            try:
                await self._endings.end(
                    ended.sandbox_id,
                    Event.CRASHED,
                    ended.reason,
                    error=ended.detail,
                    only_if=self._is_over,
                )
            except SkerryError as error:
                if error.retry != "safe":
                    log.warning("could not note the end of a VM", sandbox=ended.sandbox_id, error=str(error))
                    return
                await asyncio.sleep(RESUBSCRIBE_S)
            else:
                return

    def _catch_up(self, node_id: str) -> None:
        for live in self._live:
            if live.record.node_id == node_id:
                self._owned.spawn(self._look(live), f"look for {live.id}")

    async def _look(self, live: Live) -> None:
        await live.decided.wait()
        await live.settled.wait()
        if live.ended is None and live.record.state is State.RUNNING and self._is_over(live.record):
            await self._note(Ended(live.id, EndReason.CRASHED, "its VM is gone"))

    def _is_over(self, row: Sandbox) -> bool:
        """Whether news of its end is about what it is now: it may have been paused, or even resumed, since then."""
        if row.state is not State.RUNNING:
            return row.state is State.CREATING
        node = self._nodes.find(row.node_id)
        return node is None or all(vm.id != row.id for vm in node.sandboxes())
