"""Which accelerator really works here. `/dev/kvm` can be there, open, and still hang every guest: so one is booted.

The probe is a kernel without a root filesystem: it comes up, panics for want of one, and resets. A machine that gets
there within the deadline runs guests.
"""

import asyncio
import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError, InvalidRequest
from skerry.images.model import KernelImage, Toolchain
from skerry.node.aio import finish, in_thread
from skerry.node.vmm.qemu.argv import CPU, Accelerator, accelerator_args

ENVIRONMENT: Final = "SKERRY_ACCEL"
KVM: Final = Path("/dev/kvm")
DEADLINE_S: Final = 8.0
SIGN: Final = b"Kernel panic - not syncing: VFS"
OUTPUT_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    accelerator: Accelerator
    because: str
    """One line for a person."""


def probe_argv(toolchain: Toolchain, kernel: Path) -> list[str]:
    """QEMU's command line for the probe. Pure."""
    return [
        *toolchain.argv,
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-M", "microvm,pit=on,pic=on,rtc=on,acpi=on",
        *accelerator_args("kvm", 1),
        "-cpu", CPU["kvm"],
        "-m", "128M",
        "-kernel", str(kernel),
        "-append", "console=ttyS0 reboot=t panic=-1",
        "-serial", "stdio",
    ]  # fmt: skip


async def boots(command: list[str], env: dict[str, str], deadline_s: float = DEADLINE_S) -> bool:
    """Whether the guest of this command line comes up, panics and resets in time. Nothing is left running."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **env},
        )
    except OSError as error:
        raise InternalError(f"QEMU could not be started: {error}", step="probe") from error
    said = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            assert process.stdout is not None  # noqa: S101 - it was asked for
            while len(said) < OUTPUT_BYTES_MAX and (more := await process.stdout.read(65_536)):
                said += more
            return await process.wait() == 0 and SIGN in said
    except TimeoutError:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await finish(process.wait())


async def choose(choice: str, toolchain: Toolchain, kernel: KernelImage, cache_dir: Path) -> Verdict:
    """`auto` probes, once per kernel, QEMU and host kernel; the environment's word goes before `choice`.

    Raises InvalidRequest for another word than auto, kvm, tcg.
    """
    word = os.environ.get(ENVIRONMENT) or choice
    if word == "kvm" or word == "tcg":
        return Verdict(word, "as configured")
    if word != "auto":
        raise InvalidRequest.of("accelerator", "is not known", given=word, allowed="auto, kvm, tcg")
    if not KVM.exists():
        return Verdict("tcg", f"this host has no {KVM}")
    cache = cache_dir / "accelerator.json"
    key = _key(toolchain, kernel)
    usable = await in_thread(_cached, cache, key)
    if usable is None:
        usable = await boots(probe_argv(toolchain, kernel.vmlinuz), dict(toolchain.env))
        await in_thread(_remember, cache, key, usable=usable)
    if usable:
        return Verdict("kvm", "a guest booted with it")
    return Verdict("tcg", f"{KVM} is there, but a guest did not boot with it within {DEADLINE_S:.0f} s")


def _key(toolchain: Toolchain, kernel: KernelImage) -> str:
    parts = (kernel.key, toolchain.version_text, str(toolchain.qemu), os.uname().release)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cached(path: Path, key: str) -> bool | None:
    try:
        verdict = json.loads(path.read_text())
        return bool(verdict["kvm"]) if verdict["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, key: str, *, usable: bool) -> None:
    """A cache that cannot be written costs the next start a probe, and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"key": key, "kvm": usable}))
        temporary.replace(path)
