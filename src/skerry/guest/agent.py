"""The guest agent: listens, checks who speaks, hands each connection to the operation it asks for.

As PID 1 without `--listen` it makes the machine ready first. As an ordinary process it needs
`--listen ADDRESS:PORT --allow ADDRESS` and takes `--cgroup DIRECTORY` (for the commands' cgroups),
`--effects hostname,files,…` (what `identify` may do to the machine; default nothing), `--secrets DIRECTORY` (for files
that hold secrets; default none) and `--birth FILE` (the compiled half of starting a program, where it does not stand
beside the sources); it prints the port it listens on.
"""

import _socket
import _thread
import gc
import os
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from skerry.guest import birth, init, linux, protocol
from skerry.guest.commands import Commands
from skerry.guest.conn import Conn, HostGone
from skerry.guest.errors import GuestError, from_os
from skerry.guest.files import Files
from skerry.guest.identity import EFFECTS, Context, power_off
from skerry.guest.metrics import Metrics
from skerry.guest.ports import connect_port
from skerry.guest.protocol import ProtocolError
from skerry.guest.secret_files import SecretFiles
from skerry.guest.table import Table
from skerry.guest.transfer import Transfer
from skerry.guest.tree import Cgroups
from skerry.guest.watches import Watches

CONNECTIONS_MAX = 1024
IDLE_MIN, IDLE_MAX = 2, 8
HANDSHAKE_S = 10
STACK_BYTES = 256 * 1024
_LINGER_BYTES = 64 * 1024 * 1024

Operation = Callable[[Conn, dict[str, Any]], object]
"""Serves one request. Returns False where nothing can follow it on its connection."""


class Agent:
    """Worker threads accept for themselves, so that a connection is served by the thread that is woken for it."""

    def __init__(
        self, listener: _socket.socket, allow: str, effects: frozenset[str], cgroup: str | None, secrets: str | None
    ) -> None:
        self._listener = listener
        self._allow = allow
        self._context = Context(effects)
        self._table = Table()
        self._cgroups = Cgroups(cgroup)
        self._watches = Watches(self._context)
        commands = Commands(self._context, self._table, self._cgroups, SecretFiles(secrets))
        files = Files(self._context)
        transfer = Transfer(self._context)
        self._lock = _thread.allocate_lock()
        self._idle = 0
        self._open: set[Conn] = set()
        self._operations: dict[str, Operation] = {
            "start": commands.start,
            "attach": commands.attach,
            "processes": commands.processes,
            "signal": commands.signal,
            "kill_process": commands.kill_process,
            "write_stdin": commands.write_stdin,
            "close_stdin": commands.close_stdin,
            "resize_pty": commands.resize_pty,
            "stat": files.stat,
            "list_dir": files.list_dir,
            "make_dir": files.make_dir,
            "move": files.move,
            "remove": files.remove,
            "symlink": files.symlink,
            "chmod": files.chmod,
            "read_file": transfer.read_file,
            "write_file": transfer.write_file,
            "watch": self._watches.watch,
            "attach_watch": self._watches.attach,
            "end_watch": self._watches.end,
            "settle_watch": self._watches.settle,
            "metrics": Metrics().answer,
            "connect": connect_port,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "poweroff": self._poweroff,
        }

    def run(self) -> None:
        """Serve for ever; this thread takes care of orphans."""
        for _ in range(IDLE_MIN):
            self._start_worker()
        self._table.reap_orphans()

    def _start_worker(self) -> None:
        with self._lock:
            self._idle += 1
        try:
            _thread.start_new_thread(self._work, ())
        except RuntimeError:  # no more threads now; a worker that gets free accepts again
            with self._lock:
                self._idle -= 1

    def _work(self) -> None:
        linux.own_directory_and_umask()
        os.umask(0o022)
        while True:
            try:
                fd, address = self._listener._accept()  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
            except OSError:
                continue
            # Not `accept`: its object of many parts costs more than all that is asked of it here.
            sock = _socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
            with self._lock:
                self._idle -= 1
                short = self._idle < 1
            if short:
                self._start_worker()
            try:
                self._serve(sock, address)
            finally:
                sock.close()
            del sock
            with self._lock:
                if self._idle >= IDLE_MAX:
                    return
                self._idle += 1

    def _serve(self, sock: _socket.socket, address: Any) -> None:
        conn = Conn(sock)
        with self._lock:
            full = len(self._open) >= CONNECTIONS_MAX
            self._open.add(conn)
        try:
            if address[0] != self._allow:
                return
            if full:
                _refuse(conn, GuestError("Unavailable", "guest_busy", "too many connections", allowed=CONNECTIONS_MAX))
                return
            while self._dispatch(conn):
                conn.wait_without_limit()  # the host keeps it for its next request
        except HostGone:
            return
        except GuestError as e:
            _refuse(conn, e)
        except ProtocolError as e:
            _refuse(conn, GuestError("InvalidRequest", "protocol_error", str(e)))
        except UnicodeError:
            _refuse(conn, GuestError("InvalidRequest", "invalid_request", "a text that no system call can carry"))
        except OSError as e:
            _refuse(conn, from_os(e))
        except MemoryError:
            _refuse(conn, GuestError("Unavailable", "guest_busy", "the guest is out of memory"))
        except Exception as e:  # noqa: BLE001 - the last line: one broken operation must not take the machine along
            traceback.print_exc()
            _refuse(conn, GuestError("InternalError", "guest_error", f"the agent failed: {type(e).__name__}"))
        finally:
            with self._lock:
                self._open.discard(conn)

    def _dispatch(self, conn: Conn) -> bool:
        """Serve the next request. False where it was the connection's last, which it is unless the host says `keep`."""
        hello = conn.recv_hello()
        if hello.get("v") != protocol.VERSION:
            raise GuestError(
                "InternalError",
                "protocol_version",
                f"this agent speaks version {protocol.VERSION}",
                given=hello.get("v"),
            )
        request_op, keep = hello.get("op"), hello.get("keep") is True
        if request_op == "ping":
            conn.recv_request()
            conn.ok({"identified": self._context.identified, "v": protocol.VERSION})
            return keep
        if request_op == "identify":
            request = conn.recv_request()
            problems = self._context.identify(hello, request)
            if request.get("fresh") is True:
                self._table.forget_exited()
                self._watches.end_all()
            self._cgroups.freeze(on=False)  # not before the clock and the random pool are this machine's own
            self._close_others(conn)
            conn.ok({"problems": problems})
            return keep
        self._context.authorise(hello)
        operation = self._operations.get(request_op) if isinstance(request_op, str) else None
        if operation is None:
            raise GuestError("InvalidRequest", "unknown_operation", f"there is no operation {str(request_op)[:40]!r}")
        return operation(conn, conn.recv_request()) is not False and keep

    def _close_others(self, conn: Conn) -> None:
        """A new identity: whoever spoke with the old one is gone, or speaks to another copy of this machine."""
        with self._lock:
            others = [c for c in self._open if c is not conn]
        for other in others:
            try:
                other.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _freeze(self, conn: Conn, request: dict[str, Any]) -> None:
        """Let all commands stand still until `thaw` or the next identity, and write to the disk what is in memory."""
        frozen = self._cgroups.freeze(on=True)
        if request.get("sync") is True:
            os.sync()
        conn.ok({"frozen": frozen})

    def _thaw(self, conn: Conn, _request: dict[str, Any]) -> None:
        self._cgroups.freeze(on=False)
        conn.ok()

    @staticmethod
    def _poweroff(conn: Conn, _request: dict[str, Any]) -> None:
        if os.getpid() != 1:
            raise GuestError("Conflict", "not_a_machine", "this agent is not a machine's first process")
        conn.ok()
        power_off()


