"""The front: one address for all faces. Applications that say what they were given stand in for the faces."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from skerry.api.app import create_app
from skerry.api.front import Faces, Front
from skerry.api.observe import Metrics
from skerry.control import open_services
from skerry.store import open_store
from support.fake_node import FakeNode

ID = "sb0123456789abcdefghjk"


def teller(name: str) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        said = {
            "face": name,
            "path": scope["path"],
            "sandbox": scope["skerry.sandbox_id"],
            "port": scope["skerry.route"].port,
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    return app


@pytest.fixture
async def http(tmp_path: Path) -> Any:
    node = FakeNode()
    async with open_store(f"sqlite:///{tmp_path}/s.db") as store, node, open_services(store, node) as services:
        metrics = Metrics()
        faces = Faces(teller("control"), teller("envd"), teller("ports"))
        native = create_app(services, metrics=metrics)
        front = Front(native, faces, metrics=metrics, domain="boxes.test:7070")
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client


async def test_each_face_gets_what_is_for_it(http: httpx.AsyncClient) -> None:
    routed = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "49983"}
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/health", headers=routed)).json() == {
        "face": "envd", "path": "/health", "sandbox": ID, "port": 49983,
    }  # fmt: skip
    assert (await http.get("/files?path=a")).json()["sandbox"] is None
    assert (await http.get("/v2/sandboxes")).json()["face"] == "control"
    found = (await http.get("/x", headers={"Host": f"8000-{ID}.boxes.test:7070"})).json()
    assert (found["face"], found["port"]) == ("ports", 8000)
    found = (await http.get(f"/v1/sandboxes/{ID}/ports/49983/files%2Fa")).json()
    assert (found["face"], found["path"]) == ("envd", "/files/a")


async def test_every_answer_has_an_id_and_is_counted(http: httpx.AsyncClient) -> None:
    for path, headers in (("/v2/sandboxes", {}), ("/", {"E2b-Sandbox-Id": ID}), ("/health", {})):
        assert (await http.get(path, headers=headers)).headers["x-request-id"]
    numbers = (await http.get("/metrics")).text
    assert 'skerry_http_requests_total{method="GET",route="none",status="400"} 1.0' in numbers


async def test_wrong_names_are_refused_in_the_form_of_their_face(http: httpx.AsyncClient) -> None:
    answer = await http.get("/", headers={"E2b-Sandbox-Id": ID})
    assert (answer.status_code, answer.text) == (400, "missing header: E2b-Sandbox-Port\n")
    answer = await http.get("/", headers={"Host": f"x-{ID}.boxes.test"})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    answer = await http.get(f"/v1/sandboxes/{ID}/ports/0/")
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_route")
