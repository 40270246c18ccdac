"""The real application on a real port over a node without machines, whose commands end by themselves."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn
from fastapi import FastAPI

from skerry.api.app import create_app
from skerry.api.server import server_config
from skerry.control import Services, open_services
from skerry.core.models import ProcessSpec, SandboxSpec
from skerry.store import open_store
from support.fake_node import FakeGuest, FakeNode, FakeStream


class EchoNode(FakeNode):
    """Its guests are `EchoGuest`s."""

    def new_guest(self, sandbox_id: str, spec: SandboxSpec) -> "EchoGuest":
        return EchoGuest(self, sandbox_id, spec)


class EchoGuest(FakeGuest):
    """A command writes its own text and exits; one whose text begins with `stay` stays until the test ends it."""

    async def start(self, spec: ProcessSpec) -> FakeStream:
        stream = await super().start(spec)
        text = spec.shell if spec.shell is not None else " ".join(spec.argv or ())
        if not text.startswith("stay"):
            if text:
                self.emit(spec.process_id, text.encode("utf-8", "surrogateescape"))
            self.finish(spec.process_id)
        return stream


@dataclass
class Api:
    app: FastAPI
    services: Services
    node: EchoNode
    url: str
    key: str
    http: httpx.AsyncClient

    async def sandbox(self, **body: Any) -> str:
        answer = await self.http.post("/v1/sandboxes", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def guest(self, sandbox_id: str) -> EchoGuest:
        found = self.node.vms[sandbox_id]
        assert isinstance(found, EchoGuest)
        return found


class Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def __aenter__(self) -> Self:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self._task = asyncio.create_task(self.serve(sockets=[self.listening]))
        while not self.started:
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.should_exit = True
        await self._task


@asynccontextmanager
async def running_api(folder: Path, **options: Any) -> AsyncIterator[Api]:
    """`options` are those of `create_app`."""
    node = EchoNode()
    async with (
        open_store(f"sqlite:///{folder}/skerry.db") as store,
        node,
        open_services(store, node) as services,
    ):
        key, _ = await services.keys.first_key()
        app = create_app(services, **options)
        async with Uvicorn(server_config(app, stop_grace_s=1)) as server:
            host, port = server.listening.getsockname()[:2]
            url = f"http://{host}:{port}"
            async with httpx.AsyncClient(
                base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20, trust_env=False
            ) as http:
                yield Api(app, services, node, url, key, http)


def lines(text: str) -> list[dict[str, Any]]:
    """Newline-delimited JSON; every line must be whole."""
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]