def _refuse(conn: Conn, error: GuestError) -> None:
    """Say why, and see that it arrives: closing a socket with bytes unread would reset it and lose the answer."""
    try:
        conn.error(error)
        conn.sock.shutdown(socket.SHUT_WR)
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
        left = _LINGER_BYTES
        while left > 0:
            got = len(conn.sock.recv(protocol.MAX_PAYLOAD))
            if got == 0:
                return
            left -= got
    except (HostGone, OSError):
        return


def listen(address: str, port: int) -> _socket.socket:
    """Accepted sockets inherit all of this: no system call per connection."""
    s = _socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_S, 0))
    s.bind((address, port))
    s.listen(512)
    return s


def _options(argv: list[str]) -> dict[str, str]:
    known = {"--listen", "--allow", "--cgroup", "--effects", "--birth", "--secrets"}
    given = set(argv[::2])
    machine = os.getpid() == 1 and given <= {"--birth"}
    if len(argv) % 2 or not (machine or {"--listen", "--allow"} <= given <= known):
        sys.exit(
            "usage: agent --listen ADDRESS:PORT --allow ADDRESS "
            "[--cgroup DIRECTORY] [--effects A,B,…] [--birth FILE] [--secrets DIRECTORY]"
        )
    return dict(zip(argv[::2], argv[1::2], strict=True))


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    threading.stack_size(STACK_BYTES)
    linux.hide_memory()
    options = _options(arguments)
    birth.load(options.get("--birth"))
    if "--listen" not in options:
        cgroup, secrets = init.prepare()
        listener = listen(protocol.GUEST_ADDRESS, protocol.PORT)
        agent = Agent(listener, protocol.HOST_ADDRESS, EFFECTS, cgroup, secrets)
    else:
        linux.adopt_orphans()
        address, _, port = options["--listen"].rpartition(":")
        listener = listen(address, int(port))
        effects = frozenset(filter(None, options.get("--effects", "").split(",")))
        allow, cgroup, secrets = options["--allow"], options.get("--cgroup"), options.get("--secrets")
        agent = Agent(listener, allow, effects & EFFECTS, cgroup, secrets)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
    gc.collect()
    gc.freeze()  # what is there now stays; no collection need look at it again
    agent.run()


if __name__ == "__main__":
    main()
