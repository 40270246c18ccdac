"""Real servers in a real VM, reached through the gateway: plain and under TLS, by name, by headers and by path."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from skerry import Conflict, PortAddress, Sandbox
from support.server import Server, free_port
from support.waiting import wait_until

SKERRY = str(Path(sys.executable).parent / "skerry")

WEBSOCKETS = """
import base64, hashlib, socketserver, struct

class One(socketserver.StreamRequestHandler):
    def handle(self):
        head = b""
        while not head.endswith(b"\\r\\n\\r\\n"):
            head += self.rfile.readline()
        key = [l.split(b": ")[1].strip() for l in head.splitlines() if l.lower().startswith(b"sec-websocket-key")][0]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                         b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", self.rfile.read(2 if size == 126 else 8))[0]
            mask = self.rfile.read(4)
            data = self.rfile.read(size)
            pad = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
            length = bytes([size]) if size < 126 else b"\\x7e" + struct.pack(">H", size) if size < 65536 \\
                else b"\\x7f" + struct.pack(">Q", size)
            self.wfile.write(bytes([first]) + length + data)
            if first & 15 == 8:
                return

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 5  # fewer than come at once

Server(("127.0.0.1", 8001), One).serve_forever()
"""

NODE = """
const http = require("http");
http.createServer((request, answer) => {
  if (request.url === "/events") {
    answer.writeHead(200, {"Content-Type": "text/event-stream"});
    let n = 0;
    const timer = setInterval(() => { answer.write(`data: ${n++}\\n\\n`); }, 200);
    request.on("close", () => { clearInterval(timer); require("fs").writeFileSync("/tmp/left", "yes"); });
  } else if (request.url === "/flood") {
    answer.writeHead(200, {"Content-Length": 104857600});
    const piece = Buffer.alloc(1048576, "0123456789abcdef");
    let n = 0;
    const more = () => { while (n < 100) { n++; if (!answer.write(piece)) { answer.once("drain", more); return; } }
                         answer.end(); };
    more();
  } else {
    const hash = require("crypto").createHash("sha256");
    let size = 0;
    request.on("data", (piece) => { hash.update(piece); size += piece.length; });
    request.on("end", () => answer.end(JSON.stringify({url: request.url, host: request.headers.host, size,
      sha256: hash.digest("hex"), chunked: request.headers["transfer-encoding"] || null})));
  }
}).listen(8002);
"""


@pytest.fixture(scope="module")
def box(client: dict[str, str]) -> Iterator[Sandbox]:
    """Three servers: Python's own over files (8000), WebSockets (8001), Node (8002)."""
    with Sandbox.create(timeout=3600, idle_timeout=None, memory_mb=1024, **client) as box:
        box.files.write("/srv-www/hello.txt", "hello from inside\n", user="root")
        box.files.write("/home/user/ws.py", WEBSOCKETS)
        box.files.write("/home/user/server.js", NODE)
        box.commands.start("python3 -m http.server 8000 --bind 127.0.0.1", cwd="/srv-www")
        box.commands.start("python3 ws.py")
        box.commands.start("node server.js")
        for port in (8000, 8001, 8002):
            up(box.port(port))
        yield box


def up(address: PortAddress) -> None:
    """Wait until something listens there."""
    deadline = time.monotonic() + 120
    while True:
        try:
            answer = httpx.get(address.path_url, headers=address.path_headers, timeout=30, trust_env=False)
            if not (answer.status_code == 409 and answer.json()["code"] == "port_not_open"):
                return
        except httpx.HTTPError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def by_name(server: Server, box: Sandbox, port: int) -> dict[str, str]:
    return {"Host": f"{port}-{box.id}.localhost:{server.port}"}


def test_pythons_server_by_name_headers_and_path(server: Server, box: Sandbox) -> None:
    address = box.port(8000)
    assert box.url(8000) == address.url == f"http://8000-{box.id}.localhost:{server.port}"
    assert address.headers == {}
    for url, headers in (
        (server.url, by_name(server, box, 8000)),
        (server.url, {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}),
        (address.path_url, address.path_headers),
    ):
        answer = httpx.get(f"{url.rstrip('/')}/hello.txt", headers=headers, trust_env=False)
        assert (answer.status_code, answer.text) == (200, "hello from inside\n")
    missing = httpx.get(f"{server.url}/no", headers=by_name(server, box, 8000), trust_env=False)
    assert missing.status_code == 404
    head = httpx.head(f"{server.url}/hello.txt", headers=by_name(server, box, 8000), trust_env=False)
    assert (head.headers["content-length"], head.content) == ("18", b"")


