"""E2B's control API: sandboxes. Every route, and each way in which it says no."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
import pytest

from skerry.core.errors import GuestUnreachable, InternalError, OutcomeUnknown, Unavailable
from skerry.core.lifecycle import State
from skerry.core.models import NetworkRules
from support.e2b_control import Control, running_control
from support.fake_node import Fault


@pytest.fixture
async def e2b(tmp_path: Path) -> AsyncIterator[Control]:
    async with running_control(tmp_path) as control:
        yield control


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def said(answer: httpx.Response, status: int) -> str:
    """The message of a refusal, whose form is that of all."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["code"] == status
    assert set(body) <= {"code", "message", "error_code"}
    if status >= 500 or status == 429:
        assert answer.headers["should-retry"] in {"true", "false"}
    return body["message"]


# ------------------------------------------------------------------------------------------------------------- create


@pytest.mark.parametrize(("path", "timeout"), [("/sandboxes", 15), ("/v2/sandboxes", 300)])
async def test_create_answers_what_a_client_needs(e2b: Control, path: str, timeout: int) -> None:
    before = datetime.now(UTC)
    answer = await e2b.http.post(path, json={"templateID": "base", "metadata": {}, "envVars": {}})
    made = answer.json()
    assert answer.status_code == 201
    assert made == {
        "templateID": "base",
        "alias": "base",
        "sandboxID": made["sandboxID"],
        "clientID": "ndfake",
        "envdVersion": "0.6.13",
        "envdAccessToken": e2b.services.tokens.access(made["sandboxID"]),
        "trafficAccessToken": None,
        "domain": None,
    }
    left = moment((await e2b.detail(made["sandboxID"]))["endAt"]) - before
    assert timedelta(seconds=timeout) <= left < timedelta(seconds=timeout + 10)


async def test_all_that_a_sandbox_can_be_given(e2b: Control) -> None:
    made = await e2b.create(
        timeout=7,
        autoPause=True,
        autoPauseMemory=None,
        autoResume={"enabled": True},
        allow_internet_access=False,
        network={"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}", "denyOut": ["0.0.0.0/0"]},
        metadata={"k y": "v/1"},
        envVars={"A": "1"},
        mcp=None,
        iam={"tokens": {}},
        volumeMounts=[],
    )
    assert made["trafficAccessToken"] == e2b.services.tokens.traffic(made["sandboxID"])
    seen = await e2b.detail(made["sandboxID"])
    assert seen["metadata"] == {"k y": "v/1"}
    assert seen["network"] == {
        "allowPublicTraffic": False,
        "maskRequestHost": "localhost:${PORT}",
        "denyOut": ["0.0.0.0/0"],
    }
    assert seen["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    assert seen["allowInternetAccess"] is False
    assert seen["envdAccessToken"] == made["envdAccessToken"]
    assert (seen["cpuCount"], seen["memoryMB"], seen["diskSizeMB"], seen["state"]) == (1, 512, 8192, "running")
    record = await e2b.services.sandboxes.get(e2b.me, made["sandboxID"])
    assert (record.spec.idle_timeout_ms, record.spec.timeout_ms) == (None, 7000)
    assert e2b.node.vms[record.id].spec.env == {"A": "1"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("autoPauseMemory", False),  # without autoPause
        ("mcp", {"github": {}}),
        ("iam", {"tokens": {"aws": {"audience": "a", "tokenType": "JWT-SVID"}}}),
        ("volumeMounts", [{"name": "v", "path": "/v"}]),
        ("network", {"allowOut": ["example.com"]}),  # beyond what the project allows
        ("network", {"allowOut": ["http://x"]}),
        ("network", {"denyOut": ["10.0.0.0/33"]}),
        ("network", {"dnsServers": ["1.1.1.1"]}),
        ("network", {"egressProxy": {"address": "p:1"}}),
        ("network", {"egressProxy": {}}),
        ("network", {"rules": {"a.b": []}}),
        ("network", {"httpsPorts": [8443]}),
        ("network", {"maskRequestHost": "a b"}),
        ("network", {"new": 1}),
        ("timeout", -1),
        ("timeout", 14_401),
        ("timeout", 1.5),
        ("metadata", {"a": 1}),
        ("envVars", {"A B": "1"}),
        ("aFieldOfTomorrow", True),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(e2b: Control, field: str, value: Any) -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        message = said(await e2b.http.post(path, json={"templateID": "base", field: value}), 400)
        assert message.startswith(field), message
    assert e2b.node.creates == 0


async def test_seconds_are_told_as_seconds(e2b: Control) -> None:
    answer = await e2b.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 20_000})
    assert said(answer, 400) == "timeout: must be from 0 to 14400 seconds, not 20000"


