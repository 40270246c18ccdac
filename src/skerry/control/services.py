"""All services of a server, and the tasks that run behind them."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from skerry.audit import AuditLog
from skerry.control.access import Access
from skerry.control.config import ControlConfig
from skerry.control.creation import Creation
from skerry.control.delivery import Delivery
from skerry.control.egress import Egress
from skerry.control.endings import Endings
from skerry.control.files import Files
from skerry.control.forks import Forks
from skerry.control.keys import Keys
from skerry.control.live import LiveSandboxes
from skerry.control.nodes import Nodes
from skerry.control.owned import Owned
from skerry.control.passages import Passages
from skerry.control.ports import Ports
from skerry.control.processes import Commands, Processes
from skerry.control.reconcile import Reconcile
from skerry.control.recorder import Recorder
from skerry.control.sampler import Sampler
from skerry.control.sandboxes import Sandboxes
from skerry.control.secrets import Secrets
from skerry.control.server import Server
from skerry.control.service import Context
from skerry.control.snapshots import Snapshots
from skerry.control.step_tokens import StepTokens
from skerry.control.templates import Templates
from skerry.control.timers import Timers
from skerry.control.tokens import KEY_BYTES, SandboxTokens
from skerry.control.traffic import Traffic
from skerry.control.vault import VERSIONS_KEPT, Vault
from skerry.core.errors import SkerryError, Unavailable
from skerry.node.contract import Node
from skerry.store import Store
from skerry.vault import RootKeys

HOUSEKEEPING_S: Final = 60.0
SUBSCRIBE_S: Final = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What every face calls. Each act authorises, is recorded, and raises only `core.errors`."""

    keys: Keys
    sandboxes: Sandboxes
    snapshots: Snapshots
    forks: Forks
    processes: Processes
    files: Files
    ports: Ports
    tokens: SandboxTokens
    server: Server
    timers: Timers
    sampler: Sampler
    templates: Templates
    secrets: Secrets
    step_tokens: StepTokens
    vault: Vault
    egress: Egress
    traffic: Traffic


@asynccontextmanager
async def open_services(store: Store, node: Node, config: ControlConfig | None = None) -> AsyncIterator[Services]:
    """The services over an open store and a node that was entered already.

    Returns once records and VMs agree. At the end: creates under way get a grace, then are given up; sandboxes run on.
    """
    config = config or ControlConfig()
    async with AsyncExitStack() as stack:
        sink = await stack.enter_async_context(AuditLog(store))
        nodes = Nodes([node])
        live = LiveSandboxes(config.clock, config.busy_check_s)
        recorder = Recorder(sink, config, live)
        owned = Owned()
        stack.push_async_callback(owned.aclose, config.stop_grace_s)
        context = Context(store, sink, recorder, nodes, live, owned, config)
        vault = Vault(store, config.root_keys or RootKeys.fresh(), config.clock)
        await vault.check()
        endings = Endings(context)
        passages = Passages(context, endings)
        access = Access(context, passages)
        delivery = Delivery(context, vault)
        creation = Creation(context, endings, delivery)
        sandboxes = Sandboxes(context, access, creation, endings, passages)
        snapshots = Snapshots(context, access, passages)
        forks = Forks(context, access, creation, endings, passages, delivery)
        commands = Commands(recorder)
        keys = Keys(store, sink, recorder, config)
        timers = Timers(context, sandboxes, endings, commands, passages)
        reconcile = Reconcile(context, endings, passages, delivery)
        tokens = SandboxTokens(config.token_key or secrets.token_bytes(KEY_BYTES), live)
        services = Services(
            keys=keys,
            sandboxes=sandboxes,
            snapshots=snapshots,
            forks=forks,
            processes=Processes(access, recorder, commands, delivery),
            files=Files(access, recorder),
            ports=Ports(access, tokens, live, config),
            tokens=tokens,
            server=Server(nodes, live, creation, recorder),
            timers=timers,
            sampler=Sampler(nodes, live, access, config),
            templates=Templates(store, nodes, config),
            secrets=Secrets(context, vault),
            step_tokens=StepTokens(context, access, delivery),
            vault=vault,
            egress=Egress(context, access),
            traffic=Traffic(context, access),
        )
        loops = Owned()
        stack.push_async_callback(loops.aclose, 0)
        for node_id, each in nodes.items():
            subscribed = asyncio.Event()
            loops.spawn(reconcile.follow(node_id, each, subscribed), f"news of {node_id}")
            try:
                await asyncio.wait_for(subscribed.wait(), SUBSCRIBE_S)
            except TimeoutError:
                raise Unavailable("the node does not tell its news", code="node_unreachable", node_id=node_id) from None
        await reconcile.at_start()
        await snapshots.at_start()
        await services.egress.at_start()
        for node_id, each in nodes.items():
            loops.spawn(services.traffic.follow(node_id, each), f"traffic of {node_id}")
        loops.spawn(timers.run(), "timers")
        loops.spawn(services.sampler.run(), "sampler")
        stack.push_async_callback(_note_uses, keys)
        loops.spawn(_housekeeping(store, keys, config), "housekeeping")
        yield services


async def _housekeeping(store: Store, keys: Keys, config: ControlConfig) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        await _note_uses(keys)
        with contextlib.suppress(SkerryError):
            async with store.write() as tx:
                await tx.idempotency.purge(config.clock())
                await tx.secrets.purge(VERSIONS_KEPT)


async def _note_uses(keys: Keys) -> None:
    try:
        await keys.note_uses()
    except SkerryError as error:
        log.warning("could not note which keys were used", error=str(error))
