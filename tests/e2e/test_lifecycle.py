"""Creating, listing, ending; what is refused and how; what is left. Cases BUG-30, BUG-38 to BUG-40, BUG-47."""

import concurrent.futures
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from skerry import NotFound, Sandbox, SkerryError
from support.machine import Leftovers
from support.server import Server
from support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def short_lived(client: dict[str, str]) -> Sandbox:
    """One whose minute passes while the other tests run."""
    return Sandbox.create(memory_mb=256, timeout=60, idle_timeout=None, **client)


def test_a_sandbox_has_the_shape_that_was_asked_for(client: dict[str, str]) -> None:
    with Sandbox.create(cpu=2, memory_mb=1024, disk_mb=12_288, metadata={"job": "7"}, **client) as sandbox:
        assert sandbox.run("nproc").stdout == "2\n"
        kilobytes = int(sandbox.run("grep MemTotal /proc/meminfo").stdout.split()[1])
        assert 900_000 < kilobytes <= 1024 * 1024
        blocks = int(sandbox.run("df --output=size -k / | tail -1").stdout)
        assert 11_000_000 < blocks <= 12_288 * 1024
        info = sandbox.info()
        assert (info.cpu, info.memory_mb, info.disk_mb, info.metadata) == (2, 1024, 12_288, {"job": "7"})
        metrics = sandbox.metrics()
        assert metrics.cpu_count == 2
        assert metrics.memory_total_bytes == kilobytes * 1024


def test_the_kernel_is_its_own(sandbox: Sandbox) -> None:
    with open("/proc/version") as version:
        assert sandbox.run("cat /proc/version").stdout != version.read()


def test_nothing_leads_out(sandbox: Sandbox) -> None:
    script = """
import socket
for to in [("1.1.1.1", 443), ("169.254.169.254", 80), ("169.254.0.1", 22), ("127.0.0.1", 7070),
           ("2606:4700:4700::1111", 443)]:
    s = socket.socket(socket.AF_INET6 if ":" in to[0] else socket.AF_INET); s.settimeout(2)
    try: s.connect(to); print("connected", to)
    except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
for to in [("169.254.0.1", 123), ("8.8.8.8", 443)]:
    try: s.sendto(b"x" * 30, to); print("answered", s.recv(10))
    except OSError: pass
try: print("resolved", socket.gethostbyname("secret123.example"))
except OSError as error: assert error.errno == socket.EAI_NONAME, error
"""
    for user in ("user", "root"):
        assert sandbox.run(["python3", "-c", script], user=user, timeout=50).stdout == ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cpu": 0}, "cpu"), ({"cpu": 9}, "cpu"), ({"memory_mb": 100}, "memory_mb"),
        ({"memory_mb": 10_000}, "memory_mb"), ({"disk_mb": 1}, "disk_mb"), ({"timeout": 59}, "timeout_ms"),
        ({"timeout": 14_401}, "timeout_ms"),
        ({"timeout": 0}, "timeout_ms"), ({"metadata": {"": "x"}}, "metadata."),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_with_what_is_allowed(
    client: dict[str, str], options: dict, field: str
) -> None:
    with pytest.raises(SkerryError) as refused:
        Sandbox.create(**options, **client)
    assert refused.value.status == 400
    problem = refused.value.problems[0]
    assert problem.field == field
    assert problem.allowed


def test_an_unknown_template_is_named_with_those_that_are(client: dict[str, str]) -> None:
    with pytest.raises(NotFound) as refused:
        Sandbox.create("no-such-template", **client)
    assert refused.value.code == "template_not_found"
    assert "base" in str(refused.value)


