"""The operations on processes: start, attach, list, signal, kill, stdin, resize."""

import os
import select
import signal
import time
from typing import Any

from skerry.guest import args, plumbing, protocol, spawn, tree
from skerry.guest.conn import Conn, HostGone, ItemSender
from skerry.guest.errors import GuestError, from_os, show
from skerry.guest.identity import Context
from skerry.guest.plumbing import Plumbing
from skerry.guest.process import Process, Reader, exited, shown_argv, shown_env
from skerry.guest.protocol import ProtocolError
from skerry.guest.pump import Drain, Pump
from skerry.guest.secret_files import SecretFiles
from skerry.guest.table import Table

_HOLD_MS = 10
"""For so long the answer to a start waits for the end: short commands are told in one piece."""
_END_WAIT_MS = 250
SEND_BUFFER = 256 * 1024
"""Bounds what is under way to a reader, so that what a broken line loses is still in the ring."""


class Commands:
    def __init__(self, context: Context, table: Table, cgroups: tree.Cgroups, secret_files: SecretFiles) -> None:
        self._context = context
        self._table = table
        self._cgroups = cgroups
        self._secret_files = secret_files
        self._drain = Drain()

    # -------------------------------------------------------------------------------------------------------- start

    def start(self, conn: Conn, request: dict[str, Any]) -> bool:
        """False where the host left before it had heard of the end."""
        process, pipes, deadline, cgroup, born = self._spawn(request, conn.sock.fileno())
        try:
            conn.bound(SEND_BUFFER)
            reader = Reader(process, conn.sock, {}, None)
            reader.attach()
            reader.queue(protocol.frame(protocol.OK, protocol.dump({"process": process.describe()})))
            Pump(self._table, process, pipes, reader, deadline, self._drain, born.pidfd).run()
        finally:
            if process.exit is None:
                self._give_up(process, pipes)
            self._cgroups.put_back(cgroup)
            self._table.expect_orphans()
            self._cgroups.refill()  # the host has its answer: this is on nobody's time
        return reader.done

    def _give_up(self, process: Process, pipes: Plumbing) -> None:
        """Looking after it failed (the guest has no memory left, say). It must not go on unseen."""
        process.kill_tree()
        if process.wait_status is None:
            process.reap(0)
        process.finish()
        self._table.ended(process)
        pipes.close()

    def _spawn(
        self, request: dict[str, Any], reader: int
    ) -> tuple[Process, Plumbing, float | None, tree.Cgroup | None, spawn.Born]:
        process_id = args.text(request, "process_id")
        if not 0 < len(process_id) <= 64 or not process_id.isascii():
            raise GuestError("InvalidRequest", "invalid_request", "process_id must be 1 to 64 ASCII characters")
        shell, background = args.opt_text(request, "shell"), args.flag(request, "background")
        if (shell is None) == (request.get("argv") is None):
            raise GuestError("InvalidRequest", "invalid_request", "exactly one of argv and shell must be given")
        if shell is not None and "\0" in shell:
            raise GuestError("InvalidRequest", "invalid_request", "shell holds a NUL character", field="shell")
        argv = spawn.shell_argv(shell) if shell is not None else args.texts(request, "argv")
        if not argv or not argv[0]:
            raise GuestError("InvalidRequest", "invalid_request", "argv must name a program", field="argv")
        timeout_ms = args.opt_integer(request, "timeout_ms", 1)
        size = _size(request)
        account = self._context.account(args.opt_text(request, "user"))
        cwd = self._context.cwd(account, args.opt_text(request, "cwd"))
        own_env = args.table(request, "env")
        env = self._context.environment(account, own_env, terminal=size is not None)
        wants_stdin = args.flag(request, "stdin")
        info = {
            "process_id": process_id,
            "argv": shown_argv(argv),
            "cwd": cwd,
            "user": account.name,
            "tag": args.opt_text(request, "tag"),
            "pty": size is not None,
            "stdin": wants_stdin or size is not None,
            "background": background,
            "started_at_ms": int(time.time() * 1000),
        }
        streams = ("pty",) if size is not None else ("stdout", "stderr")
        process = Process(process_id, info, streams, background=background)
        process.env = shown_env(own_env)
        secret_env = args.table(request, "secret_env")
        if secret_env:  # the request lives as long as the process does: the values need not
            request["secret_env"] = {}
            env.update(secret_env)
        pipes = Plumbing(stdin=wants_stdin, pty=size)
        self._table.reserve(process)
        cgroup = self._cgroups.take()
        hold_ms = 0 if background or size is not None else min(_HOLD_MS, timeout_ms or _HOLD_MS)
        try:
            if request.get("secret_files"):
                env.update(self._secret_files.write(process_id, account, request))
                process.on_end = lambda: self._secret_files.remove(process_id)
            fd = None if cgroup is None else cgroup.fd
            born = spawn.spawn(account, argv, env, cwd, pipes, fd, hold_ms=hold_ms, reader=reader)
        except BaseException:
            if process.on_end is not None:
                process.on_end()
            self._table.unreserve(process)
            self._cgroups.put_back(cgroup)
            raise
        info["pid"] = process.pid = born.pid
        process.wait_status = born.status
        process.tree = tree.Tree(born.pid, None if cgroup is None else cgroup.path)
        for name, data in (("stdout", born.out), ("stderr", born.err)):
            if data:
                self._table.grew(process.append(name, data))
        pipes.started()
        process.stdin, pipes.stdin = pipes.stdin, None
        process.stdin_state = "open" if process.stdin is not None else "none"
        deadline = process.started + timeout_ms / 1000 if timeout_ms is not None else None
        return process, pipes, deadline, cgroup, born

    # ------------------------------------------------------------------------------------------------------- attach

    def attach(self, conn: Conn, request: dict[str, Any]) -> None:
        process = self._table.get(args.text(request, "process_id"))
        first = args.integer({"stdout_offset": 0, **request}, "stdout_offset")
        second = args.integer({"stderr_offset": 0, **request}, "stderr_offset")
        before = args.integer({"before": 0, **request}, "before")
        offsets = {name: second if name == "stderr" else first for name in process.rings}
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        reader = Reader(process, conn.sock, offsets, wake)
        try:
            conn.bound(SEND_BUFFER)
            begins = reader.attach(follow=args.flag({"follow": True, **request}, "follow"), before=before)
            try:
                answer = {"process": process.describe(), "begins": begins}
                reader.queue(protocol.frame(protocol.OK, protocol.dump(answer)))
                _read_on(reader, wake)
            finally:
                reader.detach()
        except OSError as e:
            raise HostGone(str(e)) from None
        finally:
            os.close(wake)

    # --------------------------------------------------------------------------------------------------- short ones

    def processes(self, conn: Conn, _request: dict[str, Any]) -> None:
        items = ItemSender(conn)
        for process in self._table.all():
            items.add({**process.describe(), "env": process.env})
        items.flush()
        conn.send_frame(protocol.END, b"{}")

    def signal(self, conn: Conn, request: dict[str, Any]) -> None:
        process = self._table.get(args.text(request, "process_id"))
        try:
            process.signal_group(parse_signal(args.text(request, "signal")))
        except OSError as e:
            raise from_os(e, f"signal to {process.id}") from None
        conn.ok()

    def kill_process(self, conn: Conn, request: dict[str, Any]) -> None:
        conn.ok({"killed": self._table.get(args.text(request, "process_id")).kill_tree()})

    def resize_pty(self, conn: Conn, request: dict[str, Any]) -> None:
        process = self._table.get(args.text(request, "process_id"))
        size = _size(request)
        if size is None:
            raise GuestError("InvalidRequest", "invalid_request", "pty is missing", field="pty")
        if not process.info["pty"]:
            raise GuestError("Conflict", "not_a_pty", f"process {process.id} has no terminal", process_id=process.id)
        with process.lock:
            if process.stdin is None:
                raise exited(process.id)
            plumbing.resize(process.stdin, *size)
        conn.ok()

    # -------------------------------------------------------------------------------------------------------- stdin

    def close_stdin(self, conn: Conn, request: dict[str, Any]) -> None:
        process = self._table.get(args.text(request, "process_id"))
        with process.lock:
            fd = _open_stdin(process)
            if process.info["pty"]:
                # A terminal is not closed: its end-of-file character is what a person would type.
                import termios

                end = termios.tcgetattr(fd)[6][termios.VEOF]
                os.write(fd, end if isinstance(end, bytes) else bytes([end]))
            else:
                process.close_stdin()
        conn.ok()

    def write_stdin(self, conn: Conn, request: dict[str, Any]) -> None:
        process = self._table.get(args.text(request, "process_id"))
        with process.lock:
            fd = os.dup(_open_stdin(process))
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            conn.wait_without_limit()
            with process.lock:
                process.waiters.add(wake)
            try:
                written = _feed(conn, process, fd, wake)
            finally:
                with process.lock:
                    process.waiters.discard(wake)
        finally:
            os.close(wake)
            os.close(fd)
        conn.ok({"written": written})


