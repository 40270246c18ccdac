"""Sandboxes over HTTP: create once, list stably, end with a reason."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from skerry.core.errors import InternalError, Unavailable
from support.api_server import Api, running_api


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path) as found:
        yield found


async def test_create_with_nothing_gives_the_defaults(api: Api) -> None:
    made = await api.http.post("/v1/sandboxes")
    assert made.status_code == 201
    found = made.json()
    assert made.headers["location"] == f"/v1/sandboxes/{found['id']}"
    wanted = {"template": "base", "cpu": 1, "memory_mb": 512, "disk_mb": 8192, "timeout_ms": 300_000}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["state"], found["idle_timeout_ms"], found["end_reason"]) == ("running", 300_000, None)
    assert found["created_at"].endswith("Z")
    assert (await api.http.get(f"/v1/sandboxes/{found['id']}")).json() == found


async def test_env_is_never_given_back(api: Api) -> None:
    made = await api.http.post("/v1/sandboxes", json={"env": {"TOKEN": "hunter2"}})
    assert made.status_code == 201
    logs = await api.http.get(f"/v1/sandboxes/{made.json()['id']}/logs")
    assert "hunter2" not in made.text + logs.text


async def test_an_idempotency_key_creates_once(api: Api) -> None:
    headers = {"Idempotency-Key": "k-1"}
    first = await api.http.post("/v1/sandboxes", json={"cpu": 2}, headers=headers)
    again = await api.http.post("/v1/sandboxes", json={"cpu": 2}, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    assert api.node.creates == 1
    other = await api.http.post("/v1/sandboxes", json={"cpu": 3}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")


async def test_refusals_of_the_node_keep_their_code(api: Api) -> None:
    refused = await api.http.post("/v1/sandboxes", json={"template": "nope"})
    assert (refused.status_code, refused.json()["code"]) == (404, "template_not_found")
    api.node.faults.create = Unavailable("full", code="node_full", retry_after=4.2)
    refused = await api.http.post("/v1/sandboxes")
    assert (refused.status_code, refused.json()["code"]) == (503, "node_full")
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["retry"] == "safe"
    api.node.faults.create = InternalError("no", code="vm_start_failed", step="network")
    refused = await api.http.post("/v1/sandboxes")
    assert refused.json()["context"]["step"] == "network"


async def test_a_list_pages_stably(api: Api) -> None:
    made = [await api.sandbox(metadata={"n": str(n), "all": "1"}) for n in range(5)]
    first = (await api.http.get("/v1/sandboxes?limit=2")).json()
    await api.sandbox()
    second = (await api.http.get(f"/v1/sandboxes?limit=3&cursor={first['next_cursor']}")).json()
    assert [s["id"] for s in first["items"] + second["items"]] == made[::-1]
    assert second["next_cursor"] is None
    await api.http.delete(f"/v1/sandboxes/{made[0]}")
    killed = (await api.http.get("/v1/sandboxes?state=killed&state=error")).json()
    assert [s["id"] for s in killed["items"]] == [made[0]]
    tagged = (await api.http.get("/v1/sandboxes?metadata=n%3D3&metadata=all%3D1")).json()
    assert [s["id"] for s in tagged["items"]] == [made[3]]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("state=dead", "state.0"),
        ("metadata=x", "metadata"),
        ("metadata=a%3D1&metadata=a%3D2", "metadata"),
        ("template=a&template=b", "template"),
    ],
)
async def test_a_wrong_list_names_its_parameter(api: Api, query: str, field: str) -> None:
    refused = await api.http.get(f"/v1/sandboxes?{query}")
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == field


async def test_timeouts_are_set_and_extended(api: Api) -> None:
    box = await api.sandbox()
    url = f"/v1/sandboxes/{box}"
    shorter = (await api.http.patch(url, json={"timeout_ms": 60_000})).json()
    assert shorter["timeout_ms"] == 60_000
    longer = (await api.http.patch(url, json={"extend_timeout_ms": 600_000})).json()
    assert longer["expires_at"] > shorter["expires_at"]
    same = (await api.http.patch(url, json={"extend_timeout_ms": 60_000})).json()
    assert same["expires_at"] == longer["expires_at"]
    for body in ({}, {"timeout_ms": 60_000, "extend_timeout_ms": 60_000}, {"timeout_ms": 1}, {"timeout_ms": None}):
        assert (await api.http.patch(url, json=body)).status_code == 400


async def test_a_killed_sandbox_stays_and_says_so(api: Api) -> None:
    box = await api.sandbox()
    killed = (await api.http.delete(f"/v1/sandboxes/{box}")).json()
    assert (killed["state"], killed["end_reason"]) == ("killed", "killed")
    assert (await api.http.delete(f"/v1/sandboxes/{box}")).json() == killed
    for method, rest, body in (
        ("POST", "run", {"command": "x"}),
        ("GET", "metrics", None),
        ("GET", "files?path=/x", None),
        ("GET", "processes", None),
    ):
        gone = await api.http.request(method, f"/v1/sandboxes/{box}/{rest}", json=body)
        assert (gone.status_code, gone.json()["code"]) == (410, "sandbox_killed"), rest
    assert (await api.http.patch(f"/v1/sandboxes/{box}", json={"timeout_ms": 60_000})).status_code == 410


@pytest.mark.parametrize("name", ["sb00000000000000000000", "nope", "a%00b", "sb%ff"])
async def test_one_that_never_was(api: Api, name: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/metrics"), ("GET", "/logs"), ("GET", "/processes")):
        refused = await api.http.request(method, f"/v1/sandboxes/{name}{rest}")
        assert (refused.status_code, refused.json()["code"]) == (404, "sandbox_not_found")


async def test_logs_metrics_and_console(api: Api) -> None:
    box = await api.sandbox()
    await api.http.post(f"/v1/sandboxes/{box}/run", json={"command": "x"})
    page = (await api.http.get(f"/v1/sandboxes/{box}/logs?limit=1")).json()
    assert len(page["items"]) == 1
    rest = (await api.http.get(f"/v1/sandboxes/{box}/logs?cursor={page['next_cursor']}")).json()
    actions = [e["action"] for e in page["items"] + rest["items"]]
    assert actions[-2:] == ["command.started", "command.finished"]
    assert set(rest["items"][0]) == {"id", "at", "action", "actor", "outcome", "detail"}
    assert (await api.http.get(f"/v1/sandboxes/{box}/logs?console=true")).json() == {"console": "login:"}
    found = (await api.http.get(f"/v1/sandboxes/{box}/metrics")).json()
    assert (found["cpu_count"], found["processes"]) == (1, 1)


async def test_a_create_whose_client_hangs_up_leaves_nothing_unless_it_has_a_key(api: Api) -> None:
    for headers, left in (({}, []), ({"Idempotency-Key": "again"}, ["running"])):
        gate = api.node.faults.create_gate = asyncio.Event()
        with pytest.raises(httpx.ReadTimeout):
            await api.http.post("/v1/sandboxes", headers=headers, timeout=httpx.Timeout(10, read=0.2))
        gate.set()
        api.node.faults.create_gate = None
        async with asyncio.timeout(60):
            while True:
                found = (await api.http.get("/v1/sandboxes?state=creating&state=running")).json()["items"]
                if [box["state"] for box in found] == left and len(api.node.vms) == len(left):
                    break
                await asyncio.sleep(0.02)
    same = await api.http.post("/v1/sandboxes", headers={"Idempotency-Key": "again"})
    assert same.json()["id"] == found[0]["id"]
