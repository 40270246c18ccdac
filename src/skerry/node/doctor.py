"""What this machine can do, what is missing and how to get it, and what a stale state holds. Looks; changes nothing."""

import fcntl
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from skerry import images
from skerry.core.errors import SkerryError
from skerry.images.model import ImageSet, Toolchain
from skerry.node import cgroup, host
from skerry.node.aio import in_thread
from skerry.node.config import NodeConfig
from skerry.node.net import namespace
from skerry.node.process import working_below
from skerry.node.vmm.qemu import probe
from skerry.node.vmm.qemu.argv import READ_ONLY_RAM
from skerry.node.vmm.qemu.launch import rehearse

Level = Literal["ok", "warn", "fail"]
COMMAND_TIMEOUT_S: Final = 10.0
MEMORY_LOW_MB: Final = 2048
DISK_LOW_MB: Final = 5120
QEMU_FLOOR: Final = (7, 2, 0)
QEMU_FAST: Final = (10, 0, 0)
FOREIGN: Final = "sk-"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    level: Level
    detail: str
    remedy: str | None = None


async def examine(config: NodeConfig) -> list[Check]:
    """All checks, in the order in which a remedy may depend on an earlier one. Raises nothing of its own."""
    looks = (_host, _root, _tun, _netns, _nft, _cgroups, lambda: _memory(config), lambda: _disk(config))
    checks = [await in_thread(look) for look in looks]
    toolchain, check = await in_thread(_qemu, config)
    checks.append(check)
    image_set, check = await in_thread(_images, config)
    checks.append(check)
    checks.append(await in_thread(_jail, toolchain, image_set))
    checks.append(await _accelerator(config, toolchain, image_set))
    checks += await in_thread(_state, config)
    return checks


def _host() -> Check:
    machine, release = platform.machine(), platform.release()
    if machine != "x86_64":
        return Check("host", "fail", f"{machine}, Linux {release}", "guests are x86-64: an amd64 host is needed")
    return Check("host", "ok", f"{machine}, Linux {release}, {os.cpu_count()} CPUs")


def _root() -> Check:
    if os.geteuid() == 0:
        return Check("root", "ok", "runs as root")
    return Check("root", "fail", f"runs as uid {os.geteuid()}", "start it with sudo: namespaces, taps and nft need it")


