"""`/v1/secrets` and the command line's `secret`, over a real server and database."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.sdk import AsyncClient, SecretInfo
from support.api_server import Api, running_api

VALUE = "hunter2-Xq7-marker"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path) as running:
        yield running


async def test_put_list_look_delete(api: Api) -> None:
    made = await api.http.put("/v1/secrets/db-prod", json={"value": VALUE})
    again = await api.http.put("/v1/secrets/db-prod", json={"value": VALUE + "2"})
    assert (made.status_code, again.status_code) == (201, 200)
    assert again.json()["version"] == 2
    listed = await api.http.get("/v1/secrets")
    looked = await api.http.get("/v1/secrets/db-prod")
    assert [item["name"] for item in listed.json()["items"]] == ["db-prod"]
    assert [kept["version"] for kept in looked.json()["versions"]] == [2, 1]
    assert not any(VALUE in answer.text for answer in (made, again, listed, looked))
    assert (await api.http.delete("/v1/secrets/db-prod")).status_code == 204
    gone = await api.http.get("/v1/secrets/db-prod")
    assert (gone.status_code, gone.json()["code"]) == (404, "secret_not_found")


@pytest.mark.parametrize("body", [{"value": "short"}, {"value": VALUE + "\0"}, {"value": [VALUE]}, {"valeu": VALUE}])
async def test_a_refusal_never_repeats_the_value(api: Api, body: dict[str, object]) -> None:
    answer = await api.http.put("/v1/secrets/x", json=body)
    assert answer.status_code == 400
    assert "marker" not in answer.text
    assert "short" not in answer.text.replace("too short", "")


async def test_a_key_without_the_scope_learns_nothing(api: Api) -> None:
    await api.http.put("/v1/secrets/db-prod", json={"value": VALUE})
    body = {"name": "runner", "scopes": ["sandboxes:use", "secrets:use"]}
    key = (await api.http.post("/v1/keys", json=body)).json()["secret"]
    for method, path in (("GET", "/v1/secrets"), ("GET", "/v1/secrets/db-prod"), ("DELETE", "/v1/secrets/db-prod")):
        answer = await api.http.request(method, path, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, "db-prod" in answer.text) == (403, False)


async def test_the_client_and_the_command_line(api: Api, tmp_path: Path) -> None:
    async with AsyncClient(api.url, api.key) as client:
        made = await client.secrets.set("db-prod", VALUE)
        assert made == await client.secrets.get("db-prod")
        assert isinstance(made, SecretInfo)

        async def skerry(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
            command = [str(Path(sys.executable).parent / "skerry"), *arguments]
            environment = {
                "PATH": "/usr/bin:/bin",
                "SKERRY_API_URL": api.url,
                "SKERRY_API_KEY": api.key,
                "HOME": str(tmp_path),
            }
            return await asyncio.to_thread(
                subprocess.run, command, input=stdin, capture_output=True, env=environment, check=False
            )

        put = await skerry("secret", "set", "db-prod", stdin=VALUE.encode() + b"\n")
        assert (put.returncode, put.stdout) == (0, b"db-prod@2\n")
        listed = await skerry("secret", "ls", "--json")
        assert [item["version"] for item in json.loads(listed.stdout)] == [2]
        short = await skerry("secret", "set", "x", stdin=b"short\n")
        assert short.returncode == 125
        assert b"short\n" not in short.stderr
        assert (await skerry("secret", "rm", "db-prod")).stdout == b"db-prod\n"
        assert await client.secrets.list() == []