def test_curl_finds_the_name_by_itself(server: Server, box: Sandbox) -> None:
    """As browsers do: everything below localhost is this machine."""
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", f"{box.url(8000)}/hello.txt"], capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == (b"hello from inside\n", 0), done.stderr


def test_a_closed_port_and_a_sandbox_that_is_over(server: Server, box: Sandbox, client: dict[str, str]) -> None:
    answer = httpx.get(server.url, headers=by_name(server, box, 9999), trust_env=False)
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox is running but port is not open")
    with Sandbox.create(memory_mb=256, **client) as other:
        pass
    answer = httpx.get(server.url, headers=by_name(server, other, 80), trust_env=False)
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")


LISTENER = """
import socket, sys
family, address = sys.argv[1:]
s = socket.socket(socket.AF_INET6 if family == "6" else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if family == "6":
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
s.bind((address, 3000))
s.listen()
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n" % len(address)
              + address.encode())
    c.close()
"""


def test_listeners_come_and_go(server: Server, box: Sandbox) -> None:
    """No table of ports is kept that could be out of date: each request finds what listens now."""
    box.files.write("/home/user/listener.py", LISTENER)

    def ask() -> httpx.Response:
        return httpx.get(server.url, headers=by_name(server, box, 3000), timeout=60, trust_env=False)

    for family, address in [("4", "127.0.0.1"), ("4", "0.0.0.0"), ("6", "::1"), ("6", "::"), ("4", "169.254.0.2")] * 2:
        listener = box.commands.start(["python3", "listener.py", family, address])
        wait_until(lambda: ask().status_code == httpx.codes.OK)
        assert ask().text == address
        assert listener.kill()
        closed = ask()
        assert (closed.status_code, closed.json()["message"]) == (502, "The sandbox is running but port is not open")


def test_the_agent_and_its_routes_cannot_be_reached(server: Server, box: Sandbox) -> None:
    for port in (1024, 49983):
        for path in ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"):
            answer = httpx.post(f"{server.url}{path}", headers=by_name(server, box, port), trust_env=False)
            assert answer.status_code in {401, 403, 404, 405, 502}, (port, path, answer.text)


@pytest.mark.parametrize("chunked", [True, False])
def test_an_upload_of_a_hundred_megabytes(server: Server, box: Sandbox, chunked: bool) -> None:
    piece = os.urandom(1 << 20)
    digest = hashlib.sha256()
    for _ in range(100):
        digest.update(piece)
    headers = by_name(server, box, 8002) | ({} if chunked else {"Content-Length": str(100 << 20)})
    answer = httpx.post(
        f"{server.url}/up?x=%2F", headers=headers, content=(piece for _ in range(100)), timeout=280, trust_env=False
    )
    said = answer.json()
    assert (said["size"], said["sha256"]) == (100 << 20, digest.hexdigest())
    assert said["url"] == "/up?x=%2F"
    assert (said["chunked"] == "chunked") is chunked


def test_a_slow_client_gets_a_hundred_megabytes_and_the_server_stays_small(server: Server, box: Sandbox) -> None:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status")
    before = memory_kb(status)
    digest, size, most = hashlib.sha256(), 0, 0
    with httpx.stream(
        "GET", f"{server.url}/flood", headers=by_name(server, box, 8002), timeout=280, trust_env=False
    ) as answer:
        time.sleep(3)  # all that fits anywhere on the way is there by now
        most = memory_kb(status)
        for piece in answer.iter_raw():
            digest.update(piece)
            size += len(piece)
            most = max(most, memory_kb(status)) if size % 50 == 0 else most
    expected = hashlib.sha256()
    for _ in range(100):
        expected.update(b"0123456789abcdef" * 65536)
    assert (size, digest.hexdigest()) == (100 << 20, expected.hexdigest())
    assert most - before < 40_000


def memory_kb(status: Path) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))


def test_fifty_at_once(server: Server, box: Sandbox) -> None:
    with httpx.Client(base_url=server.url, timeout=280, trust_env=False) as http:

        def one(n: int) -> int:
            body = os.urandom(1000 + n)
            said = http.post(f"/{n}", headers=by_name(server, box, 8002), content=body).json()
            assert (said["url"], said["sha256"]) == (f"/{n}", hashlib.sha256(body).hexdigest())
            return n

        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(one, range(200))) == list(range(200))


