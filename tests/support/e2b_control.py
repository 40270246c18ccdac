"""E2B's control API on a real port over a node without machines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from skerry.api.app import create_app
from skerry.api.e2b.control import create_control_app
from skerry.api.front import Faces, Front
from skerry.api.observe import Metrics
from skerry.api.server import server_config
from skerry.control import ControlConfig, Principal, Services, open_services
from skerry.core.api_keys import e2b_spelling
from skerry.store import Store, open_store
from support.api_server import EchoNode, Uvicorn
from support.house import Clock


@dataclass
class Control:
    services: Services
    store: Store
    node: EchoNode
    clock: Clock
    me: Principal
    key: str
    """In E2B's spelling."""
    url: str
    http: httpx.AsyncClient

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/v2/sandboxes", json={"templateID": "base", **body})
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def sandbox(self, **body: Any) -> str:
        return (await self.create(**body))["sandboxID"]

    async def detail(self, sandbox_id: str) -> dict[str, Any]:
        answer = await self.http.get(f"/sandboxes/{sandbox_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def as_other(self) -> dict[str, str]:
        """Headers of a key of another project, which may do everything but keys."""
        async with self.store.write() as tx:
            await tx.tenants.add_project(replace(await tx.tenants.oldest_project(), id="pjother", name="other"))
        scopes = ["sandboxes:read", "sandboxes:write", "sandboxes:use"]
        _, secret = await self.services.keys.create(replace(self.me, project_id="pjother"), "other", scopes)
        return {"X-API-KEY": e2b_spelling(secret)}

    async def settled(self) -> None:
        """Whatever is due has been done."""
        for task in self.services.timers.start_due():
            await task


@asynccontextmanager
async def running_control(folder: Path, *, domain: str | None = None, **settings: Any) -> AsyncIterator[Control]:
    """`settings` are those of `ControlConfig`."""
    node, clock = EchoNode(templates=("base", "code-interpreter-v1")), Clock()
    config = ControlConfig(clock=clock, passage_wait_s=2, guest_deadline_s=2, **settings)
    async with (
        open_store(f"sqlite:///{folder}/skerry.db") as store,
        node,
        open_services(store, node, config) as services,
    ):
        secret, _ = await services.keys.first_key()
        metrics = Metrics()
        faces = Faces(control=create_control_app(services, domain=domain))
        front = Front(create_app(services, metrics=metrics), faces, metrics=metrics, domain=domain)
        async with Uvicorn(server_config(front, stop_grace_s=1)) as serving:
            host, port = serving.listening.getsockname()[:2]
            url = f"http://{host}:{port}"
            key = e2b_spelling(secret)
            me = await services.keys.authenticate(secret)
            async with httpx.AsyncClient(base_url=url, headers={"X-API-KEY": key}, timeout=20, trust_env=False) as http:
                yield Control(services, store, node, clock, me, key, url, http)
