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
from skerry.node.vmm.qemu.qmp import short_path

STDERR_BYTES: Final = 16_384
MONITOR_FD, TAP_FD = 3, 4

# $1: working directory; then cgroup.procs files up to "--"; then the program. The process joins its cgroups before
# QEMU runs, is what the kernel kills first when the host runs out of memory, and dumps no core with a guest's memory.
_SHIM: Final = """\
cd "$1" || exit 70; shift
while [ "$1" != -- ]; do echo $$ > "$1" || exit 71; shift; done; shift
echo 500 > /proc/self/oom_score_adj; ulimit -c 0
exec "$@"
"""


def shim(directory: Path, cgroup_procs: Sequence[Path], program: Sequence[str]) -> list[str]:
    """The argv that starts `program` in a directory and in cgroups. Pure."""
    return ["/bin/sh", "-c", _SHIM, "sh", str(directory), *map(str, cgroup_procs), "--", *program]


@dataclass(slots=True)
class Launched:
    process: ProcessId
    stderr: int
    """A memory file that QEMU writes to until it is full."""

    def said(self) -> str:
        """The last line QEMU wrote to its standard error."""
        text = os.pread(self.stderr, STDERR_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

    def close(self) -> None:
        os.close(self.stderr)


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


def launch(spec: VmSpec, toolchain: Toolchain, accelerator: argv.Accelerator, tsc_khz: int) -> Launched:
    """Start it. Raises InternalError (`step` vmm) with nothing running. The monitor's socket listens already."""
    command = argv.build(spec, toolchain, accelerator, argv.Inherited(MONITOR_FD, TAP_FD), tsc_khz=tsc_khz)
    command = shim(spec.run_dir, spec.cgroup_procs, command)
    with contextlib.ExitStack() as stack:
        try:
            if spec.restore is None:
                _ram_file(spec.run_dir / argv.RAM, spec.memory_mb << 20)
            listener = stack.enter_context(_listen(spec.run_dir / argv.MONITOR))
            netns = namespace.open_namespace(spec.netns)
            stack.callback(os.close, netns)
            stderr = bounded_file("qemu-stderr", STDERR_BYTES)
        except OSError as error:
            raise InternalError(f"QEMU could not be prepared: {error}", step="vmm") from error

        def start() -> int:
            tap = namespace.open_tap_here(spec.tap)
            try:
                return spawn(command, {2: stderr, MONITOR_FD: listener.fileno(), TAP_FD: tap}, toolchain.env)
            finally:
                os.close(tap)

        try:
            return Launched(identify(namespace.inside(netns, start)), stderr)
        except BaseException as error:
            os.close(stderr)
            if isinstance(error, OSError):
                raise InternalError(f"QEMU could not be started: {error}", step="vmm") from error
            raise


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
