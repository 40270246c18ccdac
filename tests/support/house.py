"""All services of one server over a real database and a node whose faults we set."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from unittest.mock import patch

from skerry.control import ControlConfig, Outcome, Principal, Services, open_services
from skerry.core import ids
from skerry.core.models import ProcessSpec, Sandbox, SandboxSpec
from skerry.store import Project, Store, Tenant, open_store
from skerry.vault import RootKeys
from support.fake_node import FakeNode

SPEC = SandboxSpec()
WAITS = ("passages.SETTLE_RETRY_S", "reconcile.RESUBSCRIBE_S", "timers.NAP_MAX_S", "timers.RETRY_S")
"""Whole seconds after which the services look or try again; here they do it at once."""


class Clock:
    """Real time and what the test adds to it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def skip(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)


@dataclass
class House:
    """Everything of one server, which can be stopped and started again."""

    url: str
    node: FakeNode
    clock: Clock
    config: ControlConfig
    store: Store
    services: Services
    me: Principal
    stack: AsyncExitStack

    async def restart(self) -> None:
        await self.stack.aclose()
        await self.start()

    async def start(self) -> None:
        self.stack = AsyncExitStack()
        self.store = await self.stack.enter_async_context(open_store(self.url))
        self.services = await self.stack.enter_async_context(open_services(self.store, self.node, self.config))

    async def create(self, spec: SandboxSpec = SPEC, **given: str) -> Sandbox:
        return await self.services.sandboxes.create(self.me, spec, **given)

    async def get(self, sandbox_id: str) -> Sandbox:
        return await self.services.sandboxes.get(self.me, sandbox_id)

    async def all(self) -> list[Sandbox]:
        return list((await self.services.sandboxes.list(self.me, limit=100)).items)

    async def actions(self, sandbox_id: str) -> list[tuple[str, Outcome]]:
        page = await self.services.sandboxes.events(self.me, sandbox_id)
        return [(event.action, event.outcome) for event in page.items]

    async def other_tenant(self) -> Principal:
        async with self.store.write() as tx:
            await tx.tenants.add(Tenant("tnother", "other", 5, 86_400_000, self.clock()))
            await tx.tenants.add_project(Project("pjother", "tnother", "default", self.clock()))
        return Principal("tnother", "pjother", "keyother", frozenset({"admin"}))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[House]:
    with ExitStack() as patches:
        for name in WAITS:
            patches.enter_context(patch(f"skerry.control.{name}", 0.05))
        async with _opened(url) as made:
            yield made


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[House]:
    node, clock = FakeNode(), Clock()
    config = ControlConfig(
        clock=clock,
        create_deadline_s=5,
        kill_deadline_s=2,
        guest_deadline_s=1,
        stop_grace_s=1,
        pause_deadline_s=5,
        resume_deadline_s=5,
        snapshot_deadline_s=5,
        passage_wait_s=5,
        root_keys=RootKeys.fresh(),
    )
    made = House(url, node, clock, config, None, None, None, AsyncExitStack())  # type: ignore[arg-type]
    await made.start()
    made.me = await made.services.keys.authenticate(await made.services.keys.bootstrap())
    try:
        yield made
    finally:
        await made.stack.aclose()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


def command(**given: object) -> ProcessSpec:
    return ProcessSpec(ids.new_id(ids.PROCESS), **{"argv": ("true",), **given})  # type: ignore[arg-type]