def test_events_arrive_as_they_are_sent_and_leaving_is_noticed(server: Server, box: Sandbox) -> None:
    with httpx.stream(
        "GET", f"{server.url}/events", headers=by_name(server, box, 8002), timeout=120, trust_env=False
    ) as answer:
        seen = []
        for line in answer.iter_lines():
            if line:
                seen.append(line)
            if len(seen) == 5:  # the server never ends by itself: they did not wait for each other
                break
    assert seen == [f"data: {n}" for n in range(5)]
    deadline = time.monotonic() + 60
    while not box.files.exists("/tmp/left"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


async def test_fifty_websockets(server: Server, box: Sandbox) -> None:
    async def one(n: int) -> None:
        async with connect(
            f"ws://8001-{box.id}.localhost:{server.port}/", host="127.0.0.1", port=server.port, proxy=None,
            open_timeout=120, compression=None,
        ) as client:  # fmt: skip
            for message in (f"text {n}", os.urandom(100 + n), "x" * 200_000):
                await client.send(message)
                assert await client.recv() == message
            await client.close(4000 + n)
            assert client.close_code == 4000 + n

    async with asyncio.timeout(250):
        await asyncio.gather(*(one(n) for n in range(50)))


def test_private_ports_and_a_masked_host(server: Server, client: dict[str, str]) -> None:
    with Sandbox.create(public_ports=False, mask_request_host="localhost:${PORT}", **client) as box:
        box.files.write("/home/user/server.js", NODE)
        box.commands.start("node server.js")
        address = box.port(8002)
        up(address)
        assert not box.info().public_ports
        answer = httpx.get(f"{server.url}/a", headers=by_name(server, box, 8002), trust_env=False)
        assert answer.status_code == 403
        answer = httpx.get(
            f"{server.url}/a", headers={**by_name(server, box, 8002), **address.headers}, trust_env=False
        )
        assert answer.json()["host"] == "localhost:8002"


def test_a_request_wakes_a_sandbox_and_its_server_answers(server: Server, client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, auto_resume=True, auto_pause=True, **client) as box:
        box.files.write("/srv-www/hello.txt", "still here\n", user="root")
        box.commands.start("python3 -m http.server 8000", cwd="/srv-www")
        up(box.port(8000))
        box.pause()
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(
                    lambda _: httpx.get(
                        f"{server.url}/hello.txt", headers=by_name(server, box, 8000), timeout=250, trust_env=False
                    ),
                    range(8),
                )
            )
        assert [answer.text for answer in answers] == ["still here\n"] * 8
        resumed = [e for e in box.logs() if e["action"] == "sandbox.resumed"]
        assert [e["actor"] for e in resumed] == [f"visitor:{box.id}"]


def test_a_sandbox_that_is_killed_breaks_its_answer(server: Server, client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as box:
        box.files.write("/home/user/server.js", NODE)
        box.commands.start("node server.js")
        up(box.port(8002))
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream(
                "GET", f"{server.url}/flood", headers=by_name(server, box, 8002), timeout=250, trust_env=False
            ) as answer,
        ):
            for n, _ in enumerate(answer.iter_raw()):
                if n == 0:
                    box.kill()


def test_the_command_line_tells_the_address_and_forwards(server: Server, box: Sandbox) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SKERRY_")}
    environment = {**own, "SKERRY_CLIENT_FILE": str(server.client_file)}
    told = subprocess.run(
        [SKERRY, "port", box.id, "8000"], env=environment, capture_output=True, timeout=60, check=True
    )
    assert told.stdout.decode() == f"{box.url(8000)}\n"
    forwarding = subprocess.Popen(
        [SKERRY, "port", box.id, "8000", "--forward", "0", "--json"], env=environment, stdout=subprocess.PIPE
    )
    try:
        assert forwarding.stdout is not None
        local = json.loads(forwarding.stdout.readline())["port"]
        for _ in range(3):
            answer = httpx.get(f"http://127.0.0.1:{local}/hello.txt", timeout=60, trust_env=False)
            assert answer.text == "hello from inside\n"
        with socket.create_connection(("127.0.0.1", local)) as bare:
            bare.sendall(b"GET /hello.txt HTTP/1.0\r\n\r\n")
            bare.shutdown(socket.SHUT_WR)  # a side that ends alone
            got = b""
            while data := bare.recv(65536):
                got += data
        assert got.endswith(b"hello from inside\n")
    finally:
        forwarding.terminate()
        assert forwarding.wait(60) == 128 + signal.SIGTERM


def test_a_port_that_is_none_is_refused(box: Sandbox) -> None:
    for port in (0, 65536):
        with pytest.raises(Exception, match="port"):
            box.port(port)


