"""What was given to a sandbox in confidence is found where the documents say, and nowhere else. Case BUG-53."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from skerry import Sandbox, SkerryError
from support.server import Server

GIVEN = ("at-create", "at-call", "refused", "stdin", "file", "typed", "metadata")


@pytest.fixture(scope="module")
def canaries() -> dict[str, str]:
    return {name: f"canary-{name}-{uuid.uuid4().hex}" for name in GIVEN}


@pytest.fixture(scope="module")
def talkative(new_server: Callable[..., Server]) -> Server:
    return new_server(SKERRY_LOG_LEVEL="debug", SKERRY_POOL_FLOOR="0", SKERRY_POOL_CEILING="0")


@pytest.fixture(scope="module")
def used(talkative: Server, canaries: dict[str, str]) -> Iterator[Sandbox]:
    """A sandbox that was given one of each, in requests that succeeded and in some that did not."""
    env = {"X": canaries["at-create"]}
    with Sandbox.create(
        memory_mb=256, env=env, disk_mb=2048, metadata={"m": canaries["metadata"]}, **talkative.client
    ) as sandbox:
        sandbox.run("true", env={"Y": canaries["at-call"]})
        sandbox.run("cat", stdin=canaries["stdin"])
        sandbox.files.write("/home/user/kept", canaries["file"])
        with sandbox.pty() as terminal:
            terminal.send(f"echo {canaries['typed']}\n")
            terminal.recv(timeout=60)
        refused: tuple[Callable[[], object], ...] = (
            lambda: sandbox.run("true", env={"Y": canaries["refused"], "B AD": canaries["refused"]}),
            lambda: sandbox.run("true", cwd="/nowhere", env={"Y": canaries["refused"]}),
            lambda: Sandbox.create(env={"Y": canaries["refused"], "1": "x"}, **talkative.client),
        )
        for act in refused:
            with pytest.raises(SkerryError) as error:
                act()
            assert canaries["refused"] not in f"{error.value} {error.value.problems} {error.value.context}"
        yield sandbox


def found(data: bytes, canaries: dict[str, str]) -> set[str]:
    return {name for name, canary in canaries.items() if canary.encode() in data}


def files(server: Server, canaries: dict[str, str]) -> dict[str, set[str]]:
    """The kinds of files below the data directory, the server's log among them, that hold a canary."""
    places: dict[str, set[str]] = {}
    for path in server.data_dir.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0 or not found(path.read_bytes(), canaries), path
            for name in found(path.read_bytes(), canaries):
                kind = path.parent.name if path.is_relative_to(server.data_dir / "node") else path.name.split("-")[0]
                places.setdefault(name, set()).add(kind)
    return places


def test_files_hold_what_the_documents_say(talkative: Server, used: Sandbox, canaries: dict[str, str]) -> None:
    assert used.info().state == "running"
    places = files(talkative, canaries | {"key": talkative.api_key})
    assert places.pop("file", {"layers"}) == {"layers"}  # once the guest has written it out
    assert places == {"at-create": {"journal"}, "metadata": {"skerry.db"}, "key": {"client.json"}}


def test_no_process_of_the_host_shows_them(used: Sandbox, canaries: dict[str, str]) -> None:
    seen = set()
    for process in psutil.process_iter():
        for part in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                seen |= found(Path(f"/proc/{process.pid}/{part}").read_bytes(), canaries)
    assert seen == set(), used.id


def test_no_answer_repeats_them(talkative: Server, used: Sandbox, canaries: dict[str, str]) -> None:
    key = talkative.api_key
    for path in (
        "/v1/sandboxes", f"/v1/sandboxes/{used.id}", f"/v1/sandboxes/{used.id}/logs", "/metrics", "/v2/sandboxes",
        f"/v1/sandboxes/{used.id}/logs?console=true", f"/v1/sandboxes/{used.id}/processes", f"/sandboxes/{used.id}",
    ):  # fmt: skip
        for headers in ({"Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
            answer = httpx.get(f"{talkative.url}{path}", headers=headers, timeout=60)
            assert found(answer.content, canaries | {"key": key}) <= {"metadata"}, path


SEARCH = """
import glob, os
for disk in glob.glob("/dev/vd?"):
    with open(disk, "rb", buffering=0) as f:
        end = b""
        while data := f.read(1 << 20):
            if b"canary-" in end + data:
                print(disk)
                break
            end = data[-10:]
"""


def test_the_next_sandbox_finds_nothing_and_of_the_last_only_its_record_is_left(
    talkative: Server, used: Sandbox, canaries: dict[str, str]
) -> None:
    def disks_with_one(sandbox: Sandbox) -> list[str]:
        return sandbox.run(["python3", "-c", SEARCH], user="root", timeout=280, check=True).stdout.split()

    used.run("sync", user="root")
    assert len(disks_with_one(used)) == 1
    used.kill()
    with Sandbox.create(memory_mb=256, disk_mb=2048, **talkative.client) as following:
        assert disks_with_one(following) == []
    assert files(talkative, canaries) == {"metadata": {"skerry.db"}}
