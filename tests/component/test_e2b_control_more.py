"""E2B's control API: snapshots, templates, metrics, logs, and what is not there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest

from skerry.core.errors import GuestUnreachable, InternalError
from support.e2b_control import Control, running_control
from support.fake_node import Fault


@pytest.fixture
async def e2b(tmp_path: Path) -> AsyncIterator[Control]:
    async with running_control(tmp_path, sample_s=3600) as control:
        yield control


def said(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status
    return answer.json()["message"]


async def snapshot(e2b: Control, sandbox_id: str, **body: object) -> dict[str, object]:
    answer = await e2b.http.post(f"/sandboxes/{sandbox_id}/snapshots", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def delete(e2b: Control, snapshot_id: object) -> int:
    return (await e2b.http.delete(f"/templates/{quote(str(snapshot_id), safe='')}")).status_code


async def listed(e2b: Control, **query: str) -> list[str]:
    answer = await e2b.http.get("/snapshots", params=query)
    assert answer.status_code == 200, answer.text
    return [one["snapshotID"] for one in answer.json()]


# ---------------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_is_a_template_that_outlives_its_sandbox(e2b: Control) -> None:
    made = await e2b.sandbox()
    e2b.node.vms[made].files["/home/user/a"] = b"1"
    kept = await snapshot(e2b, made)
    assert kept["names"] == []
    await e2b.http.delete(f"/sandboxes/{made}")
    copies = [await e2b.create(templateID=kept["snapshotID"]) for _ in range(2)]
    assert {copy["templateID"] for copy in copies} == {kept["snapshotID"]}
    assert {e2b.node.vms[copy["sandboxID"]].files["/home/user/a"] for copy in copies} == {b"1"}
    assert await listed(e2b) == [kept["snapshotID"]]
    assert await delete(e2b, kept["snapshotID"]) == 204
    assert await delete(e2b, kept["snapshotID"]) == 404
    said(await e2b.http.post("/v2/sandboxes", json={"templateID": kept["snapshotID"]}), 404)
    assert await listed(e2b) == []


async def test_names_with_and_without_tags(e2b: Control) -> None:
    made = await e2b.sandbox()
    team = e2b.me.project_id
    kept = await snapshot(e2b, made, name="app")
    assert kept == {"snapshotID": f"{team}/app:default", "names": [f"{team}/app:default"]}
    tagged = await snapshot(e2b, made, name=f"{team}/app:v2")
    assert tagged == {"snapshotID": f"{team}/app:v2", "names": [f"{team}/app:v2"]}
    nameless = await snapshot(e2b, made)
    assert await listed(e2b) == [nameless["snapshotID"], f"{team}/app:v2", f"{team}/app:default"]
    assert await listed(e2b, name="app") == [f"{team}/app:v2", f"{team}/app:default"]
    assert await listed(e2b, name="app:v2") == [f"{team}/app:v2"]
    assert await listed(e2b, name=f"{team}/app:default") == [f"{team}/app:default"]
    assert await listed(e2b, name="ap") == []
    assert await listed(e2b, name="another/app") == []
    ids = {}
    for name in ("app", "app:default", f"{team}/app", f"{team}/app:default", "app:v2"):
        ids[name] = (await e2b.create(templateID=name))["templateID"]
    assert len(set(ids.values())) == 2
    assert ids["app"] != ids["app:v2"]
    assert await delete(e2b, f"{team}/app:v2") == 204
    assert await listed(e2b, name="app") == [f"{team}/app:default"]


async def test_a_name_goes_over_to_the_next_snapshot(e2b: Control) -> None:
    made = await e2b.sandbox()
    e2b.node.vms[made].files["/n"] = b"1"
    first = await snapshot(e2b, made, name="app")
    old = (await e2b.create(templateID="app"))["templateID"]
    e2b.node.vms[made].files["/n"] = b"2"
    assert await snapshot(e2b, made, name="app") == first
    new = await e2b.create(templateID="app")
    assert e2b.node.vms[new["sandboxID"]].files["/n"] == b"2"
    assert await listed(e2b) == [first["snapshotID"]]
    assert (await e2b.create(templateID=old))["templateID"] == old  # the older one is still there, under its id
    e2b.node.faults.snapshot = Fault(error=InternalError("no luck", code="passage_failed"))
    said(await e2b.http.post(f"/sandboxes/{made}/snapshots", json={"name": "app"}), 500)
    assert (await e2b.create(templateID="app"))["templateID"] == new["templateID"]  # one that fails takes no name
    assert await listed(e2b) == [first["snapshotID"]]  # and is not shown
    by_name = await e2b.http.get("/v2/sandboxes", params={"template": "app"})
    assert {box["templateID"] for box in by_name.json()} == {old, new["templateID"]}
    assert await delete(e2b, first["snapshotID"]) == 204  # all of that name
    assert not e2b.node.snapshots_kept


async def test_snapshots_by_sandbox_and_in_pages(e2b: Control) -> None:
    one, other = await e2b.sandbox(), await e2b.sandbox()
    of_one = [(await snapshot(e2b, one))["snapshotID"] for _ in range(3)]
    of_other = (await snapshot(e2b, other, memory=False))["snapshotID"]
    assert await listed(e2b, sandboxID=one) == of_one[::-1]
    seen: list[str] = []
    token = ""
    while True:
        answer = await e2b.http.get("/snapshots", params={"limit": "3", "nextToken": token})
        seen += [kept["snapshotID"] for kept in answer.json()]
        token = answer.headers.get("x-next-token", "")
        if not token:
            break
        await snapshot(e2b, one)  # a new one shifts nothing
    assert seen == [of_other, *of_one[::-1]]
    assert (await e2b.services.snapshots.get(e2b.me, str(of_other))).memory is False
    for wrong in ("limit=0", "limit=101", "nextToken=x", "name=:x", "more=1"):
        assert said(await e2b.http.get(f"/snapshots?{wrong}"), 400).startswith(wrong.partition("=")[0])


async def test_names_that_are_none(e2b: Control) -> None:
    made = await e2b.sandbox()
    for name in ("NO", ":x", "x:", "a/b/c", "x:y:z", "base", f"snp{'0' * 20}", "x" * 200):
        assert said(await e2b.http.post(f"/sandboxes/{made}/snapshots", json={"name": name}), 400).startswith("name")
    said(await e2b.http.post(f"/sandboxes/{made}/snapshots", json={"name": "another/app"}), 404)


async def test_another_project_sees_no_snapshot(e2b: Control) -> None:
    made = await e2b.sandbox()
    kept = await snapshot(e2b, made, name="app")
    other = await e2b.as_other()
    assert (await e2b.http.get("/snapshots", headers=other)).json() == []
    for name in ("app", kept["snapshotID"]):
        path = f"/templates/{quote(str(name), safe='')}"
        said(await e2b.http.delete(path, headers=other), 404)
        said(await e2b.http.post("/v2/sandboxes", json={"templateID": name}, headers=other), 404)
    assert await listed(e2b) == [kept["snapshotID"]]


# ---------------------------------------------------------------------------------------------------------- templates


async def test_templates_are_those_of_the_nodes(e2b: Control) -> None:
    await e2b.sandbox()
    for path in ("/templates", "/v2/templates", "/default-templates", f"/templates?teamID={e2b.me.project_id}"):
        base, interpreter = (await e2b.http.get(path)).json()
        assert (base["templateID"], interpreter["templateID"]) == ("base", "code-interpreter-v1")
        assert (base["spawnCount"], interpreter["spawnCount"]) == (1, 0)
        assert base["lastSpawnedAt"] is not None
        assert interpreter["lastSpawnedAt"] is None
        assert base["buildStatus"] == "ready"
        assert UUID(base["buildID"]) != UUID(interpreter["buildID"])
    whole = (await e2b.http.get("/templates/base")).json()
    assert {**whole, "builds": None} == {**base, "builds": None}
    assert [build["buildID"] for build in whole["builds"]] == [base["buildID"]]
    said(await e2b.http.get("/templates/nope"), 404)
    said(await e2b.http.get("/templates?teamID=another"), 403)


async def test_templates_come_in_pages(e2b: Control) -> None:
    every = [one["templateID"] for one in (await e2b.http.get("/templates")).json()]
    seen: list[str] = []
    token = ""
    while len(seen) < len(every):
        answer = await e2b.http.get("/v2/templates", params={"limit": "1", "nextToken": token})
        assert len(answer.json()) == 1
        seen.append(answer.json()[0]["templateID"])
        token = answer.headers.get("x-next-token", "")
    assert (seen, token) == (sorted(every), "")
    said(await e2b.http.get("/templates", params={"limit": "0"}), 400)


async def test_aliases(e2b: Control) -> None:
    kept = await snapshot(e2b, await e2b.sandbox(), name="app:v1")
    assert (await e2b.http.get("/templates/aliases/base")).json() == {"templateID": "base", "public": True}
    for name in ("app", "app:v1", quote(str(kept["snapshotID"]), safe="")):
        found = (await e2b.http.get(f"/templates/aliases/{name}")).json()
        assert found["templateID"].startswith("snp")
        assert found["public"] is False
    for name in ("nope", "another%2Fbase", "base:v2", f"snp{'0' * 20}"):
        said(await e2b.http.get(f"/templates/aliases/{name}"), 404)


async def test_the_servers_own_templates_stay(e2b: Control) -> None:
    assert "base" in said(await e2b.http.delete("/templates/base"), 403)
    assert "base" in said(await e2b.http.delete("/templates/base%3Adefault"), 403)
    said(await e2b.http.delete("/templates/nope"), 404)


async def test_tags(e2b: Control) -> None:
    made = await e2b.sandbox()
    await snapshot(e2b, made, name="app")
    await snapshot(e2b, made, name="app:v2")
    nameless = await snapshot(e2b, made)
    (only,) = (await e2b.http.get("/templates/base/tags")).json()
    assert only["tag"] == "default"
    found = (await e2b.http.get("/templates/app/tags")).json()
    assert [one["tag"] for one in found] == ["v2", "default"]
    assert len({UUID(one["buildID"]) for one in found}) == 2
    assert [one["tag"] for one in (await e2b.http.get(f"/templates/{nameless['snapshotID']}/tags")).json()] == [
        "default"
    ]
    said(await e2b.http.get("/templates/nope/tags"), 404)
    for body in ({"target": "app:default", "tags": ["x"]}, {"target": "base", "tags": ["x"]}):
        answer = await e2b.http.post("/templates/tags", json=body)
        said(answer, 501)
        assert answer.headers["should-retry"] == "false"
    for body in ({"target": ":x", "tags": ["x"]}, {"target": "x:", "tags": ["x"]}, {"target": "app", "tags": [":"]}):
        said(await e2b.http.post("/templates/tags", json=body), 400)
    said(await e2b.http.post("/templates/tags", json={"target": "nope", "tags": ["x"]}), 404)
    said(await e2b.http.request("DELETE", "/templates/tags", json={"name": "app", "tags": ["v2"]}), 501)
    said(await e2b.http.request("DELETE", "/templates/tags", json={"name": "app", "tags": []}), 400)
    said(await e2b.http.request("DELETE", "/templates/tags", json={"name": "nope", "tags": ["v2"]}), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/templates"),
        ("POST", "/v2/templates"),
        ("POST", "/v3/templates"),
        ("POST", "/templates/t"),
        ("PATCH", "/templates/t"),
        ("PATCH", "/v2/templates/t"),
        ("GET", "/templates/t/files/abc"),
        ("POST", "/templates/t/builds/b"),
        ("POST", "/v2/templates/t/builds/b"),
        ("GET", "/templates/t/builds/b/status"),
        ("GET", "/templates/t/builds/b/logs"),
        ("GET", "/templates/t/tags/count"),
        ("GET", "/templates/t/tags/x/assignments"),
        ("GET", "/secrets"),
        ("POST", "/secrets"),
        ("GET", "/secrets/s"),
        ("POST", "/secrets/s"),
        ("DELETE", "/secrets/s"),
        ("GET", "/volumes"),
        ("POST", "/volumes"),
        ("GET", "/volumes/v"),
        ("DELETE", "/volumes/v"),
    ],
)
async def test_what_is_not_there_is_said(e2b: Control, method: str, path: str) -> None:
    answer = await e2b.http.request(method, path, json={"name": "x"})
    assert "here" in said(answer, 501)
    assert answer.headers["should-retry"] == "false"
    nobody = await e2b.http.request(method, path, json={}, headers={"X-API-KEY": "e2b_00"})
    said(nobody, 401)


# ------------------------------------------------------------------------------------------------------ metrics, logs


async def test_metrics_have_all_their_fields(e2b: Control) -> None:
    made = await e2b.sandbox()
    (point,) = (await e2b.http.get(f"/sandboxes/{made}/metrics")).json()
    assert set(point) == {
        "timestamp",
        "timestampUnix",
        "cpuCount",
        "cpuUsedPct",
        "memUsed",
        "memTotal",
        "memCache",
        "diskUsed",
        "diskTotal",
    }
    at = point["timestampUnix"]
    for query, points in ((f"start={at}", 1), (f"end={at + 1}", 1), (f"start={at + 60}", 0), (f"end={at - 60}", 0)):
        assert len((await e2b.http.get(f"/sandboxes/{made}/metrics?{query}")).json()) == points, query
    for wrong in ("start=x", "end=999999999999999", "more=1"):
        assert said(await e2b.http.get(f"/sandboxes/{made}/metrics?{wrong}"), 400).startswith(wrong.partition("=")[0])


async def test_metrics_of_a_guest_that_does_not_answer_are_none(e2b: Control) -> None:
    made = await e2b.sandbox()
    e2b.node.faults.guest = GuestUnreachable("not now")
    assert (await e2b.http.get(f"/sandboxes/{made}/metrics")).json() == []
    assert (await e2b.http.get(f"/sandboxes/metrics?sandbox_ids={made}")).json() == {"sandboxes": {}}


async def test_metrics_of_many(e2b: Control) -> None:
    one, other, over = [await e2b.sandbox() for _ in range(3)]
    await e2b.http.delete(f"/sandboxes/{over}")
    found = (await e2b.http.get(f"/sandboxes/metrics?sandbox_ids={one},{other},{over},nobody")).json()["sandboxes"]
    assert set(found) == {one, other}
    assert found[one]["cpuCount"] == 1
    for wrong in ("", "sandbox_ids=", "sandbox_ids=" + ",".join(["x"] * 101)):
        assert said(await e2b.http.get(f"/sandboxes/metrics?{wrong}"), 400).startswith("sandbox_ids")


async def test_logs(e2b: Control) -> None:
    made = await e2b.sandbox()
    e2b.clock.skip(10)
    await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 60})
    said(await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 99_999}), 400)
    v1 = (await e2b.http.get(f"/sandboxes/{made}/logs")).json()
    v2 = (await e2b.http.get(f"/v2/sandboxes/{made}/logs")).json()["logs"]
    assert v1["logEntries"] == v2
    assert [line["line"] for line in v1["logs"]] == [entry["message"] for entry in v2]
    assert [(e["fields"]["action"], e["level"]) for e in v2] == [
        ("sandbox.requested", "info"),
        ("sandbox.created", "info"),
        ("sandbox.timeout_set", "info"),
        ("sandbox.timeout_set", "warn"),
    ]
    assert all(isinstance(value, str) for entry in v2 for value in entry["fields"].values())

    async def logs(path: str = "/v2", **query: str) -> list[str]:
        answer = await e2b.http.get(f"{path}/sandboxes/{made}/logs", params=query)
        return [entry["fields"]["action"] for entry in answer.json()["logs" if path else "logEntries"]]

    assert await logs(direction="backward", limit="2") == ["sandbox.timeout_set"] * 2
    assert await logs(level="warn") == ["sandbox.timeout_set"]
    assert await logs(search="sandbox.created") == ["sandbox.created"]
    assert await logs(limit="0") == []
    from_ms = str(int(e2b.clock().timestamp() - 5) * 1000)
    assert await logs(cursor=from_ms) == ["sandbox.timeout_set"] * 2
    assert await logs(cursor=from_ms, direction="backward") == ["sandbox.created", "sandbox.requested"]
    assert await logs("", start=from_ms) == ["sandbox.timeout_set"] * 2
    for wrong in ("direction=up", "level=loud", "limit=1001", "cursor=-1", "cursor=99999999999999999"):
        answer = await e2b.http.get(f"/v2/sandboxes/{made}/logs?{wrong}")
        assert said(answer, 400).startswith(wrong.partition("=")[0])
    await e2b.http.delete(f"/sandboxes/{made}")
    assert (await logs())[-1] == "sandbox.killed"  # of one that is over too


async def test_nobody_is_kept_awake_by_being_looked_at(tmp_path: Path) -> None:
    async with running_control(tmp_path, sample_s=0.02) as e2b:
        made = await e2b.sandbox()
        live_since = (await e2b.detail(made))["endAt"]
        async with asyncio.timeout(10):
            while len((await e2b.http.get(f"/sandboxes/{made}/metrics")).json()) < 3:
                await asyncio.sleep(0.05)
        assert (await e2b.detail(made))["endAt"] == live_since