def test_a_key_once_is_a_sandbox_once(server: Server, client: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {client['api_key']}", "Idempotency-Key": uuid.uuid4().hex}

    def create(memory_mb: int = 256) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/sandboxes", json={"memory_mb": memory_mb}, headers=headers, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = [f.result() for f in [pool.submit(create) for _ in range(5)]]
    assert {r.status_code for r in answers} == {201}
    assert len({r.json()["id"] for r in answers}) == 1
    mismatch = create(512)
    assert (mismatch.status_code, mismatch.json()["code"]) == (409, "idempotency_mismatch")
    Sandbox.connect(answers[0].json()["id"], **client).kill()


def test_a_list_is_filtered_and_paged(client: dict[str, str]) -> None:
    mark = uuid.uuid4().hex
    sandboxes = [Sandbox.create(memory_mb=256, metadata={"mark": mark, "n": str(n)}, **client) for n in range(3)]
    try:
        listed = list(Sandbox.list(metadata={"mark": mark}, page_size=2, **client))
        assert [s.id for s in listed] == [s.id for s in reversed(sandboxes)]
        assert [s.id for s in Sandbox.list(metadata={"mark": mark, "n": "1"}, **client)] == [sandboxes[1].id]
    finally:
        for sandbox in sandboxes:
            sandbox.kill()
    assert list(Sandbox.list(metadata={"mark": mark}, state=["running"], **client)) == []
    assert {s.state for s in Sandbox.list(metadata={"mark": mark}, **client)} == {"killed"}


def test_kill_is_final_and_can_be_said_twice(client: dict[str, str]) -> None:
    sandbox = Sandbox.create(memory_mb=256, **client)
    sandbox.kill()
    sandbox.kill()
    info = sandbox.info()
    assert (info.state, info.end_reason) == ("killed", "killed")


def test_extending_never_shortens(sandbox: Sandbox) -> None:
    before = sandbox.info().expires_at
    sandbox.extend_timeout(60)
    assert sandbox.info().expires_at == before
    for bad in (0, -1, 1e9):
        with pytest.raises(SkerryError) as refused:
            sandbox.set_timeout(bad)
        assert refused.value.status == 400


def test_another_tenants_sandbox_is_as_if_it_were_not_there(client: dict[str, str], sandbox: Sandbox) -> None:
    headers = {"Authorization": f"Bearer {client['api_key']}"}
    unknown = "sb" + "0" * 20
    answers = [
        httpx.get(f"{client['url']}/v1/sandboxes/{name}", headers=headers)
        for name in (unknown, "SB-not-an-id", "..%2f")
    ]
    assert {a.status_code for a in answers} == {404}


def test_keys_are_told_apart(client: dict[str, str]) -> None:
    url = f"{client['url']}/v1/sandboxes"
    assert httpx.get(url).json()["code"] == "key_missing"
    assert httpx.get(url, headers={"X-API-Key": "nonsense"}).json()["code"] == "key_unknown"
    headers = {"Authorization": f"Bearer {client['api_key']}"}
    made = httpx.post(
        f"{client['url']}/v1/keys", json={"name": "t", "scopes": ["sandboxes:read"]}, headers=headers
    ).json()
    mine = {"X-API-Key": made["secret"]}
    assert httpx.get(url, headers=mine).status_code == 200
    refused = httpx.post(url, json={}, headers=mine)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    httpx.delete(f"{client['url']}/v1/keys/{made['id']}", headers=headers)
    assert httpx.get(url, headers=mine).json()["code"] == "key_revoked"


@pytest.fixture(scope="module")
def alone(new_server: Callable[..., Server]) -> Server:
    """A server without warm clones, so that all that is there belongs to a sandbox."""
    return new_server(SKERRY_POOL_FLOOR="0", SKERRY_POOL_CEILING="0")


def test_a_create_that_is_given_up_leaves_nothing(alone: Server) -> None:
    before = left(alone)
    client = alone.client
    mark = uuid.uuid4().hex
    given_up = 0
    for wait in (0.005, 0.02, 0.05, 0.1, 0.2, 0.3):
        try:
            made = httpx.post(
                f"{alone.url}/v1/sandboxes",
                json={"memory_mb": 256, "metadata": {"mark": mark}},
                headers={"Authorization": f"Bearer {alone.api_key}"},
                timeout=httpx.Timeout(30, read=wait),
            )
        except httpx.ReadTimeout:
            given_up += 1
        else:
            Sandbox.connect(made.json()["id"], **client).kill()
    assert given_up >= 3
    wait_until(lambda: not list(Sandbox.list(metadata={"mark": mark}, state=["creating", "running"], **client)), 90)
    wait_until(lambda: left(alone) - before == Leftovers(), 90)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_cycles_leave_nothing(alone: Server) -> None:
    before = left(alone)
    assert alone.process
    descriptors = open_files(alone.process.pid)

    def cycle(n: int) -> str:
        with Sandbox.create(memory_mb=256, **alone.client) as sandbox:
            return sandbox.run(f"echo {n}").stdout

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(cycle, range(50))) == [f"{n}\n" for n in range(50)]
    assert left(alone) - before == Leftovers()
    assert open_files(alone.process.pid) <= descriptors + 12


def test_the_end_that_is_shown_is_the_one_that_comes(short_lived: Sandbox) -> None:
    shown = short_lived.info().expires_at
    wait_until(lambda: short_lived.info().state != "running", 120)
    info = short_lived.info()
    assert (info.state, info.end_reason) == ("killed", "expired")
    assert info.ended_at is not None
    assert shown <= info.ended_at < shown + timedelta(seconds=30)
    with pytest.raises(SkerryError) as over:
        short_lived.run("true")
    assert over.value.code == "sandbox_expired"


def left(server: Server) -> Leftovers:
    """What sandboxes hold now. Network slots that stand ready for the next ones come and go, and are not theirs."""
    found = Leftovers.of(server.data_dir)
    return Leftovers(found.processes, cgroups=found.cgroups, files=found.files)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
