"""What may leave a sandbox, set through the API, in real sandboxes: it holds at once, and survives whatever they do."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import Client, InvalidRequest, Sandbox
from skerry.sdk import NetworkEvent
from support.server import Server
from support.waiting import wait_until


class Web(http.server.BaseHTTPRequestHandler):
    """Says hello; of /slow it says half, and the rest when the test is over."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"hel")
        if self.path == "/slow":
            self.wfile.flush()
            self.over.wait(120)
        with contextlib.suppress(OSError):  # it was cut
            self.wfile.write(b"lo\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        Web.over.set()
        server.shutdown()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, web: int) -> Iterator[Server]:
    """A server whose operator has opened one port of this machine to projects' tunnels."""
    folder = tmp_path_factory.mktemp("egress")
    opened = {"SKERRY_EGRESS_PRIVATE_ALLOW": f"127.0.0.1:{web}"}
    server = Server(folder / "data", **opened, SKERRY_POOL_CEILING="0").start()
    try:
        yield server
    finally:
        server.finish()


@pytest.fixture
def client(own: Server) -> Iterator[Client]:
    with Client(**own.client) as client:
        yield client


@pytest.fixture
def rules(client: Client, web: int) -> list[str]:
    rules = [f"a.test:80 -> 127.0.0.1:{web}", f"b.test:80 -> 127.0.0.1:{web}"]
    client.egress.set("allow", allow=rules)
    return rules


def fetch(sandbox: Sandbox, name: str) -> str:
    return sandbox.run(f"curl -sS -m 20 http://{name}/ 2>&1").stdout


REFUSED = "curl: (6) Could not resolve host: %s\n"


def test_it_holds_over_a_crash_a_rest_and_in_copies(own: Server, client: Client, rules: list[str]) -> None:
    with Sandbox.create(network={"allow": ["a.test"]}, client=client, memory_mb=256) as sandbox:

        def holds(box: Sandbox) -> None:
            assert fetch(box, "a.test") == "hello\n"
            assert fetch(box, "b.test") == REFUSED % "b.test"

        holds(sandbox)
        own.kill()
        own.start()
        holds(sandbox)
        sandbox.pause()
        sandbox.resume()
        holds(sandbox)
        (copy,) = sandbox.fork()
        with copy:
            holds(copy)
            copy.network.update(network=True)
            assert fetch(copy, "b.test") == "hello\n"
        holds(sandbox)
        sandbox.pause()
        sandbox.network.update({"allow": ["b.test"]})
        sandbox.resume()
        assert fetch(sandbox, "b.test") == "hello\n"
        assert fetch(sandbox, "a.test") == REFUSED % "a.test"


def test_connections_that_a_change_forbids_are_cut(client: Client, rules: list[str]) -> None:
    with Sandbox.create(client=client, memory_mb=256) as sandbox:
        for change in (
            lambda: sandbox.network.update({"allow": ["b.test"]}).connections_cut,
            lambda: client.egress.set("allow", allow=rules[1:]).connections_cut,
        ):
            sandbox.network.update(network=True)
            running = sandbox.commands.start("curl -sSN http://a.test/slow 2>&1")
            wait_until(lambda running=running: running.poll() is not None or "hel" in running.stdout, 60)
            assert change() == 1
            assert running.wait().exit_code != 0
            assert fetch(sandbox, "b.test") == "hello\n"


def test_nobody_within_can_change_it(client: Client, rules: list[str]) -> None:
    """Not root in the guest, and not a sandbox's own option beyond its project."""
    with pytest.raises(InvalidRequest) as refused:
        Sandbox.create(network={"allow": ["evil.test"]}, client=client)
    assert refused.value.code == "beyond_policy"
    with Sandbox.create(network=False, client=client, memory_mb=256) as sandbox:
        tricks = ("nft flush ruleset", "ip route add default via 169.254.0.1", "echo 198.18.1.0 a.test >> /etc/hosts")
        sandbox.run("; ".join(tricks), user="root")
        assert "hello" not in fetch(sandbox, "a.test")
        assert fetch(sandbox, "b.test") == REFUSED % "b.test"


def test_what_passed_and_what_did_not_is_in_the_record(client: Client, rules: list[str]) -> None:
    with Sandbox.create(client=client, memory_mb=256) as sandbox:

        def told(**what: object) -> NetworkEvent | None:
            found = [e for e in sandbox.network.events() if all(getattr(e, name) == v for name, v in what.items())]
            return found[0] if found else None

        assert fetch(sandbox, "a.test") == "hello\n"
        fetch(sandbox, "evil.test")
        assert sandbox.run("curl -sS -m 20 http://192.0.2.1/").exit_code == 7  # at once
        wait_until(lambda: told(kind="packet", address="192.0.2.1", port=80, allowed=False), 60)
        wait_until(lambda: told(kind="connection", name="a.test", port=80), 60)
    passed = told(kind="connection", name="a.test")  # of one that is over, too
    assert passed is not None
    assert (passed.allowed, passed.rule, passed.address) == (True, f"project: allow {rules[0]}", "127.0.0.1")
    assert passed.sent_bytes > 0
    assert passed.received_bytes > len("hello\n")
    assert passed.duration_ms > 0
    looked = told(kind="look_up", name="evil.test")
    assert looked is not None
    assert (looked.allowed, looked.rule) == (False, "project: no rule allows it")
    assert all(not event.allowed for event in sandbox.network.events(refused=True))
    assert not any(event["action"].startswith("network.") for event in sandbox.logs())


def test_a_tunnel_leads_only_where_the_operator_has_opened(own: Server, client: Client) -> None:
    client.egress.set("allow", allow=[f"api.test:80 -> 127.0.0.1:{own.port}"])
    with Sandbox.create(client=client, memory_mb=256) as sandbox:
        said = fetch(sandbox, "api.test")
        assert "127.0.0.1 is no public address" in said
        assert "egress_private_allow" in said


def test_the_curated_list_is_this_machines_own(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", SKERRY_EGRESS_DISCOVER="true", SKERRY_EGRESS_ALLOW="git.test:22").start()
    try:
        with Client(**server.client) as client:
            found = client.egress.get()
    finally:
        server.finish()
    assert (found.curated[0].rule, found.curated[0].tool) == ("git.test:22", "settings")
    assert {"pip", "apt"} <= {rule.tool for rule in found.curated}