def _tun() -> Check:
    try:
        os.close(os.open(namespace.TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        remedy = "start it with sudo" if isinstance(error, PermissionError) else "modprobe tun"
        return Check("tun", "fail", f"{namespace.TUN}: {error.strerror}", remedy)
    return Check("tun", "ok", f"{namespace.TUN} opens")


def _tried(name: str, command: list[str], good: str, remedy: str) -> Check:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        return Check(name, "fail", f"{command[0]} is not installed", remedy)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip() or f"exit code {error.returncode}"
        return Check(name, "fail", said.splitlines()[0], remedy)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "fail", str(error), remedy)
    return Check(name, "ok", good)


def _netns() -> Check:
    command = ["unshare", "--net", "true"]
    return _tried("netns", command, "network namespaces can be made", "run on a host or in a privileged container")


def _nft() -> Check:
    command = ["unshare", "--net", "nft", "add table inet skerry"]
    return _tried("nft", command, "rules can be set in a namespace", "apt-get install nftables")


def _cgroups() -> Check:
    found = cgroup.detect()
    remedy = "sandboxes run without a bound on their VMM: mount cgroups (v2, or v1 memory and cpu) writable"
    if not found.version:
        return Check("cgroups", "warn", found.problem or "none", remedy)
    for root in found.roots.values():
        if not os.access(root, os.W_OK):
            return Check("cgroups", "warn", f"v{found.version}, but {root} is not writable", remedy)
    return Check("cgroups", "ok", f"v{found.version} at {', '.join(sorted(map(str, found.roots.values())))}")


def _memory(config: NodeConfig) -> Check:
    memory = host.memory()
    detail = (
        f"{memory.available_mb} of {memory.total_mb} MB available; guests may have {config.memory_share:g} times all"
    )
    if memory.available_mb < MEMORY_LOW_MB:
        return Check("memory", "warn", detail, "a sandbox needs some 300 MB at least")
    return Check("memory", "ok", detail)


def _disk(config: NodeConfig) -> Check:
    free = host.disk_free_mb(config.data_dir)
    detail = f"{free} MB free for {config.data_dir}"
    if free < DISK_LOW_MB:
        return Check("disk", "warn", detail, "make room: sandboxes' disks grow as they are written to")
    return Check("disk", "ok", detail)


def _qemu(config: NodeConfig) -> tuple[Toolchain | None, Check]:
    try:
        toolchain = images.toolchain(config.cache_dir, str(config.qemu) if config.qemu else None)
    except SkerryError as error:
        return None, Check("qemu", "fail", error.message, "apt-get install qemu-system-x86 qemu-utils")
    detail = f"{toolchain.version_text} ({toolchain.source}: {toolchain.qemu})"
    if toolchain.version < QEMU_FLOOR:
        return toolchain, Check("qemu", "fail", detail, "QEMU 7.2 or later is needed")
    if toolchain.version < QEMU_FAST:
        return toolchain, Check(
            "qemu",
            "warn",
            detail,
            "QEMU 10 emulates three times faster: `python -m skerry.images build` gets it from backports",
        )
    return toolchain, Check("qemu", "ok", detail)


def _images(config: NodeConfig) -> tuple[ImageSet | None, Check]:
    try:
        found = images.load(config.cache_dir)
    except SkerryError as error:
        return None, Check("images", "fail", error.message, "python -m skerry.images build")
    names = ", ".join(sorted(found.templates))
    return found, Check("images", "ok", f"kernel {found.kernel.release}; templates: {names}")


def _jail(toolchain: Toolchain | None, image_set: ImageSet | None) -> Check:
    if toolchain is None or image_set is None:
        return Check("jail", "warn", "not tried: QEMU or the images are missing", "get those first")
    try:
        rehearse(image_set.jail)
    except SkerryError as error:
        return Check(
            "jail",
            "fail",
            error.message,
            "run it on Linux 5.12 or later, on a host or in a privileged container, where / is a mount",
        )
    if toolchain.version < READ_ONLY_RAM:
        remedy = "QEMU 8.2 or later opens memory images read-only, and runs as a user of its own for each sandbox"
        return Check("jail", "warn", f"QEMU {toolchain.version_text} runs without rights, but as user 0", remedy)
    return Check("jail", "ok", "each QEMU runs as a user of its own, without rights, and sees only its files")


async def _accelerator(config: NodeConfig, toolchain: Toolchain | None, image_set: ImageSet | None) -> Check:
    if toolchain is None or image_set is None:
        there = "is there" if probe.KVM.exists() else "is not there"
        return Check("accelerator", "warn", f"not probed: QEMU or the images are missing; {probe.KVM} {there}")
    try:
        verdict = await probe.choose(config.accelerator, toolchain, image_set.kernel, config.cache_dir)
    except SkerryError as error:
        return Check("accelerator", "fail", error.message)
    detail = f"{verdict.accelerator}: {verdict.because}"
    if verdict.accelerator == "kvm":
        return Check("accelerator", "ok", detail)
    return Check("accelerator", "warn", detail, "sandboxes run emulated, several times slower than with KVM")


def _state(config: NodeConfig) -> list[Check]:
    """This data directory's server and what is left of earlier ones; and what other data directories hold."""
    own, foreign = f"{FOREIGN}{config.instance}-", namespace.names(FOREIGN)
    ours = [name for name in foreign if name.startswith(own)]
    others = sorted({name.split("-")[1] for name in foreign if name not in ours and name.count("-") == 2})
    running = working_below(config.vms_dir)
    checks: list[Check] = []
    if (pid := _server(config)) is not None:
        checks.append(Check("state", "ok", f"a server runs (pid {pid}) with {len(running)} VMs"))
    else:
        left = {
            "VMs": len(running),
            "network namespaces": len(ours),
            "sandbox directories": _count(lambda: list(config.vms_dir.iterdir())),
            "journal entries": _count(lambda: list(config.journal_dir.iterdir())),
        }
        if any(left.values()):
            detail = "no server runs; " + ", ".join(f"{n} {what}" for what, n in left.items() if n)
            checks.append(
                Check("state", "warn", detail, "start the server: it takes up what lives and removes the rest")
            )
        else:
            checks.append(Check("state", "ok", "no server runs, and nothing is left of one"))
    if others:
        detail = f"other data directories have namespaces here (instances {', '.join(others)})"
        checks.append(Check("other instances", "ok", detail))
    return checks


def _server(config: NodeConfig) -> str | None:
    """Pid of the server that holds the data directory's lock, None if nobody does."""
    path = config.state_dir / "lock"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(fd, 20, 0).decode(errors="replace").strip()
    else:
        return None
    finally:
        os.close(fd)


def _count(look: Callable[[], list[Path]]) -> int:
    try:
        return len(look())
    except OSError:
        return 0