def _feed(conn: Conn, process: Process, fd: int, wake: int) -> int:
    """DATA frames into the pipe until END. Ends early where the process does or its stdin is closed."""
    written = 0
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.register(conn.sock.fileno(), select.POLLIN | select.POLLRDHUP)
    while True:
        got = conn.try_recv()
        if got is None:
            ready = {fd for fd, _ in poller.poll()}
            if conn.sock.fileno() not in ready:
                # It is over. What ended it may be this very input, and the frame that makes it whole is under way.
                poller.unregister(wake)
                ready = {fd for fd, _ in poller.poll(_END_WAIT_MS)}
                poller.register(wake, select.POLLIN)
            if conn.sock.fileno() in ready:
                conn.fill()
            else:
                _check_stdin(process, written)
            continue
        kind, payload = got
        if kind == protocol.END:
            return written
        if kind != protocol.DATA:
            raise ProtocolError("stdin is DATA frames and END")
        written += _write_all(conn, process, fd, wake, payload, written)


def _write_all(conn: Conn, process: Process, fd: int, wake: int, payload: bytes, before: int) -> int:
    rest = memoryview(payload)
    while rest:
        _check_stdin(process, before + len(payload) - len(rest))
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            poller = select.poll()
            poller.register(wake, select.POLLIN)
            poller.register(fd, select.POLLOUT)
            # POLLHUP alone: the host may still have bytes under way to us, but must not have gone.
            poller.register(conn.sock.fileno(), select.POLLRDHUP)
            if any(f == conn.sock.fileno() for f, _ in poller.poll()):
                raise HostGone("while writing to stdin") from None
        except OSError:
            # EPIPE: nobody reads it any more, though the process may live; EIO: the terminal is gone. A process that
            # ends closes its input a moment before its end is seen.
            poller = select.poll()
            poller.register(wake, select.POLLIN)
            poller.poll(_END_WAIT_MS)
            with process.lock:
                over = process.wait_status is not None
            raise _stdin_error(process, "process_exited" if over else "stdin_closed", before) from None
    return len(payload)


