"""Pause, snapshot, fork as the faces have them: REST, both Python clients and the command line, over the real
application and a node without machines."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from skerry import AsyncClient, AsyncSandbox, Client, Conflict, ForkIncomplete, InvalidRequest, NotFound, Sandbox
from skerry.core.errors import InternalError, NoSpace
from skerry.node.contract import PoolStatus
from support.api_server import Api, running_api
from support.fake_node import Fault, Faults

SKERRY = str(Path(sys.executable).parent / "skerry")
POOL = PoolStatus("base", 1, 512, ready=3, wanted=4, hits=10, misses=2, oldest_s=12.5)


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path) as found:
        yield found


async def post(api: Api, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await api.http.post(f"/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# ----------------------------------------------------------------------------------------------------------------- REST


async def test_a_persistent_sandbox_has_its_own_idle_time(api: Api) -> None:
    found = await post(api, "/sandboxes", {"auto_pause": True, "auto_resume": True}, 201)
    assert (found["auto_pause"], found["auto_resume"], found["idle_timeout_ms"]) == (True, True, 900_000)
    found = await post(api, "/sandboxes", {"auto_pause": True, "idle_timeout_ms": 5000}, 201)
    assert found["idle_timeout_ms"] == 5000
    found = await post(api, "/sandboxes", {"auto_pause": True, "idle_timeout_ms": None}, 201)
    assert found["idle_timeout_ms"] is None


async def test_what_a_pause_keeps_is_said_and_refused_where_it_contradicts(api: Api) -> None:
    found = await post(api, "/sandboxes", {"auto_pause": True, "auto_pause_memory": False}, 201)
    assert (found["auto_pause"], found["auto_pause_memory"]) == (True, False)
    for body in ({"auto_pause_memory": False}, {"auto_pause": True, "auto_resume": True, "auto_pause_memory": False}):
        refused = await post(api, "/sandboxes", body, 400)
        assert [error["field"] for error in refused["errors"]] == ["auto_pause_memory"]
        assert refused["errors"][0]["given"] is False
    box = found["id"]
    running = await post(api, f"/sandboxes/{box}/resume", {"memory": False}, 409)
    assert (running["code"], running["context"]["state"]) == ("sandbox_state", "running")
    await post(api, f"/sandboxes/{box}/pause")
    assert (await post(api, f"/sandboxes/{box}/resume", {"memory": False}))["state"] == "running"


async def test_a_key_makes_snapshots_and_forks_once(api: Api) -> None:
    box = await api.sandbox()
    for path, body in (("snapshots", {"name": "n"}), ("fork", {"count": 2})):
        url, key = f"/v1/sandboxes/{box}/{path}", {"Idempotency-Key": path}
        first = await api.http.post(url, json=body, headers=key)
        assert first.status_code == 201
        assert (await api.http.post(url, json=body, headers=key)).json() == first.json()
        other = await api.http.post(url, json={}, headers=key)
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
        assert (await api.http.post(url, json=body, headers={"Idempotency-Key": "a b"})).status_code == 400
    assert len((await api.http.get("/v1/snapshots")).json()["items"]) == 1
    assert len(api.node.vms) == 3


async def test_pause_and_resume(api: Api) -> None:
    box = await api.sandbox(idle_timeout_ms=None)
    paused = await post(api, f"/sandboxes/{box}/pause")
    assert paused["state"] == "paused"
    assert paused["paused_at"].endswith("Z")
    assert await post(api, f"/sandboxes/{box}/pause", {"memory": False}) == paused
    refused = await post(api, f"/sandboxes/{box}/run", {"command": "x"}, 409)
    assert (refused["code"], refused["retry"]) == ("sandbox_paused", "never")
    listed = (await api.http.get("/v1/sandboxes", params={"state": "paused"})).json()["items"]
    assert listed == [paused]
    back = await post(api, f"/sandboxes/{box}/resume", {"timeout_ms": 900_000})
    assert (back["state"], back["paused_at"]) == ("running", None)
    assert datetime.fromisoformat(back["expires_at"]) > datetime.now(UTC) + timedelta(seconds=890)
    for path, body in (("pause", {"memory": 1}), ("pause", {"keep": 1}), ("resume", {"timeout_ms": 1})):
        assert (await post(api, f"/sandboxes/{box}/{path}", body, 400))["errors"]


async def test_a_resume_that_fails_says_why_and_leaves_it_paused(api: Api) -> None:
    box = await api.sandbox(idle_timeout_ms=None)
    paused = await post(api, f"/sandboxes/{box}/pause")
    for error, status in (
        (NotFound("no image", code="image_not_found"), 404),
        (InternalError("page 7 differs", code="image_damaged"), 500),
        (Conflict("made by qemu 9", code="image_mismatch"), 409),
    ):
        api.node.faults = Faults(resume=Fault(error))
        assert (await post(api, f"/sandboxes/{box}/resume", None, status))["code"] == error.code
        assert (await api.http.get(f"/v1/sandboxes/{box}")).json() == paused


async def test_snapshots(api: Api) -> None:
    box = await api.sandbox(cpu=2, memory_mb=1024)
    made = await post(api, f"/sandboxes/{box}/snapshots", {"name": "first", "memory": False}, 201)
    assert (made["state"], made["memory"], made["sandbox_id"], made["cpu"]) == ("ready", False, box, 2)
    bare = await post(api, f"/sandboxes/{box}/snapshots", None, 201)
    assert (bare["name"], bare["memory"]) == (None, True)
    assert (await api.http.get("/v1/snapshots")).json()["items"] == [bare, made]
    assert (await api.http.get("/v1/snapshots", params={"name": "first"})).json()["items"] == [made]
    page = (await api.http.get("/v1/snapshots", params={"sandbox_id": box, "limit": 1})).json()
    rest = (await api.http.get("/v1/snapshots", params={"limit": 1, "cursor": page["next_cursor"]})).json()
    assert (page["items"], rest["items"], rest["next_cursor"]) == ([bare], [made], None)
    other = await post(api, "/sandboxes", {"template": "first"}, 201)
    assert (other["template"], other["cpu"], other["memory_mb"]) == ("base", 2, 1024)
    assert other["snapshot_id"] == made["id"]
    refused = await post(api, "/sandboxes", {"template": "first", "cpu": 1, "memory_mb": 1024}, 400)
    assert refused["errors"] == [{"field": "cpu", "message": "is the snapshot's own", "given": 1, "allowed": 2}]
    assert (await api.http.delete("/v1/snapshots/first")).status_code == 204
    assert (await api.http.delete("/v1/snapshots/first")).status_code == 404
    assert (await api.http.get(f"/v1/snapshots/{bare['id']}")).json() == bare


async def test_a_fork_tells_of_each_copy_in_order(api: Api) -> None:
    box = await api.sandbox(env={"TOKEN": "hunter2"})
    api.node.faults.fork_copies = 1
    body = {"count": 2, "metadata": {"n": "1"}, "env": {"TOKEN": "hunter3"}}
    answer = await api.http.post(f"/v1/sandboxes/{box}/fork", json=body)
    assert answer.status_code == 201
    assert "hunter" not in answer.text
    first, second = answer.json()["items"]
    assert (first["sandbox"]["state"], first["sandbox"]["metadata"]) == ("running", {"n": "1"})
    assert (second["error"]["code"], second["error"]["status"]) == ("node_full", 503)
    assert second["error"]["request_id"] == answer.headers["x-request-id"]
    for count in (0, 21, "1"):
        assert (await post(api, f"/sandboxes/{box}/fork", {"count": count}, 400))["errors"][0]["field"] == "count"


async def test_a_fork_whose_client_hangs_up_leaves_no_copy(api: Api) -> None:
    box = await api.sandbox()
    gate = asyncio.Event()
    api.node.faults.fork = Fault(gate=gate)
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post(f"/v1/sandboxes/{box}/fork", json={"count": 3}, timeout=httpx.Timeout(10, read=0.2))
    gate.set()
    async with asyncio.timeout(60):
        while True:
            left = (await api.http.get("/v1/sandboxes?state=creating&state=running")).json()["items"]
            if [each["id"] for each in left] == [box] and set(api.node.vms) == {box}:
                break
            await asyncio.sleep(0.02)


async def test_the_pool_and_its_images_are_told_and_counted(api: Api) -> None:
    api.node.pools = [POOL]
    assert (await api.http.get("/v1/pool")).json()["items"][0] == {
        "template": "base",
        "cpu": 1,
        "memory_mb": 512,
        "ready": 3,
        "wanted": 4,
        "hits": 10,
        "misses": 2,
        "oldest_s": 12.5,
    }
    box = await api.sandbox()
    await post(api, f"/sandboxes/{box}/pause")
    (image,) = (await api.http.get("/v1/images")).json()["items"]
    assert (image["kind"], image["used_by"], image["damage"]) == ("pause", [box], None)
    (image,) = (await api.http.get("/v1/images", params={"verify": True})).json()["items"]
    assert image["damage"] == "page 7 differs"
    assert await post(api, "/images/collect") == {"removed": ["imold"]}
    text = (await api.http.get("/metrics")).text
    shape = '{cpu="1",memory_mb="512",template="base"}'
    for line in (
        f"skerry_pool_ready{shape} 3.0",
        f"skerry_pool_hits_total{shape} 10.0",
        f"skerry_pool_misses_total{shape} 2.0",
        'skerry_sandboxes{state="paused"} 1.0',
    ):
        assert line in text, line


# --------------------------------------------------------------------------------------------------------- the clients


async def test_the_asynchronous_client(api: Api) -> None:
    async with AsyncClient(api.url, api.key) as client:
        box = await AsyncSandbox.create(client=client, auto_pause=True, auto_resume=True)
        assert (box.created.auto_pause, box.created.auto_resume) == (True, True)
        assert (await box.pause(memory=False)).state == "paused"
        assert (await box.pause()).state == "paused"
        assert (await box.run("hello")).stdout == "hello"  # it is resumed
        await box.pause()
        assert (await box.resume(timeout=900)).state == "running"
        async with AsyncSandbox.resume(box.id, url=api.url, api_key=api.key) as held:
            assert held.id == box.id
        snapshot = await box.snapshot("s")
        assert await client.snapshots.get("s") == snapshot == (await client.snapshots.list(sandbox_id=box.id))[0]
        for ref in (snapshot, snapshot.id, "s"):
            async with AsyncSandbox.create(ref, client=client) as made:
                assert made.created.snapshot_id == snapshot.id
        copies = await box.fork(3, timeout=60, metadata={"n": "1"})
        assert {copy.created.timeout_ms for copy in copies} == {60_000}
        api.node.faults.fork_copies = 1
        with pytest.raises(ForkIncomplete) as incomplete:
            await box.fork(3)
        assert [(await copy.info()).state for copy in incomplete.value.copies] == ["running"]
        assert [error.code for error in incomplete.value.errors] == ["node_full", "node_full"]
        assert await client.snapshots.delete(snapshot)
        assert not await client.snapshots.delete(snapshot)
        api.node.pools = [POOL]
        assert [status.hits for status in await client.pool()] == [10]
        await box.pause()
        assert [image.used_by for image in await client.images(verify=True)] == [(box.id,)]
        assert await client.collect_images() == ["imold"]


async def test_the_blocking_client(api: Api) -> None:
    def work() -> None:
        with Client(api.url, api.key) as client, Sandbox.create(client=client) as box:
            assert box.pause().state == "paused"
            with pytest.raises(Conflict) as refused:
                box.run("x")
            assert refused.value.code == "sandbox_paused"
            assert box.resume().state == "running"
            box.pause()
            assert Sandbox.resume(box.id, timeout=900, client=client).run("hello").stdout == "hello"
            snapshot = box.snapshot(memory=False)
            with Sandbox.create(snapshot, client=client) as made:
                assert made.created.snapshot_id == snapshot.id
            with pytest.raises(InvalidRequest) as misfit:
                Sandbox.create(snapshot, cpu=2, client=client)
            assert misfit.value.problems[0].allowed == 1
            with box.fork()[0] as copy:
                assert copy.run("x").stdout == "x"
            assert copy.info().state == "killed"
            api.node.faults.fork_copies = 1
            with pytest.raises(ForkIncomplete) as incomplete:
                box.fork(2)
            (copy,) = incomplete.value.copies
            assert isinstance(copy, Sandbox)
            assert copy.kill().state == "killed"
            assert client.snapshots.list(name="none") == []
            assert client.snapshots.get(snapshot) == snapshot
            assert client.snapshots.delete(snapshot.id)
            assert client.pool() == []

    await asyncio.to_thread(work)


def test_what_is_asked_of_the_class_and_of_a_sandbox() -> None:
    for kind in (Sandbox, AsyncSandbox):
        with pytest.raises(TypeError, match="sandbox_id"):
            kind.resume()
    with pytest.raises(InvalidRequest):
        Sandbox.resume("sb0", timeout=-1, url="http://127.0.0.1:1", api_key="k")


# ---------------------------------------------------------------------------------------------------- the command line


async def skerry(api: Api, *arguments: str, code: int = 0) -> tuple[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SKERRY_")}
    process = await asyncio.create_subprocess_exec(
        SKERRY,
        *arguments,
        env={**own, "HOME": "/nonexistent", "SKERRY_API_URL": api.url, "SKERRY_API_KEY": api.key},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code, (out, error)
    return out.decode(), error.decode()


async def test_pause_and_resume_on_the_command_line(api: Api) -> None:
    box = (await skerry(api, "create", "--auto-pause", "--auto-resume"))[0].strip()
    found = (await api.http.get(f"/v1/sandboxes/{box}")).json()
    assert (found["auto_pause"], found["auto_resume"]) == (True, True)
    other = (await skerry(api, "create", "--auto-pause-disk-only"))[0].strip()
    found = (await api.http.get(f"/v1/sandboxes/{other}")).json()
    assert (found["auto_pause"], found["auto_pause_memory"]) == (True, False)
    _, error = await skerry(api, "resume", other, "--disk-only", code=1)
    assert "memory=false boots one that is paused" in error
    await skerry(api, "pause", other)
    assert (await skerry(api, "resume", other, "--disk-only"))[0] == f"{other}\n"
    assert (await skerry(api, "pause", box, "--disk-only"))[0] == f"{box}\n"
    assert not api.node.images_at_rest[box].memory
    out, error = await skerry(api, "pause", box, "--json")
    assert json.loads(out)[0]["state"] == "paused"
    assert "is paused already" in error
    assert " paused " in (await skerry(api, "ls"))[0]
    out, error = await skerry(api, "resume", box, "sb00000000000000000000", "--timeout", "900", code=1)
    assert (out, "there is no sandbox" in error) == (f"{box}\n", True)
    assert (await api.http.get(f"/v1/sandboxes/{box}")).json()["state"] == "running"


async def test_snapshots_and_forks_on_the_command_line(api: Api) -> None:
    box = await api.sandbox()
    snapshot = (await skerry(api, "snapshot", box, "--name", "s"))[0].strip()
    assert json.loads((await skerry(api, "snapshots", "ls", "--json"))[0])[0]["id"] == snapshot
    assert "memory and disk" in (await skerry(api, "snapshots", "ls", "--sandbox", box))[0]
    assert (await skerry(api, "run", "-t", "s", "--", "hello"))[0] == "hello"
    out, error = await skerry(api, "snapshots", "rm", "s", "nope", "--json", code=1)
    assert json.loads(out) == {"removed": ["s"]}
    assert json.loads(error)["code"] == "snapshot_not_found"
    copies = (await skerry(api, "fork", box, "--count", "2", "-m", "n=1"))[0].split()
    assert set(copies) < set(api.node.vms)
    api.node.faults.fork_copies = 1
    out, error = await skerry(api, "fork", box, "-n", "3", "--json", code=1)
    assert len(json.loads(out)) == 1
    assert [each["code"] for each in json.loads(error)["errors"]] == ["node_full", "node_full"]
    api.node.faults.snapshot = Fault(NoSpace("the host's disk is full", code="host_disk_full"))
    _, error = await skerry(api, "snapshot", box, code=125)
    assert "the host's disk is full" in error
    assert "failed: the host's disk is full" in (await skerry(api, "snapshots", "ls"))[0]


async def test_the_pool_and_its_images_on_the_command_line(api: Api) -> None:
    api.node.pools = [POOL]
    assert "12 s" in (await skerry(api, "pool"))[0]
    assert json.loads((await skerry(api, "pool", "--json"))[0])[0]["wanted"] == 4
    box = await api.sandbox()
    await post(api, f"/sandboxes/{box}/pause")
    assert box in (await skerry(api, "images", "ls"))[0]
    assert "page 7 differs" in (await skerry(api, "images", "verify", code=1))[0]
    assert json.loads((await skerry(api, "images", "verify", "--json", code=1))[0])[0]["kind"] == "pause"
    assert (await skerry(api, "images", "collect"))[0] == "imold\n"