# ----------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int, Path]]:
    """A server with a certificate that `skerry domain` has made; its port for TLS; the authority's certificate."""
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    made = subprocess.run(
        [SKERRY, "domain", "boxes.test", "--out", str(folder / "pem"), "--port", str(port), "--json"],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    said = json.loads(made.stdout)
    server = Server(
        folder / "data",
        SKERRY_DOMAIN=said["address"],
        SKERRY_TLS_CERT=said["cert"],
        SKERRY_TLS_KEY=said["key"],
        SKERRY_TLS_PORT=str(port),
        SKERRY_POOL_CEILING="0",
    ).start()
    try:
        yield server, port, Path(said["ca"])
        for sandbox in Sandbox.list(url=server.url, api_key=server.api_key, state=["creating", "running"]):
            Sandbox.connect(sandbox.id, url=server.url, api_key=server.api_key).kill()
        server.stop()
    finally:
        server.destroy()


@pytest.fixture(scope="module")
def secure_box(secure: tuple[Server, int, Path]) -> Iterator[Sandbox]:
    server, _, _ = secure
    with Sandbox.create(url=server.url, api_key=server.api_key, idle_timeout=None, timeout=3600) as box:
        box.files.write("/srv-www/hello.txt", "hello under TLS\n", user="root")
        box.files.write("/home/user/ws.py", WEBSOCKETS)
        box.commands.start("python3 -m http.server 8000", cwd="/srv-www")
        box.commands.start("python3 ws.py")
        for port in (8000, 8001):
            up(box.port(port))
        yield box


def test_tls_by_name_for_curl(secure: tuple[Server, int, Path], secure_box: Sandbox) -> None:
    _, port, ca = secure
    url = secure_box.url(8000)
    assert url == f"https://8000-{secure_box.id}.boxes.test:{port}"
    curl = ["curl", "-sS", "--noproxy", "*", "--cacert", str(ca), "--http2"]
    resolve = ["--resolve", f"8000-{secure_box.id}.boxes.test:{port}:127.0.0.1"]
    done = subprocess.run([*curl, *resolve, f"{url}/hello.txt"], capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == (b"hello under TLS\n", 0), done.stderr
    for name in ("boxes.test", "api.boxes.test", "sandbox.boxes.test"):
        resolve = ["--resolve", f"{name}:{port}:127.0.0.1"]
        done = subprocess.run(
            [*curl, *resolve, f"https://{name}:{port}/health"], capture_output=True, timeout=60, check=False
        )
        assert json.loads(done.stdout) == {"status": "ok"}


async def test_tls_for_websockets(secure: tuple[Server, int, Path], secure_box: Sandbox) -> None:
    _, port, ca = secure
    async with connect(
        f"wss://8001-{secure_box.id}.boxes.test:{port}/", host="127.0.0.1", port=port, proxy=None,
        ssl=ssl.create_default_context(cafile=str(ca)), compression=None,
    ) as client:  # fmt: skip
        for message in ("secret", "x" * 1_000_000):
            await client.send(message)
            assert await client.recv() == message


def test_who_does_not_know_the_authority_is_told(secure: tuple[Server, int, Path]) -> None:
    _, port, _ = secure
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
        ssl.create_default_context().wrap_socket(plain, server_hostname="boxes.test"),
    ):
        pass


NODE_CLIENT = """
const https = require("https");
const [name, port] = process.argv.slice(1);
https.get({host: "127.0.0.1", port, servername: name, path: "/hello.txt", headers: {Host: name}}, (answer) => {
  answer.setEncoding("utf8"); let text = ""; answer.on("data", (d) => text += d);
  answer.on("end", () => process.stdout.write(text));
}).on("error", (e) => { process.stderr.write(e.message); process.exit(1); });
"""


def test_node_trusts_what_it_is_told_to(secure: tuple[Server, int, Path], secure_box: Sandbox) -> None:
    _, port, ca = secure
    name = f"8000-{secure_box.id}.boxes.test"
    environment = {**os.environ, "NODE_EXTRA_CA_CERTS": str(ca)}
    done = subprocess.run(
        ["node", "-e", NODE_CLIENT, name, str(port)], env=environment, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == (b"hello under TLS\n", 0), done.stderr


def test_the_plain_port_is_still_there(secure: tuple[Server, int, Path], secure_box: Sandbox) -> None:
    server, _, _ = secure
    assert secure_box.run("echo hi").stdout == "hi\n"
    with pytest.raises(Conflict):
        Sandbox.resume(secure_box.id, memory=False, url=server.url, api_key=server.api_key)