async def test_environment_values_are_never_repeated(e2b: Control) -> None:
    answer = await e2b.http.post("/v2/sandboxes", json={"templateID": "base", "envVars": {"A": ["hunter2"]}})
    assert "hunter2" not in said(answer, 400)


async def test_only_the_first_generation_knows_secure(e2b: Control) -> None:
    for secure in (True, False):
        body = {"templateID": "base", "secure": secure, "allow_internet_access": True}
        made = await e2b.http.post("/sandboxes", json=body)
        assert made.json()["envdAccessToken"]
    answer = await e2b.http.post("/v2/sandboxes", json={"templateID": "base", "secure": True})
    assert said(answer, 400).startswith("secure")


async def test_a_timeout_of_nothing_ends_it_at_once(e2b: Control) -> None:
    made = await e2b.sandbox(timeout=0)
    await gone(e2b, made)


async def gone(e2b: Control, sandbox_id: str) -> None:
    async with asyncio.timeout(10):
        while (await e2b.http.get(f"/sandboxes/{sandbox_id}")).status_code != 404:
            await asyncio.sleep(0.02)


async def test_a_template_by_all_its_names(e2b: Control) -> None:
    project = e2b.me.project_id
    for name in ("base", "base:default", f"{project}/base", f"{project}/base:default"):
        assert (await e2b.create(templateID=name))["templateID"] == "base"
    for name in ("nope", "base:other", "another/base", f"snp{'0' * 20}"):
        answer = await e2b.http.post("/v2/sandboxes", json={"templateID": name})
        assert name.rpartition("/")[2].partition(":")[0] in said(answer, 404)
    for name in ("", ":x", "x:", "/x", "a/b/c", "a:b:c", "NOT a name"):
        assert said(await e2b.http.post("/v2/sandboxes", json={"templateID": name}), 400).startswith("templateID")


async def test_a_key_once_is_a_sandbox_once(e2b: Control) -> None:
    body = {"templateID": "base", "metadata": {"n": "1"}}
    key = {"Idempotency-Key": "abc-1"}
    answers = await asyncio.gather(*(e2b.http.post("/v2/sandboxes", json=body, headers=key) for _ in range(4)))
    assert {a.status_code for a in answers} == {201}
    assert len({a.text for a in answers}) == 1
    other = await e2b.http.post("/v2/sandboxes", json={**body, "metadata": {}}, headers=key)
    said(other, 422)
    assert other.json()["error_code"] == "idempotency_request_mismatch"
    sandbox_id = answers[0].json()["sandboxID"]
    await e2b.http.delete(f"/sandboxes/{sandbox_id}")
    said(await e2b.http.post("/v2/sandboxes", json=body, headers=key), 404)


async def test_a_client_that_hangs_up_leaves_nothing(e2b: Control) -> None:
    e2b.node.faults.create_gate = asyncio.Event()
    with pytest.raises(httpx.ReadTimeout):
        await e2b.http.post("/v2/sandboxes", json={"templateID": "base"}, timeout=httpx.Timeout(60, read=1))
    async with asyncio.timeout(60):
        while e2b.services.server.live():
            await asyncio.sleep(0.02)
    assert not e2b.node.vms


@pytest.mark.parametrize(
    ("error", "status", "retry", "code"),
    [
        (Unavailable("no room", code="node_full", retry_after=3), 503, "true", "sandbox_capacity_unavailable"),
        (InternalError("boot failed", code="vm_start_failed"), 500, "false", "sandbox_create_failed"),
        (GuestUnreachable("no answer"), 503, "true", None),
        (OutcomeUnknown("the line broke"), 500, "false", None),
        (RuntimeError("a bug"), 500, "false", "sandbox_create_failed"),
    ],
)
async def test_whether_to_try_again_is_always_said(
    e2b: Control, error: Exception, status: int, retry: str, code: str | None
) -> None:
    e2b.node.faults.create = error
    answer = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"})
    said(answer, status)
    assert answer.headers["should-retry"] == retry
    assert answer.headers.get("retry-after") == ("3" if code == "sandbox_capacity_unavailable" else None)
    assert answer.json().get("error_code") == code


