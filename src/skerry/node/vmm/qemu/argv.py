"""QEMU's command line, as a pure function of what is wanted."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from skerry.images.model import Toolchain
from skerry.node.net.rules import GUEST_MAC
from skerry.node.vmm.driver import VmSpec

Accelerator = Literal["kvm", "tcg"]

DISK: Final = "vda"
MONITOR: Final = "qmp.sock"
"""In the run directory, which is QEMU's working directory: a socket's path has to be short."""
RAM: Final = "ram"
READ_ONLY_RAM: Final = (8, 2)
CONSOLE_BYTES: Final = 65_536
"""Ring of the serial console. QEMU wants a power of two."""
TRANSLATION_MB: Final = 64
"""Bound on the code that each CPU of an emulated guest is translated to; it fills up sooner or later. Unset it is up to
1 GiB. Measured with 64, 128 and 256: the same speed for shells and Python."""
TRANSLATION_MB_MAX: Final = 256

SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

UNGUARDED: Final = ("mitigations=off", "init_on_alloc=0")
"""Kernel arguments in emulation. There is no speculation to mitigate, and zeroing every page that is handed out
protects a guest's kernel from its own bugs only, and is paid for at each fork."""

# Emulation: everything of x86-64-v3 and more, without what is slow to emulate. `erms` and `fsrm` make the kernel copy
# with `rep movsb`, which QEMU before 10 runs a byte at a time; `la57` adds a level to every page walk.
CPU: Final[dict[Accelerator, str]] = {"kvm": "host", "tcg": "max,la57=off,erms=off,fsrm=off"}


@dataclass(frozen=True, slots=True)
class Inherited:
    """Numbers of the file descriptors that QEMU is started with."""

    monitor: int
    """A listening Unix socket."""
    tap: int


def accelerator_args(accelerator: Accelerator, cpu: int) -> list[str]:
    if accelerator == "kvm":
        return ["-accel", "kvm"]
    return ["-accel", f"tcg,thread=multi,tb-size={min(TRANSLATION_MB_MAX, cpu * TRANSLATION_MB)}"]


def kernel_args(accelerator: Accelerator, tsc_khz: int, extra: dict[str, str]) -> str:
    """The kernel's command line. `tsc_khz` is only used in emulation."""
    words = ["console=ttyS0", "quiet", "loglevel=4", "reboot=t", "panic=-1", "random.trust_cpu=on"]
    if accelerator == "tcg":
        # No reference timer to calibrate with. The guest's TSC is the host's. Without tsc=reliable the kernel compares
        # it with timer ticks, which a busy host delivers late, distrusts it, and counts the late ticks instead: its
        # clock then runs slow and in steps of 4 ms.
        words += [f"tsc_early_khz={tsc_khz}", "tsc=reliable", "no_timer_check", *UNGUARDED]
    words += [f"{key}={value}" for key, value in sorted(extra.items())]
    for word in words:
        if any(c.isspace() or c == '"' for c in word):
            raise ValueError(f"not a kernel argument: {word!r}")
    return " ".join(words)


def boot_args(spec: VmSpec, accelerator: Accelerator, tsc_khz: int) -> list[str]:
    """What a guest is booted with. A restored one has its kernel in its RAM and is never booted again; QEMU would read
    the file all the same and hold 11 MB of it in each VM."""
    if spec.restore is not None:
        return []
    append = kernel_args(accelerator, tsc_khz, spec.cmdline)
    return ["-kernel", str(spec.kernel), "-initrd", str(spec.initramfs), "-append", append]


def memory_backend(spec: VmSpec, version: tuple[int, ...]) -> str:
    """The guest's RAM. An image's file is opened read-only by QEMU 8.2 and later; before, there is no such option."""
    backend = f"memory-backend-file,id=ram,size={spec.memory_mb}M,share=off,dump=off,mem-path="
    if spec.restore is None:
        return backend + RAM
    return backend + _escape(spec.restore.ram) + (",readonly=on,rom=off" if version >= READ_ONLY_RAM else "")


def _escape(path: Path) -> str:
    """A path as a value in QEMU's comma-separated options."""
    return str(path).replace(",", ",,")


def build(
    spec: VmSpec, toolchain: Toolchain, accelerator: Accelerator, inherited: Inherited, *, tsc_khz: int
) -> list[str]:
    """The whole command line. It differs between accelerators in `-accel`, `-cpu` and `-append` only, and between a
    guest that boots and one that is restored in its RAM's file and in `boot_args`.

    RAM is a private mapping of a file: of an empty one for a guest that boots, of a saved image's for one that is
    restored. Either way what the guest writes is anonymous memory and never reaches the disk, and pages that nobody
    writes are shared by all clones of an image. A host whose disk is full is an I/O error to the guest; left to itself
    QEMU would stop the machine without a word.
    """
    disk = (
        "driver=qcow2,node-name=disk,discard=unmap,cache.no-flush=on,"
        f"file.driver=file,file.cache.no-flush=on,file.filename={_escape(spec.disk)}"
    )
    agent = f"driver=raw,node-name=agent,read-only=on,file.driver=file,file.filename={_escape(spec.agent_image)}"
    return [
        *toolchain.argv,
        "-name", f"skerry-{spec.vm_id}",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        # Stopped and not gone when the guest is over, so that its last words can be read.
        "-action", "shutdown=pause",
        "-sandbox", SANDBOX,
        # What a restored machine reads is the devices alone, without the header of a whole migration.
        "-M", "microvm,pit=on,pic=on,rtc=on,acpi=on,memory-backend=ram,dump-guest-core=off,suppress-vmdesc=on",
        "-global", "migration.send-configuration=off",
        *accelerator_args(accelerator, spec.cpu),
        "-cpu", CPU[accelerator],
        "-smp", str(spec.cpu),
        "-m", f"{spec.memory_mb}M",
        "-object", memory_backend(spec, toolchain.version),
        *boot_args(spec, accelerator, tsc_khz),
        "-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}",
        "-serial", "chardev:console",
        "-blockdev", disk,
        "-device", f"virtio-blk-device,id={DISK},drive=disk,serial=disk,werror=report,rerror=report",
        "-blockdev", agent,
        "-device", "virtio-blk-device,drive=agent,serial=agent",
        "-netdev", f"tap,id=net,fd={inherited.tap}",
        "-device", f"virtio-net-device,netdev=net,mac={GUEST_MAC}",
        "-device", "virtio-rng-device",
        "-chardev", f"socket,id=monitor,fd={inherited.monitor},server=on,wait=off",
        "-mon", "chardev=monitor,mode=control",
        *(["-incoming", "defer", "-S"] if spec.restore else []),
    ]  # fmt: skip


def fingerprint(toolchain: Toolchain, accelerator: Accelerator) -> str:
    """A short hash of all that a command line says about the machine's devices, and of no path or size."""
    nowhere = Path("/")
    spec = VmSpec(
        vm_id="", cpu=1, memory_mb=1, kernel=nowhere, initramfs=nowhere, disk=nowhere, agent_image=nowhere,
        run_dir=nowhere, netns="", tap="",
    )  # fmt: skip
    words = build(spec, toolchain, accelerator, Inherited(0, 0), tsc_khz=0)[len(toolchain.argv) :]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
