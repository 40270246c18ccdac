"""`/v1/egress` and `/v1/sandboxes/{id}/network`, the SDK and the command line, over a real server and database."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from skerry.core.errors import Unavailable
from skerry.core.models import CuratedRule, NetworkEvent
from skerry.sdk import AsyncClient, AsyncSandbox, EgressPolicy, NetworkInfo
from support.api_server import Api, running_api

CURATED = CuratedRule("index.test:443", "pip", "pip's built-in index")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path) as running:
        await running.services.egress.learn([CURATED], ["go: there is no go on this machine"])
        yield running


def layers(api: Api, sandbox_id: str) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    return [(layer.origin, layer.mode, layer.allow, layer.deny) for layer in api.guest(sandbox_id).spec.egress]


PROJECT = ("project", "deny", ("index.test:443",), ())


async def test_by_default_it_is_the_curated_list(api: Api) -> None:
    found = (await api.http.get("/v1/egress")).json()
    assert found["policy"] == {"template": None, "mode": "deny", "allow": [], "deny": [], "updated_at": None}
    assert found["curated"] == [{"rule": "index.test:443", "tool": "pip", "source": "pip's built-in index"}]
    assert found["notes"] == ["go: there is no go on this machine"]
    assert layers(api, await api.sandbox()) == [PROJECT]


async def test_a_projects_policy_reaches_what_runs_and_what_rests(api: Api) -> None:
    runs, rests = await api.sandbox(), await api.sandbox()
    await api.http.post(f"/v1/sandboxes/{rests}/pause")
    api.node.connections = 3
    done = await api.http.put("/v1/egress", json={"mode": "allow", "allow": ["A.test", "db.test:1 -> 10.0.0.7:2"]})
    assert done.status_code == 200, done.text
    assert (done.json()["allow"], done.json()["connections_cut"]) == (["a.test", "db.test:1 -> 10.0.0.7:2"], 6)
    wanted = [("project", "deny", ("a.test", "db.test:1 -> 10.0.0.7:2"), ())]
    await api.http.post(f"/v1/sandboxes/{rests}/resume")
    assert layers(api, runs) == layers(api, rests) == layers(api, await api.sandbox()) == wanted
    assert (await api.http.delete("/v1/egress")).status_code == 200
    assert layers(api, runs) == [PROJECT]
    assert (await api.http.delete("/v1/egress")).json()["code"] == "policy_not_found"


async def test_a_template_and_a_sandbox_narrow_within_it(api: Api) -> None:
    await api.http.put("/v1/egress", json={"mode": "open"})
    body = {"allow": ["a.test", "b.test"]}
    assert (await api.http.put("/v1/egress/templates/base", json=body)).status_code == 200
    box = await api.sandbox(network={"allow": ["a.test"], "deny": ["192.0.2.0/24"]})
    assert layers(api, box) == [
        ("project", "open", (), ()),
        ("template", "deny", ("a.test", "b.test"), ()),
        ("sandbox", "deny", ("a.test",), ("192.0.2.0/24",)),
    ]
    found = (await api.http.get(f"/v1/sandboxes/{box}/network")).json()
    assert [layer["origin"] for layer in found["layers"]] == ["project", "template", "sandbox"]
    assert found["network"] == (await api.http.get(f"/v1/sandboxes/{box}")).json()["network"]
    assert (await api.http.get("/v1/egress")).json()["templates"][0]["template"] == "base"
    assert (await api.http.delete("/v1/egress/templates/base")).status_code == 200
    assert [layer[0] for layer in layers(api, box)] == ["project", "sandbox"]


async def test_copies_keep_a_sandboxs_own_rules(api: Api) -> None:
    box = await api.sandbox(network={"allow": []})
    (copy,) = (await api.http.post(f"/v1/sandboxes/{box}/fork", json={})).json()["items"]
    assert layers(api, copy["sandbox"]["id"]) == [PROJECT, ("sandbox", "deny", (), ())]
    assert copy["sandbox"]["network"] == {"mode": "allow", "allow": [], "deny": []}


async def test_a_sandboxs_rules_change_while_it_runs(api: Api) -> None:
    box = await api.sandbox(network={"allow": []})
    api.node.connections = 2
    for body, layer in (
        ({"deny": ["a.test"]}, ("sandbox", "open", (), ("a.test",))),
        ({"mode": "open"}, ("sandbox", "open", (), ())),
        ({"allow": ["index.test"]}, ("sandbox", "deny", ("index.test",), ())),
    ):
        done = await api.http.put(f"/v1/sandboxes/{box}/network", json=body)
        assert (done.status_code, done.json()["connections_cut"]) == (200, 2)
        assert layers(api, box) == [PROJECT, layer]
    events = (await api.http.get(f"/v1/sandboxes/{box}/logs")).json()["items"]
    told = [event["detail"] for event in events if event["action"] == "sandbox.network_set"]
    assert told[-1] == {"mode": "allow", "allow": ["index.test"], "deny": []}


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"allow": ["index.test", "http://x"]}, "invalid_request", "network.allow.1"),
        ({"allow": ["index.test", "evil.test"]}, "beyond_policy", "network.allow.1"),
        ({"deny": ["1.2.3.4/33"]}, "invalid_request", "network.deny.0"),
        ({"mode": "deny"}, "invalid_request", "network.mode"),
        ({"alow": []}, "invalid_request", "network.alow"),
        ({"allow": ["x.test:1 -> 10.0.0.7:2"]}, "invalid_request", "network.allow.0"),
    ],
)
async def test_what_a_sandbox_cannot_have_is_named(api: Api, body: dict[str, Any], code: str, field: str) -> None:
    answer = await api.http.post("/v1/sandboxes", json={"network": body})
    assert (answer.status_code, answer.json()["code"]) == (400, code), answer.text
    assert [problem["field"] for problem in answer.json()["errors"]] == [field]
    box = await api.sandbox()
    answer = await api.http.put(f"/v1/sandboxes/{box}/network", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, code), answer.text
    assert layers(api, box) == [PROJECT]
    assert api.node.creates == 1


async def test_who_may_do_what(api: Api) -> None:
    body = {"name": "runner", "scopes": ["sandboxes:read", "sandboxes:write", "sandboxes:use"]}
    key = (await api.http.post("/v1/keys", json=body)).json()["secret"]
    runner = {"Authorization": f"Bearer {key}"}
    box = await api.sandbox()
    for method, path, wanted in (
        ("GET", "/v1/egress", 403),
        ("PUT", "/v1/egress", 403),
        ("DELETE", "/v1/egress", 403),
        ("PUT", "/v1/egress/templates/base", 403),
        ("GET", f"/v1/sandboxes/{box}/network", 200),
        ("PUT", f"/v1/sandboxes/{box}/network", 200),
    ):
        content = {"mode": "open"} if method == "PUT" else None
        assert (await api.http.request(method, path, json=content, headers=runner)).status_code == wanted, path
    assert layers(api, box)[0] == PROJECT


async def test_what_it_did_is_told(api: Api) -> None:
    box = await api.sandbox()
    at, rule = datetime(2026, 1, 1, tzinfo=UTC), "project: allow a.test"
    told = [
        NetworkEvent(box, at, "look_up", False, "project: no rule allows it", "evil.test\x1b[31m\0", record="A"),
        NetworkEvent(box, at, "connection", True, rule, "a.test", "192.0.2.1", 443, None, None, 10, 20, 1.5),
        NetworkEvent(box, at, "connection", True, rule, "a.test", None, 443, error="unreachable"),
        NetworkEvent(box, at, "packet", False, "no rule allows it", None, "192.0.2.9", 22, protocol="tcp", count=7),
    ]
    await api.http.delete(f"/v1/sandboxes/{box}")  # the last words come when it is over
    for event in told:
        api.node.tell_traffic(event)
    path, found = f"/v1/sandboxes/{box}/network/events", []
    async with asyncio.timeout(20):
        while len(found) < len(told):
            found = (await api.http.get(path)).json()["items"]
    assert [event["kind"] for event in found] == [event.kind for event in told]
    assert (found[1]["sent_bytes"], found[1]["received_bytes"], found[1]["duration_ms"]) == (10, 20, 1.5)
    assert (found[3]["count"], found[3]["protocol"], found[3]["address"]) == (7, "tcp", "192.0.2.9")
    page = (await api.http.get(path, params={"refused": "true", "limit": 1})).json()
    assert page["items"][0]["name"].startswith("evil.test")
    rest = (await api.http.get(path, params={"refused": "true", "cursor": page["next_cursor"]})).json()
    assert [event["kind"] for event in rest["items"]] == ["packet"]
    logs = (await api.http.get(f"/v1/sandboxes/{box}/logs")).json()["items"]
    assert not [event for event in logs if event["action"].startswith("network.")]
    async with AsyncClient(api.url, api.key) as client:
        events = [event async for event in (await AsyncSandbox.connect(box, client=client)).network.events()]
    assert [event.rule for event in events] == [event.rule for event in told]
    command = [str(Path(sys.executable).parent / "skerry"), "net", box]
    environment = {"SKERRY_API_URL": api.url, "SKERRY_API_KEY": api.key}
    shown = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, check=True, timeout=60
    )
    assert b"\x1b" not in shown.stdout
    assert b"10 sent 20 received" in shown.stdout
    assert b"x7" in shown.stdout


async def test_a_node_that_refuses_gets_it_later(api: Api) -> None:
    box = await api.sandbox()
    api.node.faults.egress = Unavailable("not now")
    assert (await api.http.put(f"/v1/sandboxes/{box}/network", json={"allow": []})).status_code == 503
    assert layers(api, box) == [PROJECT]
    api.node.faults.egress = None
    async with asyncio.timeout(20):
        while layers(api, box) != [PROJECT, ("sandbox", "deny", (), ())]:
            await asyncio.sleep(0.05)


async def test_a_policy_that_changes_while_a_sandbox_comes_up_reaches_it(api: Api) -> None:
    gate = api.node.faults.create_gate = asyncio.Event()
    making = asyncio.create_task(api.sandbox())
    while api.node.creates == 0:
        await asyncio.sleep(0.01)
    setting = asyncio.create_task(api.http.put("/v1/egress", json={"mode": "allow"}))
    await asyncio.sleep(0.2)
    gate.set()
    box = await making
    assert (await setting).json()["pending"] == 0
    assert layers(api, box) == [("project", "deny", (), ())]


async def test_the_client_and_the_command_line(api: Api, tmp_path: Path) -> None:
    async with AsyncClient(api.url, api.key) as client:
        done = await client.egress.set("deny", allow=["git.test:22"], deny=["192.0.2.0/24"])
        assert (done.allow, done.pending) == (("git.test:22",), 0)
        async with AsyncSandbox.create(client=client, network=False) as box:
            assert (await box.info()).network == NetworkInfo("allow", (), ())
            assert (await box.network.update({"allow": ["git.test:22"]})).allow == ("git.test:22",)
            assert (await box.network.get()).layers[1].origin == "sandbox"
            assert (await box.network.update(True)).mode == "open"

            def skerry(*arguments: str) -> subprocess.CompletedProcess[str]:
                return subprocess.run(
                    [str(Path(sys.executable).parent / "skerry"), *arguments],
                    env={"SKERRY_API_URL": api.url, "SKERRY_API_KEY": api.key, "HOME": str(tmp_path)},
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )

            shown = await asyncio.to_thread(skerry, "egress", "show")
            assert "pip's built-in index" in shown.stdout
            assert "git.test:22" in shown.stdout
            assert "there is no go" in shown.stderr
            assert (await asyncio.to_thread(skerry, "egress", "narrow", box.id, "--no-network")).returncode == 0
            assert layers(api, box.id)[1] == ("sandbox", "deny", (), ())
            of_one = await asyncio.to_thread(skerry, "egress", "show", box.id)
            assert "everything else" in of_one.stdout
            wrong = await asyncio.to_thread(skerry, "egress", "narrow", box.id, "--allow", "evil.test")
            assert (wrong.returncode, "evil.test" in wrong.stderr) == (125, True)
            made = await asyncio.to_thread(skerry, "create", "--allow", "index.test", "--deny", "192.0.2.1", "--json")
            assert json.loads(made.stdout)["network"]["allow"] == ["index.test"]
            assert (await asyncio.to_thread(skerry, "egress", "set", "allow")).returncode == 0
            assert (await client.egress.get()).policy.mode == "allow"
            assert (await asyncio.to_thread(skerry, "egress", "reset")).returncode == 0
        found = await client.egress.get()
        assert found.policy == EgressPolicy(None, "deny", (), ())
        assert found.curated[0].rule == "index.test:443"
        await client.egress.set("allow", template="base")
        await client.egress.reset(template="base")
