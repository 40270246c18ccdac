"""What a QEMU may see and who it is: the command line of `images/files/jail.c`, and the files made ready for it.

A VM's QEMU runs as a user of its own without any right, in namespaces of its own, and sees its own disk, the files that
it only reads, and the libraries it needs. See docs/adr/0008-jail.md.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images.model import Toolchain
from skerry.node.vmm.driver import VmSpec
from skerry.node.vmm.qemu import argv

REPORT_FD: Final = 5
KVM: Final = Path("/dev/kvm")
LIBRARIES: Final = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")))
DATA: Final = (Path("/usr/share"),)
"""QEMU's firmware, where it is the host's own."""


def read_only(spec: VmSpec) -> list[Path]:
    """The files that a VM's QEMU reads and never writes. Pure."""
    memory = [spec.kernel, spec.initramfs] if spec.restore is None else [spec.restore.ram]
    return [*memory, spec.agent_image, *spec.backing]


def jailed(
    spec: VmSpec, jail: Path, toolchain: Toolchain, accelerator: argv.Accelerator, program: Sequence[str]
) -> list[str]:
    """The command line that starts QEMU's (`program`) in its jail.

    An image's RAM is opened for writing by QEMU before 8.2, which never writes it: only its owner may do that, so that
    QEMU runs as user 0, without any of the rights that the name stands for elsewhere.
    """
    options: list[tuple[str, Path | int]] = [("c", file) for file in spec.cgroup_procs]
    writes = [spec.disk]
    if spec.restore is None:
        writes.append(spec.run_dir / argv.RAM)
    elif toolchain.version < argv.READ_ONLY_RAM:
        writes.append(spec.restore.ram)
        options.append(("u", 0))
    options += [("R", path) for path in _programs(toolchain)]
    options += [("r", path) for path in dict.fromkeys(read_only(spec)) if path not in writes]
    options += [("w", path) for path in writes]
    options.append(("v", Path(os.devnull)))  # by which it finds out how this kernel locks files
    if accelerator == "kvm":
        options += [("v", KVM), ("g", KVM.stat().st_gid)]
    options += [("p", REPORT_FD), ("d", spec.run_dir)]
    words = (word for option, value in options for word in (f"-{option}", str(value)))
    return [str(jail), *words, "--", *program]


def _programs(toolchain: Toolchain) -> list[Path]:
    """QEMU itself, its libraries, and its firmware."""
    if toolchain.root is not None:
        return [*filter(os.path.lexists, LIBRARIES), toolchain.root]
    places = [*LIBRARIES, *DATA]
    prefix = toolchain.qemu.parent.parent
    if prefix not in {Path("/"), Path("/usr")}:
        places += [prefix / "lib", prefix / "lib64", prefix / "share"]
    return [*filter(os.path.lexists, dict.fromkeys(places)), toolchain.qemu]


def let_read(files: Sequence[Path]) -> None:
    """Files that VMs with users of their own are to read belong to root, and everybody may read them who gets to them:
    nobody outside gets into the directories they are in."""
    for file in files:
        found = file.stat()
        if found.st_uid != os.getuid() or found.st_gid != os.getgid():
            os.chown(file, os.getuid(), os.getgid())
        if not found.st_mode & stat.S_IROTH:
            file.chmod(0o644)


def entered(jail_pid: int, report: int) -> int:
    """The pid of the program that the jail has started, our child. Waits for the jail's own end, which comes at once.
    Raises InternalError where there is none; what went wrong is on the jail's standard error."""
    said = b""
    while part := os.read(report, 64):
        said += part
    _, status = os.waitpid(jail_pid, 0)
    if status == 0:
        return int(said)
    if said:
        os.waitpid(int(said), 0)
    raise InternalError("the VMM's jail could not be made", step="vmm")
