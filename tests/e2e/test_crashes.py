"""The server is killed in the middle of an act: afterwards the sandbox is before it or after it, and whole."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from skerry import Client, Sandbox, SkerryError
from support.server import Server
from support.waiting import wait_until


@pytest.fixture(scope="module")
def own_server(new_server: Callable[..., Server]) -> Server:
    return new_server(SKERRY_POOL_CEILING="0", SKERRY_POOL_FLOOR="0")


def killed_during(server: Server, act: Callable[[], object], after_s: float) -> None:
    def body() -> None:
        with contextlib.suppress(SkerryError):  # what it was told does not matter, only what is true afterwards
            act()

    thread = threading.Thread(target=body)
    thread.start()
    time.sleep(after_s)
    server.kill()
    server.start()
    thread.join(120)
    assert not thread.is_alive()


def settled(sandbox: Sandbox) -> str:
    seen: list[str] = []

    def over() -> bool:
        seen.append(str(sandbox.info().state))
        assert seen[-1] in {"running", "paused", "pausing", "resuming"}
        return seen[-1] in {"running", "paused"}

    wait_until(over)
    return seen[-1]


@pytest.mark.parametrize("after_ms", [5, 80, 250])
@pytest.mark.parametrize("what", ["pause", "resume", "snapshot", "fork", "disk"])
def test_a_killed_server_leaves_before_or_after(own_server: Server, what: str, after_ms: int) -> None:
    client = own_server.client
    sandbox = Sandbox.create(memory_mb=256, timeout=3600, idle_timeout=None, **client)
    sandbox.files.write("/home/user/disk", "kept")
    if what != "disk":
        sandbox.files.write("/dev/shm/memory", "kept")
    if what == "resume":
        sandbox.pause()
    acts: dict[str, Callable[[], object]] = {
        "pause": sandbox.pause,
        "resume": sandbox.resume,
        "snapshot": lambda: sandbox.snapshot(f"cut{after_ms}"),
        "fork": lambda: sandbox.fork(2),
        "disk": lambda: sandbox.pause(memory=False),
    }
    killed_during(own_server, acts[what], after_ms / 1000)
    sandbox = Sandbox.connect(sandbox.id, **client)
    if settled(sandbox) == "paused":
        sandbox.resume()
    assert sandbox.files.read("/home/user/disk") == "kept"
    if what != "disk":
        assert sandbox.files.read("/dev/shm/memory") == "kept"
    sandbox.pause()
    sandbox.resume()
    assert sandbox.run("cat /home/user/disk").stdout == "kept"
    with Client(**client) as api:
        for snapshot in api.snapshots.list():
            assert snapshot.state in {"ready", "failed"}, snapshot
            if snapshot.state == "ready":
                with Sandbox.create(snapshot, **client) as copy:
                    assert copy.files.read("/dev/shm/memory") == "kept"
            api.snapshots.delete(snapshot)
    for other in Sandbox.list(state=["creating", "running", "pausing", "paused", "resuming"], **client):
        Sandbox.connect(other.id, **client).kill()