def _check_stdin(process: Process, written: int) -> None:
    with process.lock:
        if process.exit is not None:
            raise _stdin_error(process, "process_exited", written)
        if process.stdin_state != "open":
            raise _stdin_error(process, "stdin_closed", written)


def _open_stdin(process: Process) -> int:
    """Call with the lock held."""
    if process.wait_status is not None:
        raise exited(process.id)
    if process.stdin_state == "none":
        raise _stdin_error(process, "stdin_not_open", 0)
    if process.stdin is None:
        raise _stdin_error(process, "stdin_closed", 0)
    return process.stdin


def _stdin_error(process: Process, code: str, written: int) -> GuestError:
    said = {
        "process_exited": "has exited",
        "stdin_closed": "has its standard input closed",
        "stdin_not_open": "was started without standard input",
    }[code]
    return GuestError("Conflict", code, f"process {process.id} {said}", process_id=process.id, written=written)


def _read_on(reader: Reader, wake: int) -> None:
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    while True:
        sent_all = reader.flush()
        if reader.done:
            return
        poller.register(reader.sock.fileno(), select.POLLIN | select.POLLRDHUP | (0 if sent_all else select.POLLOUT))
        for fd, event in poller.poll():
            if fd == wake:
                os.eventfd_read(wake)
            elif event & ~select.POLLOUT:
                raise HostGone("reader left")


def _size(request: dict[str, Any]) -> tuple[int, int] | None:
    value = request.get("pty")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise GuestError("InvalidRequest", "invalid_request", "pty must be an object with cols and rows", field="pty")
    return args.integer(value, "cols", 1, 65535), args.integer(value, "rows", 1, 65535)


def parse_signal(wanted: str) -> int:
    """ "SIGINT", "INT", "int" or "2"."""
    if wanted.isascii() and wanted.isdigit() and 0 < int(wanted[:4]) < signal.NSIG:
        return int(wanted)
    name = wanted.upper()
    found = signal.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
    if found is None:
        raise GuestError("InvalidRequest", "unknown_signal", f"{show(wanted, 40)!r} is no signal", field="signal")
    return int(found)
