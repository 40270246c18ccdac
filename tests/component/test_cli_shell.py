"""`skerry shell` on a real terminal (a pty of this machine) against a server that speaks the terminal's protocol."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Request, Response, ServerConnection, serve

from support.scripted_server import SANDBOX, STARTED, exited

SKERRY = str(Path(sys.executable).parent / "skerry")
BOX = SANDBOX["id"]
Handler = Callable[[ServerConnection], None]


@contextlib.contextmanager
def terminal_server(handler: Handler, requests: list[str]) -> Iterator[dict[str, str]]:
    """A server whose terminals are `handler`; anything else is answered as a sandbox. The client's environment."""

    def plain(connection: ServerConnection, request: Request) -> Response | None:
        requests.append(request.path)
        if "/pty" in request.path:
            return None
        response = connection.respond(HTTPStatus.OK, json.dumps(SANDBOX))
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    with serve(handler, "127.0.0.1", 0, process_request=plain) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.socket.getsockname()[1]
            yield {"SKERRY_API_URL": f"http://127.0.0.1:{port}", "SKERRY_API_KEY": "skerrytest"}
        finally:
            server.shutdown()
            thread.join(10)


class Terminal:
    """A terminal of this machine with `skerry shell` in it."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(100, 30)
        self.before = termios.tcgetattr(self.slave)
        own = {k: v for k, v in os.environ.items() if not k.startswith("SKERRY_") and k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [SKERRY, "shell", *arguments],
            env={**own, **environment},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def read_until(self, text: bytes) -> bytes:
        seen = b""
        while text not in seen:
            assert select.select([self.master], [], [], 30)[0], seen
            seen += os.read(self.master, 65536)
        return seen

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def end(self) -> int:
        code = self.process.wait(30)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is restored"
        return code

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def begin(connection: ServerConnection) -> None:
    connection.send(json.dumps(STARTED))


def finish(connection: ServerConnection, **ended: Any) -> None:
    connection.send(json.dumps({**exited(0), **ended}))
    connection.close(1000)


def test_keys_and_bytes_go_through_raw_and_the_exit_code_too() -> None:
    typed: list[bytes] = []
    requests: list[str] = []

    def handler(connection: ServerConnection) -> None:
        begin(connection)
        connection.send(b"prompt> ")
        while not typed or not typed[-1].endswith(b"q"):
            message = connection.recv(30)
            assert isinstance(message, bytes)
            typed.append(message)
            connection.send(b"\x1b[1m" + message + b"\xff\r\n")
        finish(connection, exit_code=5)

    with terminal_server(handler, requests) as environment, Terminal(environment, BOX) as terminal:
        terminal.read_until(b"prompt> ")
        terminal.type(b"\x03\x04\x1a\xc3\xa9")  # Ctrl-C, Ctrl-D, Ctrl-Z are the guest's
        assert b"\x1b[1m\x03" in terminal.read_until(b"\xff")
        terminal.type(b"q")
        assert terminal.end() == 5
    assert b"".join(typed) == b"\x03\x04\x1a\xc3\xa9q"
    [opened] = [path for path in requests if "/pty" in path]
    assert "cols=100&rows=30" in opened


def test_a_new_size_is_passed_on() -> None:
    sizes: list[dict[str, Any]] = []

    def handler(connection: ServerConnection) -> None:
        begin(connection)
        connection.send(b"ready")
        sizes.append(json.loads(connection.recv(30)))
        finish(connection)

    with terminal_server(handler, []) as environment, Terminal(environment, BOX) as terminal:
        terminal.read_until(b"ready")
        terminal.resize(132, 50)
        terminal.process.send_signal(signal.SIGWINCH)
        assert terminal.end() == 0
    assert sizes == [{"type": "resize", "cols": 132, "rows": 50}]


def test_a_line_that_breaks_restores_the_terminal_and_is_an_unknown_outcome() -> None:
    def handler(connection: ServerConnection) -> None:
        begin(connection)
        connection.send(b"ready")
        connection.socket.shutdown(2)

    with terminal_server(handler, []) as environment, Terminal(environment, BOX) as terminal:
        assert b"line broke" in terminal.read_until(b"exit")
        assert terminal.end() == 122


def test_an_error_of_the_server_is_told() -> None:
    error = {"status": 410, "code": "sandbox_expired", "detail": "it reached its timeout", "retry": "never"}

    def handler(connection: ServerConnection) -> None:
        begin(connection)
        connection.send(json.dumps({"type": "error", "error": error}))
        connection.close(4010)

    with terminal_server(handler, []) as environment, Terminal(environment, BOX) as terminal:
        terminal.read_until(b"it reached its timeout")
        assert terminal.end() == 125


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_restores_the_terminal_and_kills_the_shell(number: signal.Signals, code: int) -> None:
    requests: list[str] = []

    def handler(connection: ServerConnection) -> None:
        begin(connection)
        connection.send(b"ready")
        with contextlib.suppress(ConnectionClosed):
            connection.recv(30)

    with terminal_server(handler, requests) as environment, Terminal(environment, BOX) as terminal:
        terminal.read_until(b"ready")
        terminal.process.send_signal(number)
        assert terminal.end() == code


def test_a_terminal_that_is_refused() -> None:
    def handler(connection: ServerConnection) -> None:
        raise AssertionError

    with terminal_server(handler, []) as environment, Terminal(environment, BOX, "--keep") as terminal:
        terminal.read_until(b"are for a new sandbox")
        assert terminal.end() == 125