async def test_too_many_sandboxes_are_not_tried_again(tmp_path: Path) -> None:
    async with running_control(tmp_path, max_sandboxes=1) as e2b:
        await e2b.sandbox()
        answer = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"})
        assert "may have 1" in said(answer, 429)
        assert answer.headers["should-retry"] == "false"
        assert "retry-after" not in answer.headers


async def test_the_domain_is_told(tmp_path: Path) -> None:
    async with running_control(tmp_path, domain="box.example:3443") as e2b:
        made = await e2b.create()
        assert made["domain"] == "box.example:3443"
        assert (await e2b.detail(made["sandboxID"]))["domain"] == "box.example:3443"


# --------------------------------------------------------------------------------------------------------- form, keys


async def test_a_body_may_come_in_chunks(e2b: Control) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in (b'{"templateID"', b': "base"', b"}"):
            yield piece

    answer = await e2b.http.post("/v2/sandboxes", content=chunks(), headers={"Content-Type": "application/json"})
    assert answer.request.headers["transfer-encoding"] == "chunked"
    assert answer.status_code == 201


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"templateID": "base", "templateID": "base"}', b"\xff"])
async def test_what_is_no_json_object_is_refused(e2b: Control, body: bytes) -> None:
    said(await e2b.http.post("/v2/sandboxes", content=body, headers={"Content-Type": "application/json"}), 400)


async def test_keys_in_both_spellings_and_both_headers(e2b: Control) -> None:
    native = bytes.fromhex(e2b.key.removeprefix("e2b_")).decode()
    for headers in (
        {"X-API-KEY": e2b.key},
        {"X-API-KEY": native},
        {"Authorization": f"Bearer {e2b.key}"},
        {"Authorization": f"Bearer {native}"},
    ):
        async with httpx.AsyncClient(base_url=e2b.url, headers=headers, trust_env=False) as http:
            assert (await http.get("/v2/sandboxes")).json() == []
            assert (await http.get("/v1/server")).status_code == 200
    wrong = ({}, {"X-API-KEY": "e2b_00"}, {"X-API-KEY": "e2b_zz"}, {"X-API-KEY": "e2b_ff"}, {"X-API-KEY": "no"})
    for headers in wrong:
        async with httpx.AsyncClient(base_url=e2b.url, headers=headers, trust_env=False) as http:
            assert "key" in said(await http.get("/v2/sandboxes"), 401)


