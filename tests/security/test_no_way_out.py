"""Root in a guest against its namespace: every way out that is not the resolver or the relay.

The sandbox has a policy with one allowed name, so that both are there to be abused. Listeners on the host's own
addresses hear whether anything came through.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from skerry.core import ids
from skerry.core.models import EgressLayer, Exited, Output, ProcessSpec, SandboxSpec
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from skerry.node.net import rules
from support import attacker
from support.node import Left, cache_dir, vm_engine
from support.templates import Templates

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]

ATTACKER = Path(attacker.__file__).read_text()


class World:
    def __init__(self, engine: Engine, guest: Guest, addresses: list[str], port: int) -> None:
        self.engine = engine
        self.guest = guest
        self.addresses = addresses
        self.port = port
        self.came: list[bytes] = []

    async def attack(self, name: str, *arguments: object, user: str = "root") -> Any:
        """What a function of `support.attacker` gives, called in the guest."""
        argv = ("python3", "-c", ATTACKER, name, json.dumps(arguments))
        spec = ProcessSpec(ids.new_id(ids.PROCESS), argv=argv, user=user, timeout_ms=100_000)
        out, code = b"", None
        async for event in await self.guest.start(spec):
            if isinstance(event, Output):
                out += event.data
            elif isinstance(event, Exited):
                code = event.status.exit_code
        assert code == 0, out
        return json.loads(out)

    def nothing_came(self) -> bool:
        return not self.came


def own_addresses() -> list[str]:
    """This machine's own IPv4 addresses."""
    found = [a.address for interface in psutil.net_if_addrs().values() for a in interface if a.family == socket.AF_INET]
    return sorted(set(found))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, templates: Templates) -> Iterator[NodeConfig]:
    data = tmp_path_factory.mktemp("out")
    templates.lend(data, {"memory_mb": 256})
    config = NodeConfig(data, cache_dir(), slots=1, pool_floor=0, pool_ceiling=0)
    yield config
    assert Left.of(config).nothing


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(config: NodeConfig) -> AsyncIterator[World]:
    """A sandbox beside another, and listeners, TCP and UDP, on one port of each of the host's addresses."""
    async with AsyncExitStack() as stack:
        world: World | None = None

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert world is not None
            world.came.append(await reader.read(100))
            writer.close()

        addresses = own_addresses()
        server = await stack.enter_async_context(await asyncio.start_server(hear, addresses[0], 0))
        port = server.sockets[0].getsockname()[1]
        for address in addresses[1:]:
            await stack.enter_async_context(await asyncio.start_server(hear, address, port))
        datagrams = stack.enter_context(ExitStack())
        loop = asyncio.get_running_loop()
        for address in addresses:
            listener = datagrams.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            listener.bind((address, port))
            listener.setblocking(False)
            loop.add_reader(listener, lambda s=listener: world.came.append(s.recv(100)) if world else None)
            datagrams.callback(loop.remove_reader, listener)
        engine = await stack.enter_async_context(vm_engine(config))
        allowed = EgressLayer("project", "deny", ("allowed.test:443",))
        for name in ("sbone", "sbtwo"):
            await engine.create(name, SandboxSpec(memory_mb=256, egress=(allowed,)))
        world = World(engine, engine.guest("sbone"), addresses, port)
        yield world
        for name in ("sbone", "sbtwo"):
            await engine.kill(name)


async def test_no_service_of_the_host_is_reached_on_any_of_its_addresses(world: World) -> None:
    foreign = [address for address in world.addresses if address != "127.0.0.1"]
    targets = [(address, port) for address in foreign for port in (world.port, 22, 80)]
    targets += [("169.254.169.254", 80), (rules.HOST_ADDRESS, world.port), (rules.HOST_ADDRESS, rules.RELAY_PORT)]
    said = await world.attack("reach", targets)
    assert set(said) <= {"ConnectionRefusedError", "TimeoutError", "OSError", "PermissionError"}, said
    assert world.nothing_came()


async def test_ipv6_leads_nowhere(world: World) -> None:
    said = await world.attack("ipv6")
    assert "connected" not in said["attempts"]
    assert said["answers"] == 0
    assert world.nothing_came()


async def test_icmp_and_other_protocols_carry_nothing(world: World) -> None:
    assert await world.attack("protocols", ["169.254.0.1", "169.254.169.254", "10.0.0.1", *world.addresses]) == 0
    assert world.nothing_came()


async def test_a_foreign_source_address_is_not_heard(world: World) -> None:
    foreign = ["169.254.0.1", "169.254.0.3", "127.0.0.1", *world.addresses]
    own, *others = await world.attack("foreign_sources", ["169.254.0.2", *foreign])
    assert own >= 1, "the honest one has to be answered, else this shows nothing"
    assert set(others) == {0}
    assert world.nothing_came()


async def test_false_arp_and_odd_frames_change_nothing(world: World) -> None:
    await world.attack("odd_frames")
    for name in ("sbone", "sbtwo"):  # the host still finds both
        assert (await world.engine.guest(name).metrics()).memory_total_bytes > 0
    assert world.nothing_came()


async def test_a_flood_of_packets_harms_neither_host_nor_neighbour(world: World) -> None:
    before = psutil.Process().memory_info().rss
    flood = asyncio.create_task(world.attack("flood", 6))
    while not flood.done():
        async with asyncio.timeout(60):
            await world.engine.guest("sbtwo").metrics()
        await asyncio.sleep(0.05)
    assert await flood > 500
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert world.nothing_came()


async def test_the_agent_is_nobodys_in_its_own_guest(world: World) -> None:
    for user in ("user", "root"):
        assert await world.attack("agent", user=user) == [0, 0]


async def test_nothing_of_a_sandbox_listens_on_the_host(world: World) -> None:
    """Resolver and relay have sockets in the sandbox's namespace alone, so that no neighbour finds them."""
    own = psutil.Process()
    listening = {c.laddr.port for c in own.net_connections() if c.status == psutil.CONN_LISTEN}
    assert not {rules.RELAY_PORT, rules.DNS_PORT} & listening
    spaces = {
        Path(f"/proc/{pid}/ns/net").readlink() for pid in (own.pid, *(s.vmm_pid for s in world.engine.sandboxes()))
    }
    assert len(spaces) == 3
