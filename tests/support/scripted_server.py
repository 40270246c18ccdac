"""A server on 127.0.0.1 that answers each request as the test says, byte for byte: also wrongly, slowly, not at all."""

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

Answer = Callable[["Exchange"], None]


@dataclass
class Exchange:
    """One request, and the connection to answer it on."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: socket.socket
    after: bool = field(default=True)
    """Whether the connection may serve another request."""

    def json(self) -> Any:
        return json.loads(self.body)

    def raw(self, data: bytes) -> None:
        self.connection.sendall(data)

    def reply(self, status: int, body: Any = None, **headers: str) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", "Content-Type: application/json"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.raw("\r\n".join(head).encode() + b"\r\n\r\n" + data)

    def stream(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, **event: Any) -> None:
        self.chunk(json.dumps(event).encode() + b"\n")

    def end(self) -> None:
        self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        """RST: as if the machine between had lost the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.after = False
        self.connection.close()


class ScriptedServer:
    """Answers the n-th request by the n-th answer of its script, whichever connection it comes on."""

    def __init__(self, *script: Answer) -> None:
        self.requests: list[Exchange] = []
        self.failures: list[BaseException] = []
        self._script: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        for answer in script:
            self._script.put(answer)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._connections: list[socket.socket] = []

    def then(self, *answers: Answer) -> None:
        for answer in answers:
            self._script.put(answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return {"SKERRY_API_URL": self.url, "SKERRY_API_KEY": "skerrytest"}

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for connection in self._connections:
            connection.close()
        assert not self.failures, self.failures

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as reader:
                while (exchange := _read(reader, connection)) is not None:
                    self.requests.append(exchange)
                    self._script.get_nowait()(exchange)
                    if not exchange.after:
                        return
        except (OSError, ValueError):
            return  # the client hung up, as it may
        except queue.Empty:
            self.failures.append(AssertionError(f"nobody expected {self.requests[-1].target}"))
            connection.close()
        except BaseException as error:
            self.failures.append(error)
            connection.close()


def _read(reader: Any, connection: socket.socket) -> Exchange | None:
    first = reader.readline()
    if not first:
        return None
    method, target, _ = first.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(reader.readline(), 16):
            body += reader.read(size)
            reader.readline()
        reader.readline()
    elif "content-length" in headers:
        body = reader.read(int(headers["content-length"]))
    return Exchange(method, target, headers, body, connection)


SANDBOX: dict[str, Any] = {
    "id": "sb00000000000000000001",
    "template": "base",
    "state": "running",
    "cpu": 1,
    "memory_mb": 512,
    "disk_mb": 8192,
    "metadata": {},
    "created_at": "2026-01-01T00:00:00.000000Z",
    "started_at": "2026-01-01T00:00:00.500000Z",
    "expires_at": "2026-01-01T00:05:00.000000Z",
    "ended_at": None,
    "end_reason": None,
    "error": None,
    "timeout_ms": 300000,
    "idle_timeout_ms": 300000,
    "start_kind": "boot",
    "node_id": "nd00000000000000000001",
}
PROCESS: dict[str, Any] = {
    "process_id": "pr00000000000000000001",
    "pid": 412,
    "argv": ["x"],
    "cwd": "/home/user",
    "user": "user",
    "tag": None,
    "pty": False,
    "stdin": False,
    "background": True,
    "state": "running",
    "started_at_ms": 0,
    "exit": None,
}
STARTED: dict[str, Any] = {
    "type": "started",
    "process_id": PROCESS["process_id"],
    "pid": 412,
    "argv": ["x"],
    "cwd": "/home/user",
    "user": "user",
    "started_at_ms": 0,
}


def exited(code: int | None = 0, *, reason: str = "exit", signal: str | None = None) -> dict[str, Any]:
    return {"type": "exit", "reason": reason, "exit_code": code, "signal": signal, "duration_ms": 12}


def created(exchange: Exchange) -> None:
    exchange.reply(201, SANDBOX)


def found(exchange: Exchange) -> None:
    exchange.reply(200, SANDBOX)


def killed(exchange: Exchange) -> None:
    assert exchange.method == "DELETE", exchange.target
    exchange.reply(200, {**SANDBOX, "state": "killed", "end_reason": "killed"})


def problem(status: int, code: str, *, retry: str = "never", **more: Any) -> Answer:
    body = {"type": f"/errors#{code}", "title": code, "status": status, "code": code, "detail": "no", "retry": retry}

    def answer(exchange: Exchange) -> None:
        exchange.reply(status, {**body, **more})

    return answer


def streaming(*events: dict[str, Any]) -> Answer:
    """A whole stream of these events."""

    def answer(exchange: Exchange) -> None:
        exchange.stream()
        for event in events:
            exchange.event(**event)
        exchange.end()

    return answer