async def test_unknown_addresses_and_methods(e2b: Control) -> None:
    said(await e2b.http.get("/sandboxes/a/b/c"), 404)
    answer = await e2b.http.put("/v2/sandboxes")
    said(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD, POST"
    said(await e2b.http.get("/v2/sandboxes?surprise=1"), 400)


async def test_anothers_sandbox_is_as_if_it_were_not_there(e2b: Control) -> None:
    mine = await e2b.sandbox()
    other = await e2b.as_other()
    acts = [
        ("GET", f"/sandboxes/{mine}", None),
        ("DELETE", f"/sandboxes/{mine}", None),
        ("POST", f"/sandboxes/{mine}/timeout", {"timeout": 1}),
        ("POST", f"/sandboxes/{mine}/refreshes", {}),
        ("POST", f"/sandboxes/{mine}/pause", {}),
        ("POST", f"/sandboxes/{mine}/resume", {}),
        ("POST", f"/sandboxes/{mine}/connect", {"timeout": 1}),
        ("POST", f"/v2/sandboxes/{mine}/connect", {}),
        ("POST", f"/sandboxes/{mine}/fork", {}),
        ("POST", f"/sandboxes/{mine}/snapshots", {}),
        ("PUT", f"/sandboxes/{mine}/network", {}),
        ("GET", f"/sandboxes/{mine}/metrics", None),
        ("GET", f"/sandboxes/{mine}/logs", None),
        ("GET", f"/v2/sandboxes/{mine}/logs", None),
    ]
    for method, path, body in acts:
        foreign = await e2b.http.request(method, path, json=body, headers=other)
        nowhere = await e2b.http.request(method, path.replace(mine, f"sb{'0' * 20}"), json=body, headers=other)
        assert said(foreign, 404).replace(mine, "") == said(nowhere, 404).replace(f"sb{'0' * 20}", "")
    assert (await e2b.http.get("/v2/sandboxes", headers=other)).json() == []
    assert (await e2b.http.get(f"/sandboxes/metrics?sandbox_ids={mine}", headers=other)).json() == {"sandboxes": {}}
    assert (await e2b.detail(mine))["state"] == "running"


async def test_a_key_without_the_right_is_told_so(e2b: Control) -> None:
    mine = await e2b.sandbox()
    _, secret = await e2b.services.keys.create(e2b.me, "reader", ["sandboxes:read"])
    reader = {"X-API-KEY": secret}
    assert (await e2b.http.get(f"/sandboxes/{mine}", headers=reader)).status_code == 200
    for method, path, body in (
        ("POST", "/v2/sandboxes", {"templateID": "base"}),
        ("DELETE", f"/sandboxes/{mine}", None),
        ("POST", f"/sandboxes/{mine}/pause", {}),
        ("PUT", f"/sandboxes/{mine}/network", {}),
    ):
        assert "sandboxes:write" in said(await e2b.http.request(method, path, json=body, headers=reader), 403)


# --------------------------------------------------------------------------------------------------------------- list


async def ids(e2b: Control, path: str = "/v2/sandboxes", **query: str) -> list[str]:
    answer = await e2b.http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return [box["sandboxID"] for box in answer.json()]


async def test_a_listed_sandbox_has_all_its_fields(e2b: Control) -> None:
    made = await e2b.sandbox(metadata={"a": "1"})
    (seen,) = (await e2b.http.get("/v2/sandboxes")).json()
    assert set(seen) == {
        "templateID",
        "alias",
        "sandboxID",
        "clientID",
        "startedAt",
        "endAt",
        "cpuCount",
        "memoryMB",
        "diskSizeMB",
        "metadata",
        "state",
        "envdVersion",
    }
    whole = await e2b.detail(made)
    assert {field: whole[field] for field in seen} == seen  # bit-identical times


async def test_order_states_and_what_is_over(e2b: Control) -> None:
    first, second, third, killed = [await e2b.sandbox() for _ in range(4)]
    await e2b.http.delete(f"/sandboxes/{killed}")
    await e2b.http.post(f"/sandboxes/{second}/pause")
    assert await ids(e2b) == [third, second, first]
    assert await ids(e2b, order="desc") == [third, second, first]
    assert await ids(e2b, order="asc") == [first, second, third]
    assert await ids(e2b, state="running") == [third, first]
    assert await ids(e2b, state="paused") == [second]
    assert await ids(e2b, state="running,paused") == [third, second, first]
    both = await e2b.http.get("/v2/sandboxes?state=running&state=paused")
    assert len(both.json()) == 3
    assert await ids(e2b, "/sandboxes") == [third, first]
    for wrong in ("state=killed", "order=up", "limit=0", "limit=101", "startedAfter=yesterday", "nextToken=x"):
        message = said(await e2b.http.get(f"/v2/sandboxes?{wrong}"), 400)
        assert message.startswith(wrong.partition("=")[0]), message


async def test_started_after(e2b: Control) -> None:
    await e2b.sandbox()
    (seen,) = (await e2b.http.get("/v2/sandboxes")).json()
    e2b.clock.skip(5)
    later = await e2b.sandbox()
    assert await ids(e2b, startedAfter=seen["startedAt"]) == [later]
    local = moment(seen["startedAt"]).astimezone().isoformat()
    assert await ids(e2b, startedAfter=local) == [later]


async def test_metadata_is_decoded_three_times(e2b: Control) -> None:
    wanted = await e2b.sandbox(metadata={"k y": "v/1", "ü": "a&b=c%20", "more": ""})
    await e2b.sandbox(metadata={"k y": "v/2"})
    for pairs in ({"k y": "v/1"}, {"ü": "a&b=c%20"}, {"k y": "v/1", "ü": "a&b=c%20"}, {"more": ""}):
        inner = urlencode({quote(k): quote(v) for k, v in pairs.items()})
        for path in ("/v2/sandboxes", "/sandboxes"):
            assert await ids(e2b, path, metadata=inner) == [wanted]
    said(await e2b.http.get("/v2/sandboxes", params={"metadata": "novalue"}), 400)
    said(await e2b.http.get("/v2/sandboxes", params={"metadata": "a=%25ff"}), 400)
    captured = "/v2/sandboxes?metadata=k%252520y%3Dv%252F1"  # as the Python client sends it
    assert [box["sandboxID"] for box in (await e2b.http.get(captured)).json()] == [wanted]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_are_stable_while_sandboxes_come_and_go(e2b: Control, order: str) -> None:
    made = [await e2b.sandbox() for _ in range(7)]
    expected = made if order == "asc" else made[::-1]
    seen: list[str] = []
    token = ""
    while True:
        answer = await e2b.http.get("/v2/sandboxes", params={"limit": "2", "order": order, "nextToken": token})
        seen += [box["sandboxID"] for box in answer.json()]
        token = answer.headers.get("x-next-token", "")
        if not token:
            break
        if len(seen) == 2:
            await e2b.http.delete(f"/sandboxes/{expected[1]}")  # one that was shown
            await e2b.http.delete(f"/sandboxes/{expected[4]}")  # one that was not
            if order == "desc":
                await e2b.sandbox()
    assert seen == [*expected[:4], *expected[5:]]


async def test_a_token_is_good_for_the_list_that_gave_it(e2b: Control) -> None:
    for _ in range(3):
        await e2b.sandbox()
    token = (await e2b.http.get("/v2/sandboxes", params={"limit": "1"})).headers["x-next-token"]
    assert len(await ids(e2b, "/v2/sandboxes", nextToken=token, limit="50")) == 2
    for path, query in (
        ("/v2/sandboxes", {"order": "asc"}),
        ("/v2/sandboxes", {"state": "paused"}),
        ("/v2/sandboxes", {"metadata": "a=b"}),
        ("/snapshots", {}),
        ("/templates", {}),
        ("/templates/base", {}),
    ):
        said_of_it = said(await e2b.http.get(path, params={**query, "nextToken": token}), 400)
        assert said_of_it.startswith("nextToken: is not a token of this list")
    for forged in ("x", token[:-3], token[:8], token[8:], f"{token}AAAA", token[:8] + "é"):
        assert "nextToken" in said(await e2b.http.get("/v2/sandboxes", params={"nextToken": forged}), 400)


async def test_what_a_list_may_be_asked(e2b: Control) -> None:
    for query, text in (
        ({"state": "gone"}, "state: must be of running, paused, not 'gone'"),
        ({"order": "up"}, "order: must be 'asc' or 'desc', not 'up'"),
    ):
        assert said(await e2b.http.get("/v2/sandboxes", params=query), 400) == text


async def test_by_template(e2b: Control) -> None:
    plain = await e2b.sandbox()
    other = await e2b.sandbox(templateID="code-interpreter-v1")
    kept = (await e2b.http.post(f"/sandboxes/{plain}/snapshots", json={"name": "kept"})).json()["snapshotID"]
    copy = await e2b.create(templateID=kept)
    assert "alias" not in copy
    assert await ids(e2b, template="base") == [plain]
    assert await ids(e2b, template="code-interpreter-v1") == [other]
    for name in ("kept", kept, "kept:default", copy["templateID"]):
        assert await ids(e2b, template=name) == [copy["sandboxID"]]
    assert await ids(e2b, template="nobody-has-it") == []
    said(await e2b.http.get("/v2/sandboxes?template=a:b:c"), 400)


# ------------------------------------------------------------------------------------------------- kill, and timeouts


async def test_kill(e2b: Control) -> None:
    made = await e2b.sandbox()
    answer = await e2b.http.delete(f"/sandboxes/{made}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert "was killed" in said(await e2b.http.delete(f"/sandboxes/{made}"), 404)
    said(await e2b.http.delete("/sandboxes/never-was"), 404)
    paused = await e2b.sandbox()
    await e2b.http.post(f"/sandboxes/{paused}/pause")
    assert (await e2b.http.delete(f"/sandboxes/{paused}")).status_code == 204
    assert not e2b.node.images_at_rest


async def test_after_its_end_everything_is_not_there(e2b: Control) -> None:
    made = await e2b.sandbox()
    await e2b.http.delete(f"/sandboxes/{made}")
    for method, path, body in (
        ("GET", "", None),
        ("POST", "/timeout", {"timeout": 1}),
        ("POST", "/refreshes", {}),
        ("POST", "/pause", {}),
        ("POST", "/resume", {}),
        ("POST", "/connect", {"timeout": 5}),
        ("POST", "/fork", {}),
        ("POST", "/snapshots", {}),
        ("PUT", "/network", {}),
        ("GET", "/metrics", None),
    ):
        assert "was killed" in said(await e2b.http.request(method, f"/sandboxes/{made}{path}", json=body), 404)


async def test_set_timeout_moves_the_end_both_ways(e2b: Control) -> None:
    made = await e2b.sandbox(timeout=100)
    for seconds in (600, 5):
        before = datetime.now(UTC)
        assert (await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": seconds})).status_code == 204
        left = moment((await e2b.detail(made))["endAt"]) - before
        assert timedelta(seconds=seconds) <= left < timedelta(seconds=seconds + 5)
    assert (await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 0})).status_code == 204
    await gone(e2b, made)
    said(await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 10}), 404)
    other = await e2b.sandbox()
    for wrong in ({}, {"timeout": -1}, {"timeout": 14_401}, {"timeout": "5"}, {"timeout": 5, "more": 1}):
        said(await e2b.http.post(f"/sandboxes/{other}/timeout", json=wrong), 400)


