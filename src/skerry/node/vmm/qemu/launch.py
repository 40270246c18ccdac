"""Starts a QEMU that does not need the server: own session, no pipe to us, bounded in what it can write. Blocking."""

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images.model import Toolchain
from skerry.node.net import namespace
from skerry.node.process import ProcessId, identify
from skerry.node.vmm.driver import VmSpec
from skerry.node.vmm.qemu import argv
from skerry.node.vmm.qemu.jail import LIBRARIES, REPORT_FD, entered, jailed, let_read, read_only
from skerry.node.vmm.qemu.qmp import short_path

STDERR_BYTES: Final = 16_384
MONITOR_FD, TAP_FD = 3, 4


@dataclass(slots=True)
class Launched:
    process: ProcessId
    stderr: int
    """A memory file that QEMU writes to until it is full."""

    def said(self) -> str:
        """The last line QEMU wrote to its standard error."""
        return last_line(self.stderr)

    def close(self) -> None:
        os.close(self.stderr)


def last_line(stderr: int) -> str:
    text = os.pread(stderr, STDERR_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()
    return text.splitlines()[-1] if text else ""


def bounded_file(name: str, size: int) -> int:
    """A memory file of `size` bytes that cannot grow: a write beyond it fails, and who writes goes on."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as short:
        listener.bind(short)
    path.chmod(0o600)
    listener.listen(1)
    return listener


def _ram_file(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def launch(spec: VmSpec, toolchain: Toolchain, accelerator: argv.Accelerator, jail: Path, tsc_khz: int) -> Launched:
    """Start it. Raises InternalError (`step` vmm) with nothing running. The monitor's socket listens already."""
    command = argv.build(spec, toolchain, accelerator, argv.Inherited(MONITOR_FD, TAP_FD), tsc_khz=tsc_khz)
    command = jailed(spec, jail, toolchain, accelerator, command)
    with contextlib.ExitStack() as stack:
        try:
            let_read(read_only(spec))
            if spec.restore is None:
                _ram_file(spec.run_dir / argv.RAM, spec.memory_mb << 20)
            listener = stack.enter_context(_listen(spec.run_dir / argv.MONITOR))
            netns = namespace.open_namespace(spec.netns)
            stack.callback(os.close, netns)
            report, write_end = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, report)
            told = stack.enter_context(os.fdopen(write_end, "wb", buffering=0))
            stderr = bounded_file("qemu-stderr", STDERR_BYTES)
        except OSError as error:
            raise InternalError(f"QEMU could not be prepared: {error}", step="vmm") from error

        def start() -> int:
            tap = namespace.open_tap_here(spec.tap)
            try:
                descriptors = {2: stderr, MONITOR_FD: listener.fileno(), TAP_FD: tap, REPORT_FD: told.fileno()}
                return spawn(command, descriptors, toolchain.env)
            finally:
                os.close(tap)
                told.close()  # so that reading the other end comes to its end

        pid = 0
        try:
            pid = entered(namespace.inside(netns, start), report)
            return Launched(identify(pid), stderr)
        except BaseException as error:
            said = last_line(stderr)
            os.close(stderr)
            if pid:  # it ended at once
                os.waitpid(pid, 0)
            if isinstance(error, (OSError, InternalError)):
                raise InternalError(f"QEMU could not be started: {said or error}", step="vmm") from error
            raise


def rehearse(jail: Path) -> None:
    """Run a program that does nothing in a jail. Raises InternalError with what this machine does not let it do."""
    shown = [
        word for path in (Path("/bin"), Path("/usr/bin"), *LIBRARIES) if os.path.lexists(path) for word in ("-R", path)
    ]
    command = [jail, *shown, "-p", REPORT_FD, "-d", "/nowhere", "--", "/bin/true"]
    report, told = os.pipe2(os.O_CLOEXEC)
    stderr = bounded_file("jail-stderr", STDERR_BYTES)
    try:
        try:
            pid = spawn([str(word) for word in command], {2: stderr, REPORT_FD: told}, {})
        finally:
            os.close(told)
        _, status = os.waitpid(entered(pid, report), 0)
    except (OSError, InternalError) as error:
        raise InternalError(last_line(stderr) or str(error), step="vmm") from error
    finally:
        os.close(report)
        os.close(stderr)
    if status != 0:
        raise InternalError(f"{command[-1]} failed in the jail", step="vmm")


def spawn(command: Sequence[str], descriptors: Mapping[int, int], env: Mapping[str, str]) -> int:
    """posix_spawn in a session of its own, with /dev/null and exactly these descriptors (child's number -> ours)."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    wanted = {0: null, 1: null, 2: null, **descriptors}
    # Out of the way first, so that no copy lands on a number that is still to be copied from.
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for number, fd in wanted.items()}
    try:
        return os.posix_spawn(
            command[0],
            list(command),
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **env},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in high.items()],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM],
        )
    finally:
        for fd in (null, *high.values()):
            os.close(fd)
