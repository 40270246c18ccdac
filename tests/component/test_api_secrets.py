"""`/v1/secrets` and the command line's `secret`, over a real server and database."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import Conflict
from skerry.sdk import AsyncClient, AsyncSandbox, Client, Sandbox, SecretInfo, secret
from support.api_server import Api, running_api

VALUE = "hunter2-Xq7-marker"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path) as running:
        yield running


async def skerry(api: Api, home: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).parent / "skerry"), *arguments]
    environment = {
        "PATH": "/usr/bin:/bin", "SKERRY_API_URL": api.url, "SKERRY_API_KEY": api.key, "HOME": str(home),
    }  # fmt: skip
    return await asyncio.to_thread(
        subprocess.run, command, input=stdin, capture_output=True, env=environment, check=False
    )


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

        put = await skerry(api, tmp_path, "secret", "set", "db-prod", stdin=VALUE.encode() + b"\n")
        assert (put.returncode, put.stdout) == (0, b"db-prod@2\n")
        listed = await skerry(api, tmp_path, "secret", "ls", "--json")
        assert [item["version"] for item in json.loads(listed.stdout)] == [2]
        short = await skerry(api, tmp_path, "secret", "set", "x", stdin=b"short\n")
        assert short.returncode == 125
        assert b"short\n" not in short.stderr
        assert (await skerry(api, tmp_path, "secret", "rm", "db-prod")).stdout == b"db-prod\n"
        assert await client.secrets.list() == []


async def test_bindings_are_typed_values_of_env(api: Api) -> None:
    await api.http.put("/v1/secrets/db-prod", json={"value": VALUE})
    box = await api.sandbox(env={"PLAIN": "1", "A": {"secret": "db-prod"}})
    env = {"B": {"secret": "db-prod", "version": 1}, "F": {"secret": "db-prod", "file": True}, "C": "2"}
    for path in ("run", "processes"):
        answer = await api.http.post(f"/v1/sandboxes/{box}/{path}", json={"command": "true", "env": env})
        assert answer.status_code < 300, answer.text
        assert VALUE not in answer.text
    for given in api.guest(box).started.values():
        assert (given.env, given.secret_env) == ({"C": "2"}, {"A": VALUE, "B": VALUE})
        assert given.secret_files == {"F": VALUE}
    forked = await api.http.post(f"/v1/sandboxes/{box}/fork", json={"env": {"A": "plain"}})
    assert forked.status_code == 201


@pytest.mark.parametrize(
    ("value", "field", "code"),
    [
        (5, "env.A", "invalid_request"),
        (None, "env.A", "invalid_request"),
        ({}, "env.A.secret", "invalid_request"),
        ({"secret": f"{VALUE} pasted"}, "env.A.secret", "invalid_request"),
        ({"secret": "db-prod", "version": 0}, "env.A.version", "invalid_request"),
        ({"secret": "db-prod", "value": VALUE}, "env.A.value", "invalid_request"),
        ({"secret": "nope"}, None, "secret_not_found"),
    ],
)
async def test_a_wrong_binding_is_named_and_no_value_repeated(
    api: Api, value: object, field: str | None, code: str
) -> None:
    await api.http.put("/v1/secrets/db-prod", json={"value": VALUE})
    box = await api.sandbox()
    for path, body in (("/v1/sandboxes", {}), (f"/v1/sandboxes/{box}/run", {"command": "true"})):
        answer = await api.http.post(path, json={**body, "env": {"A": value}})
        problem = answer.json()
        assert problem["code"] == code
        assert [each["field"] for each in problem.get("errors") or ()] == ([field] if field else [])
        assert "marker" not in answer.text


async def test_the_client_binds_at_creation_for_a_command_and_in_a_terminal(api: Api) -> None:
    async with AsyncClient(api.url, api.key) as client:
        await client.secrets.set("db-prod", VALUE)
        async with await AsyncSandbox.create(env={"A": secret("db-prod"), "B": "1"}, client=client) as box:
            await box.run("true", env={"C": secret("db-prod", 1, file=True)})
            process = await box.commands.start("stay", env={"D": secret("db-prod")})
            await process.kill()
            async with await box.pty("stay", env={"E": secret("db-prod")}):
                pass
            given = list(api.guest(box.id).started.values())
            assert [sorted({**spec.secret_env, **spec.secret_files}) for spec in given] == [
                ["A", "C"], ["A", "D"], ["A", "E"],
            ]  # fmt: skip
            with pytest.raises(Conflict) as refused:
                await box.snapshot()
            assert refused.value.code == "secrets_in_memory"
            assert (await box.snapshot(secrets="keep")).holds_secrets
    blocking = Client(api.url, api.key)

    def by_blocking() -> None:
        with blocking, Sandbox.create(env={"A": secret("db-prod")}, client=blocking) as box:
            box.run("true", env={"B": secret("db-prod")})
            assert api.guest(box.id).started.popitem()[1].secret_env == {"A": VALUE, "B": VALUE}

    await asyncio.to_thread(by_blocking)


async def test_the_command_line_binds(api: Api, tmp_path: Path) -> None:
    await api.http.put("/v1/secrets/db-prod", json={"value": VALUE})
    box = await api.sandbox()
    command = ["exec", box, "--env", "P=1", "--secret-env", "A=db-prod@1", "--secret-file", "F=db-prod", "--", "true"]
    done = await skerry(api, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    given = api.guest(box).started.popitem()[1]
    assert (given.env, given.secret_env, given.secret_files) == ({"P": "1"}, {"A": VALUE}, {"F": VALUE})
    for wrong in ("A", "A=", f"A={VALUE} pasted", "A=db-prod@0"):
        refused = await skerry(api, tmp_path, "exec", box, "--secret-env", wrong, "--", "true")
        assert refused.returncode == 125
        assert b"marker" not in refused.stderr
    assert (await skerry(api, tmp_path, "snapshot", box)).returncode == 125
    assert (await skerry(api, tmp_path, "snapshot", box, "--keep-secrets")).returncode == 0


async def test_step_tokens(api: Api) -> None:
    await api.http.put("/v1/secrets/git", json={"value": VALUE})
    box = await api.sandbox()
    path = f"/v1/sandboxes/{box}/step-tokens"
    body = {"secret": "git", "host": "git.example", "methods": ["GET"], "repository": "acme/app", "step": "review"}
    made = await api.http.post(path, json=body)
    assert made.status_code == 201, made.text
    renewed = await api.http.post(f"{path}/renew", json={"token": made.json()["token"]})
    assert renewed.status_code == 200
    assert renewed.json()["token"] != made.json()["token"]
    late = await api.http.post(f"{path}/renew", json={"token": made.json()["token"]})
    assert (late.status_code, late.json()["code"], late.json()["context"]["reason"]) == (
        403, "step_token_refused", "unknown",
    )  # fmt: skip
    (listed,) = (await api.http.get(path)).json()["items"]
    assert listed == {k: v for k, v in renewed.json().items() if k != "token"}
    assert (await api.http.delete(f"{path}/{listed['id']}")).status_code == 204
    assert (await api.http.get(path)).json()["items"][0]["revoked"] == "revoked"
    assert (await api.http.delete(f"{path}/nope")).json()["code"] == "step_token_not_found"
    wrong = await api.http.post(path, json={**body, "host": "Git", "budget": 0, "methods": ["BREW"]})
    assert {problem["field"].split(".")[0] for problem in wrong.json()["errors"]} == {"budget", "methods"}
    answers = (made, renewed, late, wrong, await api.http.get(path), await api.http.get(f"/v1/sandboxes/{box}/logs"))
    assert not any(VALUE in answer.text for answer in answers)