async def test_at_its_end_it_is_paused_if_that_was_asked_for(e2b: Control) -> None:
    for memory, mode in ((True, "full"), (False, "filesystem")):
        made = await e2b.sandbox(timeout=60, autoPause=True, autoPauseMemory=memory)
        await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 0})
        async with asyncio.timeout(10):
            while (await e2b.detail(made))["state"] != "paused":
                await asyncio.sleep(0.02)
        assert (await e2b.detail(made))["pauseMode"] == mode
        assert e2b.node.images_at_rest[made].memory is memory
        back = await e2b.http.post(f"/v2/sandboxes/{made}/connect", json={})
        assert back.status_code == 201
        assert "pauseMode" not in await e2b.detail(made)
    answer = await e2b.http.post(
        "/v2/sandboxes",
        json={"templateID": "base", "autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    )
    assert said(answer, 400).startswith("autoPauseMemory")


async def test_refreshes_only_extend(e2b: Control) -> None:
    made = await e2b.sandbox(timeout=100)
    end = (await e2b.detail(made))["endAt"]
    for body in ({}, {"duration": 50}):
        assert (await e2b.http.post(f"/sandboxes/{made}/refreshes", json=body)).status_code == 204
        assert (await e2b.detail(made))["endAt"] == end
    assert (await e2b.http.post(f"/sandboxes/{made}/refreshes")).status_code == 204
    await e2b.http.post(f"/sandboxes/{made}/refreshes", json={"duration": 300})
    assert (await e2b.detail(made))["endAt"] > end


# ---------------------------------------------------------------------------------------------------- pause, and back


async def test_pause_and_connect(e2b: Control) -> None:
    made = await e2b.create(timeout=900)
    sandbox_id = made["sandboxID"]
    assert (await e2b.http.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 204
    seen = await e2b.detail(sandbox_id)
    assert (seen["state"], seen["pauseMode"]) == ("paused", "full")
    assert moment(seen["endAt"]) <= datetime.now(UTC)
    again = await e2b.http.post(f"/sandboxes/{sandbox_id}/pause", json={})
    assert "already paused" in said(again, 409)
    before = datetime.now(UTC)
    back = await e2b.http.post(f"/v2/sandboxes/{sandbox_id}/connect", json={"timeout": 30})
    assert (back.status_code, back.json()) == (201, made)  # the token is the same
    left = moment((await e2b.detail(sandbox_id))["endAt"]) - before
    assert timedelta(seconds=30) <= left < timedelta(seconds=35)  # even though it had more left


@pytest.mark.parametrize(("path", "body"), [("", {"timeout": 60}), ("/v2", {"timeout": 60})])
async def test_connect_to_a_running_one_only_extends(e2b: Control, path: str, body: dict[str, int]) -> None:
    made = await e2b.create(timeout=600)
    end = (await e2b.detail(made["sandboxID"]))["endAt"]
    answer = await e2b.http.post(f"{path}/sandboxes/{made['sandboxID']}/connect", json=body)
    assert (answer.status_code, answer.json()) == (200, made)
    assert (await e2b.detail(made["sandboxID"]))["endAt"] == end
    await e2b.http.post(f"{path}/sandboxes/{made['sandboxID']}/connect", json={"timeout": 900})
    assert (await e2b.detail(made["sandboxID"]))["endAt"] > end


async def test_the_generations_differ_in_the_timeout_of_a_connect(e2b: Control) -> None:
    made = await e2b.sandbox(timeout=10)
    said(await e2b.http.post(f"/sandboxes/{made}/connect", json={}), 400)
    said(await e2b.http.post(f"/sandboxes/{made}/connect"), 400)
    before = datetime.now(UTC)
    assert (await e2b.http.post(f"/v2/sandboxes/{made}/connect")).status_code == 200
    assert moment((await e2b.detail(made))["endAt"]) - before >= timedelta(seconds=300)


async def test_the_memory_may_be_left_out(e2b: Control) -> None:
    made = await e2b.sandbox()
    await e2b.http.post(f"/sandboxes/{made}/pause", json={"memory": False, "requireHealthyGuest": True})
    assert e2b.node.images_at_rest[made].memory is False
    assert (await e2b.detail(made))["pauseMode"] == "filesystem"
    assert (await e2b.http.post(f"/v2/sandboxes/{made}/connect", json={})).status_code == 201
    await e2b.http.post(f"/sandboxes/{made}/pause")
    answer = await e2b.http.post(f"/v2/sandboxes/{made}/connect", json={"memory": False})
    assert answer.status_code == 201
    assert e2b.node.woken == [(made, True), (made, False)]


async def test_resume_is_for_what_rests(e2b: Control) -> None:
    made = await e2b.create()
    sandbox_id = made["sandboxID"]
    said(await e2b.http.post(f"/sandboxes/{sandbox_id}/resume", json={}), 409)
    await e2b.http.post(f"/sandboxes/{sandbox_id}/pause")
    said(await e2b.http.post(f"/sandboxes/{sandbox_id}/resume", json={"autoPause": True}), 400)
    before = datetime.now(UTC)
    answer = await e2b.http.post(f"/sandboxes/{sandbox_id}/resume", json={"autoPause": False})
    assert (answer.status_code, answer.json()) == (201, made)
    left = moment((await e2b.detail(sandbox_id))["endAt"]) - before
    assert timedelta(seconds=15) <= left < timedelta(seconds=20)


async def test_many_connects_give_one_sandbox(e2b: Control) -> None:
    made = await e2b.sandbox()
    await e2b.http.post(f"/sandboxes/{made}/pause")
    answers = await asyncio.gather(
        *(e2b.http.post(f"/v2/sandboxes/{made}/connect", json={"timeout": 60 + n}) for n in range(8))
    )
    assert {a.status_code for a in answers} == {201}
    assert [act for act in e2b.node.acts if act.startswith("resume")] == [f"resume {made}"]
    assert moment((await e2b.detail(made))["endAt"]) - datetime.now(UTC) > timedelta(seconds=60)


async def test_something_else_is_under_way(e2b: Control) -> None:
    """A 409 would tell a pause that it is paused already, and a fork or connect that it never can be done."""
    made = await e2b.sandbox()
    gate = asyncio.Event()
    e2b.node.faults.snapshot = Fault(gate=gate)
    taking = asyncio.create_task(e2b.http.post(f"/sandboxes/{made}/snapshots", json={}))
    while not any(act.startswith("snapshot") for act in e2b.node.acts):
        await asyncio.sleep(0.01)
    answer = await e2b.http.post(f"/sandboxes/{made}/pause")
    said(answer, 503)
    assert answer.headers["should-retry"] == "true"
    gate.set()
    assert (await taking).status_code == 201


async def test_a_pause_or_connect_that_fails(e2b: Control) -> None:
    made = await e2b.sandbox()
    e2b.node.faults.pause = Fault(error=InternalError("disk trouble", code="passage_failed"))
    answer = await e2b.http.post(f"/sandboxes/{made}/pause")
    assert said(answer, 500) == "disk trouble"
    assert answer.headers["should-retry"] == "false"
    assert (await e2b.detail(made))["state"] == "running"
    e2b.node.faults.pause = None
    await e2b.http.post(f"/sandboxes/{made}/pause")
    e2b.node.faults.resume = Fault(error=Unavailable("no room", code="node_full"))
    answer = await e2b.http.post(f"/v2/sandboxes/{made}/connect", json={})
    said(answer, 503)
    assert answer.headers["should-retry"] == "true"
    assert (await e2b.detail(made))["state"] == "paused"


async def test_a_pause_that_needs_a_guest_that_answers(e2b: Control) -> None:
    """Clients take a bare 409 for a sandbox that rests already, so only who has asked for it gets one."""
    made = await e2b.sandbox()
    e2b.node.faults.pause = Fault(error=GuestUnreachable("the guest does not answer"))
    said(await e2b.http.post(f"/sandboxes/{made}/pause"), 503)
    answer = await e2b.http.post(f"/sandboxes/{made}/pause", json={"requireHealthyGuest": True})
    assert said(answer, 409) == "the guest does not answer"
    assert answer.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"
    assert (await e2b.detail(made))["state"] == "running"


# ------------------------------------------------------------------------------------------------------ fork, network


async def test_fork(e2b: Control) -> None:
    made = await e2b.create(metadata={"a": "1"}, network={"allowPublicTraffic": False})
    before = datetime.now(UTC)
    (one,) = (await e2b.http.post(f"/sandboxes/{made['sandboxID']}/fork")).json()
    assert one["sandbox"]["sandboxID"] != made["sandboxID"]
    assert set(one["sandbox"]) == set(made)
    copy = await e2b.detail(one["sandbox"]["sandboxID"])
    assert copy["metadata"] == {"a": "1"}
    assert copy["network"] == {"allowPublicTraffic": False}
    assert timedelta(seconds=15) <= moment(copy["endAt"]) - before < timedelta(seconds=25)
    e2b.node.faults.fork_copies = 1
    answer = await e2b.http.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 3, "timeout": 60})
    assert answer.status_code == 201
    good, *bad = answer.json()
    assert set(good) == {"sandbox"}
    assert [one["error"]["code"] for one in bad] == [503, 503]
    for count in (0, 21):
        body = {"count": count}
        assert said(await e2b.http.post(f"/sandboxes/{made['sandboxID']}/fork", json=body), 400).startswith("count")
    await e2b.http.post(f"/sandboxes/{made['sandboxID']}/pause")
    said(await e2b.http.post(f"/sandboxes/{made['sandboxID']}/fork", json={}), 409)


ALL: Final = ["0.0.0.0/0"]


@pytest.mark.parametrize(
    ("said_here", "layer"),
    [
        ({}, None),
        ({"allow_internet_access": True}, None),
        ({"allow_internet_access": False}, ("deny", (), ())),
        ({"network": {"denyOut": ALL}}, ("deny", (), ())),
        ({"network": {"denyOut": ALL, "allowOut": ["a.test"]}}, ("deny", ("a.test",), ())),
        ({"allow_internet_access": False, "network": {"allowOut": ["*.a.test"]}}, ("deny", ("*.a.test",), ())),
        (
            {"network": {"denyOut": ["192.0.2.0/24"], "allowOut": ["192.0.2.1"]}},
            ("open", ("192.0.2.1",), ("192.0.2.0/24",)),
        ),
        ({"network": {"denyOut": ["192.0.2.0/24"], "allowOut": ALL}}, None),
    ],
)
async def test_the_way_out_is_a_layer_within_the_projects(e2b: Control, said_here: Any, layer: Any) -> None:
    await e2b.services.egress.set(e2b.me, NetworkRules("open"))
    made = await e2b.create(**said_here)
    found = [(own.origin, own.mode, own.allow, own.deny) for own in e2b.node.vms[made["sandboxID"]].spec.egress]
    assert found == [("project", "open", (), ()), *([("sandbox", *layer)] if layer else [])]


async def test_network_update(e2b: Control) -> None:
    made = await e2b.sandbox()
    path = f"/sandboxes/{made}/network"
    for narrows in ({"denyOut": ["10.0.0.0/8"]}, {"denyOut": ALL}, {"allow_internet_access": False}):
        assert (await e2b.http.put(path, json=narrows)).status_code == 204
        assert [layer.origin for layer in e2b.node.vms[made].spec.egress] == ["project", "sandbox"]
    assert (await e2b.detail(made))["allowInternetAccess"] is False
    for clears in ({"allowOut": [], "rules": {}}, {}, {"allow_internet_access": True}):
        assert (await e2b.http.put(path, json=clears)).status_code == 204
    assert (await e2b.detail(made))["allowInternetAccess"] is True
    for opens in (
        {"allowOut": ["example.com"]},
        {"egressProxy": {"address": "a:1"}},
        {"egressProxy": {}},
        {"dnsServers": ["1.1.1.1"]},
        {"rules": {"a.b": [{}]}},
        {"allowPublicTraffic": False},
    ):
        (field,) = opens
        assert said(await e2b.http.put(path, json=opens), 400).startswith(field)
    await e2b.http.post(f"/sandboxes/{made}/pause")
    said(await e2b.http.put(path, json={}), 409)


async def test_every_act_is_in_the_one_record(e2b: Control) -> None:
    made = await e2b.sandbox()
    await e2b.http.post(f"/sandboxes/{made}/timeout", json={"timeout": 50})
    await e2b.http.post(f"/sandboxes/{made}/pause")
    await e2b.http.delete(f"/sandboxes/{made}")
    page = await e2b.services.sandboxes.events(e2b.me, made)
    assert [event.action for event in page.items] == [
        "sandbox.requested",
        "sandbox.created",
        "sandbox.timeout_set",
        "sandbox.paused",
        "sandbox.killed",
    ]
    assert {event.actor for event in page.items} == {e2b.me.key_id}
    assert (await e2b.services.sandboxes.get(e2b.me, made)).state is State.KILLED
    assert json.dumps(e2b.key) not in str(page)
