"""The real front on a real port, whose one sandbox is a real guest agent: its ports are this machine's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from skerry.api.app import create_app
from skerry.api.front import Faces, Front
from skerry.api.observe import Metrics
from skerry.api.ports.app import PortsApp
from skerry.api.server import server_config
from skerry.control import Principal, Services, open_services
from skerry.core.models import Sandbox, SandboxSpec
from skerry.node.contract import Connection
from skerry.node.guestlink import GuestLink
from skerry.store import open_store
from support.api_server import Uvicorn
from support.fake_node import FakeGuest, FakeNode
from support.guest_agent import running_agent

DOMAIN = "boxes.test"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class PortGuest(FakeGuest):
    async def connect(self, port: int) -> Connection:
        self._check()
        node = self._node
        assert isinstance(node, PortNode)
        return await node.link.connect(port)


class PortNode(FakeNode):
    link: GuestLink

    def new_guest(self, sandbox_id: str, spec: SandboxSpec) -> PortGuest:
        return PortGuest(self, sandbox_id, spec)


@dataclass
class Gateway:
    services: Services
    node: PortNode
    front: Front
    me: Principal
    key: str
    port: int
    http: httpx.AsyncClient
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def sandbox(self, **spec: Any) -> Sandbox:
        return await self.services.sandboxes.create(self.me, SandboxSpec(**{"idle_timeout_ms": None, **spec}))

    def to(self, sandbox: Sandbox, port: int) -> dict[str, str]:
        """Headers that lead to a port."""
        return {"Host": f"{port}-{sandbox.id}.{DOMAIN}"}

    async def talk(self, data: bytes, *, until: bytes | None = None) -> bytes:
        """What the server says to these bytes, until it closes (or has said `until`)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(30):
                return await (reader.read() if until is None else reader.readuntil(until))
        finally:
            writer.close()


@asynccontextmanager
async def running_gateway(folder: Path) -> AsyncIterator[Gateway]:
    node = PortNode()
    async with (
        running_agent() as agent,
        open_store(f"sqlite:///{folder}/skerry.db") as store,
        node,
        open_services(store, node) as services,
    ):
        node.link = agent.link
        key, _ = await services.keys.first_key()
        metrics = Metrics()
        native = create_app(services, metrics=metrics)
        front = Front(native, Faces(ports=PortsApp(services, native.state.stopping)), metrics=metrics, domain=DOMAIN)
        async with Uvicorn(server_config(front, stop_grace_s=1)) as server:
            port = server.listening.getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
                yield Gateway(services, node, front, await services.keys.authenticate(key), key, port, http, server)


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """A server in the sandbox; its port. What its connections raise is raised here."""
    failures: list[BaseException] = []
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failures:
            raise failures[0]


async def head_of(reader: asyncio.StreamReader) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """A request's line, and its headers with lower-case names."""
    line, *rest = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    pairs = [header.split(b": ", 1) for header in rest]
    return line, [(name.lower(), value) for name, value in pairs]
