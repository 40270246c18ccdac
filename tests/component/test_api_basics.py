"""The face itself: who gets in, how it refuses, what every answer carries."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from support.api_server import Api, running_api


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path, max_body_bytes=100_000) as found:
        yield found


def check(answer: Any, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["type"] == f"/errors#{code}"
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["retry"] in {"safe", "never", "unknown"}
    return problem


async def test_every_answer_has_an_id_of_its_own(api: Api) -> None:
    answers = [await api.http.get("/health") for _ in range(3)]
    assert [a.json() for a in answers] == [{"status": "ok"}] * 3
    assert len({a.headers["x-request-id"] for a in answers}) == 3


async def test_a_key_is_needed_and_its_state_is_told(api: Api) -> None:
    async def ask(headers: dict[str, str]) -> Any:
        async with type(api.http)(base_url=api.url, headers=headers, trust_env=False) as http:
            return await http.get("/v1/server")

    missing = await ask({})
    check(missing, 401, "key_missing")
    assert missing.headers["www-authenticate"] == "Bearer"
    check(await ask({"X-API-Key": "skerryabc"}), 401, "key_unknown")
    assert (await ask({"X-API-Key": api.key})).status_code == 200
    made = (await api.http.post("/v1/keys", json={"name": "x", "scopes": ["sandboxes:read"]})).json()
    assert (await ask({"Authorization": f"Bearer {made['secret']}"})).status_code == 200
    await api.http.delete(f"/v1/keys/{made['id']}")
    problem = check(await ask({"Authorization": f"Bearer {made['secret']}"}), 401, "key_revoked")
    assert made["secret"] not in str(problem)


async def test_keys_are_shown_once(api: Api) -> None:
    made = await api.http.post("/v1/keys", json={"name": "ci", "scopes": ["sandboxes:use", "sandboxes:read"]})
    assert made.status_code == 201
    secret = made.json()["secret"]
    listed = await api.http.get("/v1/keys")
    assert secret not in listed.text
    assert [k["name"] for k in listed.json()["items"]][-1] == "ci"
    assert secret.startswith(listed.json()["items"][-1]["prefix"])


async def test_a_key_without_the_scope_is_refused(api: Api) -> None:
    made = (await api.http.post("/v1/keys", json={"name": "x", "scopes": ["sandboxes:read"]})).json()
    answer = await api.http.post("/v1/sandboxes", headers={"Authorization": f"Bearer {made['secret']}"})
    problem = check(answer, 403, "forbidden")
    assert problem["context"]["scope"] == "sandboxes:write"


async def test_unknown_routes_and_methods(api: Api) -> None:
    check(await api.http.get("/nowhere"), 404, "route_not_found")
    check(await api.http.get("/v1/sandboxes/"), 404, "route_not_found")
    refused = await api.http.put("/v1/sandboxes")
    check(refused, 405, "method_not_allowed")
    assert set(refused.headers["allow"].replace(" ", "").split(",")) == {"GET", "POST"}


async def test_bodies_that_are_none(api: Api) -> None:
    json_type = {"Content-Type": "application/json"}
    check(await api.http.post("/v1/sandboxes", content=b"{", headers=json_type), 400, "malformed_json")
    check(await api.http.post("/v1/keys", content=b"", headers=json_type), 400, "malformed_json")
    check(await api.http.post("/v1/sandboxes", content=b"[]", headers=json_type), 400, "invalid_request")
    check(await api.http.post("/v1/sandboxes", data={"cpu": "1"}), 415, "unsupported_media_type")
    too_large = b'{"metadata": {"a": "' + b"x" * 100_000 + b'"}}'
    check(await api.http.post("/v1/sandboxes", content=too_large, headers=json_type), 413, "body_too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    check(await api.http.post("/v1/sandboxes", content=pieces(), headers=json_type), 413, "body_too_large")


async def test_all_wrong_fields_are_named_at_once_and_secrets_are_not_repeated(api: Api) -> None:
    body = {"cpu": 9, "memory_mb": "big", "nope": 1, "env": {"TOKEN": 5, "B": "hunter2", "A=B": "hunter2"}}
    problem = check(await api.http.post("/v1/sandboxes", json=body), 400, "invalid_request")
    assert {e["field"] for e in problem["errors"]} == {"cpu", "memory_mb", "nope", "env.TOKEN"}
    body = {"env": {"A=B": "hunter2"}}
    problem = check(await api.http.post("/v1/sandboxes", json=body), 400, "invalid_request")
    assert "hunter2" not in str(problem)


async def test_unknown_query_parameters_are_refused(api: Api) -> None:
    problem = check(await api.http.get("/v1/sandboxes?stat=running"), 400, "invalid_request")
    assert problem["errors"][0]["field"] == "stat"
    assert "state" in problem["errors"][0]["allowed"]
    check(await api.http.get("/v1/server?x=1"), 400, "invalid_request")


async def test_the_unexpected_is_logged_and_not_told(
    api: Api, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("inner secret")

    monkeypatch.setattr(type(api.services.sandboxes), "get", broken)
    answer = await api.http.get("/v1/sandboxes/sb00000000000000000000")
    problem = check(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    logging.shutdown()
    told = "".join(capfd.readouterr())
    assert problem["request_id"] in told
    assert "ZeroDivisionError" in told


async def test_the_log_has_neither_keys_nor_queries(api: Api, capfd: pytest.CaptureFixture[str]) -> None:
    await api.http.get("/v1/sandboxes?metadata=token%3Dhunter2")
    told = "".join(capfd.readouterr())
    assert "/v1/sandboxes" in told
    assert "hunter2" not in told
    assert api.key not in told


async def test_metrics_count_requests_by_route(api: Api) -> None:
    sandbox = await api.sandbox()
    await api.http.get(f"/v1/sandboxes/{sandbox}")
    await api.http.request("BREW", "/v1/sandboxes")
    text = (await api.http.get("/metrics")).text
    assert 'skerry_http_requests_total{method="GET",route="/v1/sandboxes/{sandbox_id}",status="200"} 1.0' in text
    assert 'skerry_sandboxes{state="running"} 1.0' in text
    assert "skerry_sandbox_create_seconds_count 1.0" in text
    assert "BREW" not in text
    assert sandbox not in text


async def test_the_document_is_openapi_3_1_and_names_every_refusal(api: Api) -> None:
    document = (await api.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    operations = [
        (path, method, operation) for path, item in document["paths"].items() for method, operation in item.items()
    ]
    assert len(operations) > 30
    assert len({operation["operationId"] for _, _, operation in operations}) == len(operations)
    for path, method, operation in operations:
        statuses = set(operation["responses"])
        assert {"400", "500"} <= statuses, (path, method)
        if operation["security"]:
            assert {"401", "403", "503"} <= statuses, (path, method)
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert all(f"{{{name}}}" in path for name in named)
        assert path.count("{") == len(named), path


async def test_server_info(api: Api) -> None:
    found = (await api.http.get("/v1/server")).json()
    assert set(found) == {"version", "node_id", "accelerator", "vmm", "templates"}
    assert found["templates"] == ["base"]


async def spoken(api: Api, text: bytes) -> tuple[bytes, dict[str, Any]]:
    """What a server answers to bytes, of which no HTTP library would send some: status line and problem."""
    url = httpx.URL(api.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(text)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length
        assert b"content-type: application/problem+json" in head
        return head.split(b"\r\n", 1)[0], json.loads(await reader.readexactly(int(length[1])))
    finally:
        writer.close()


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PUT / HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
        b"PUT / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"FOO / HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_as_everything_else_is(api: Api, text: bytes) -> None:
    status, problem = await spoken(api, text)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert (problem["code"], problem["status"], problem["retry"]) == ("malformed_http", 400, "never")


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key", "Idempotency-Key"])
async def test_a_header_that_is_given_twice_is_refused(api: Api, name: str) -> None:
    authorization = f"Authorization: Bearer {api.key}\r\n" if name != "Authorization" else ""
    twice = f"{name}: Bearer {api.key}\r\n{name}: other\r\n"
    request = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n{authorization}{twice}Content-Length: 0\r\n\r\n"
    status, problem = await spoken(api, request.encode())
    assert status == b"HTTP/1.1 400 Bad Request"
    assert problem["errors"][0]["field"] == name.title()
    assert api.key not in str(problem)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=latin1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "text/plain"},
    ],
)
async def test_a_body_of_another_form_is_not_guessed_at(api: Api, headers: dict[str, str]) -> None:
    check(await api.http.post("/v1/sandboxes", content=b"{}", headers=headers), 415, "unsupported_media_type")


async def test_texts_that_no_byte_stands_for_are_refused_everywhere(api: Api) -> None:
    box = await api.sandbox()
    for path, body in (
        ("/run", b'{"command": "\\ud800"}'),
        ("/run", b'{"argv": ["true", "\\ud800"]}'),
        ("/run", b'{"command": "true", "cwd": "\\ud800"}'),
        ("/run", b'{"command": "true", "user": "\\ud800"}'),
        ("/run", b'{"command": "true", "env": {"A": "\\ud800"}}'),
        ("/run", b'{"command": "true", "env": {"\\ud800": "a"}}'),
        ("/processes", b'{"command": "true", "tag": "\\ud800"}'),
        ("/files/mkdir", b'{"path": "\\ud800"}'),
        ("/files/move", b'{"source": "\\ud800", "target": "\\udfff"}'),
        ("/files/symlink", b'{"path": "/a", "target": "\\ud800"}'),
        ("/files/chmod", b'{"path": "/\\ud800", "mode": "0644"}'),
        ("/processes/\\ud800/signal", b'{"signal": "\\ud800"}'),
    ):
        answer = await api.http.post(
            f"/v1/sandboxes/{box}{path}", content=body, headers={"Content-Type": "application/json"}
        )
        assert 400 <= answer.status_code < 500, (path, body, answer.text)
    for query in ("template=%ff", "metadata=%ff=1", "cursor=%ff", "state=%ff"):
        check(await api.http.get(f"/v1/sandboxes?{query}"), 400, "invalid_request")
    for body in (b'{"template": "\\ud800"}', b'{"metadata": {"a": "\\ud800"}}', b'{"env": {"a": "\\ud800"}}'):
        answer = await api.http.post("/v1/sandboxes", content=body, headers={"Content-Type": "application/json"})
        check(answer, 400, "invalid_request")
    named = await api.http.post(
        "/v1/keys",
        content=b'{"name": "\\ud800", "scopes": ["sandboxes:read"]}',
        headers={"Content-Type": "application/json"},
    )
    check(named, 400, "invalid_request")
