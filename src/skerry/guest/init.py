"""What PID 1 does before it is an agent: mounts, network, limits. No program of the image is used.

/init has mounted /proc, /sys, /dev (devtmpfs) and /run. What fails is said on the console and is not fatal: a machine
with an agent and without, say, /dev/shm can still be asked what is wrong.
"""

import fcntl
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable

from skerry.guest import linux, protocol

CGROUP_ROOT = "/sys/fs/cgroup"
COMMANDS_CGROUP = f"{CGROUP_ROOT}/skerry"
OPEN_FILES = (65_536, 1_048_576)

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PRIVATE = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_SIOCADDRT, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x890B, 0x8913, 0x8914, 0x8916, 0x891C
_IFF_UP, _RTF_UP, _RTF_GATEWAY = 1, 1, 2
_LINK_WAIT_S = 10.0
SECRETS_ROOT = "/run/secrets"
_SHM, _TMP = "/dev/shm", "/tmp"  # noqa: S108
_SYSCTLS = (("fs/inotify/max_user_instances", "4096"), ("fs/inotify/max_user_watches", "524288"))


def prepare() -> tuple[str | None, str | None]:
    """Make the machine ready. Returns the directories for the commands' cgroups and for files that hold secrets; None
    where there is none."""
    os.umask(0o022)
    os.chdir("/")
    _try("limits", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES))
    mounted = _mounted()
    _try("/dev/pts", lambda: _mount(mounted, "devpts", "/dev/pts", "devpts", "gid=5,mode=620,ptmxmode=666", 0x0A))
    _try(_SHM, lambda: _mount(mounted, "tmpfs", _SHM, "tmpfs", "mode=1777", _MS_NOSUID | _MS_NODEV))
    _try(SECRETS_ROOT, lambda: _mount(mounted, "tmpfs", SECRETS_ROOT, "tmpfs", "mode=711,size=64m", _PRIVATE))
    _try("/dev links", _device_links)
    _try(_TMP, _temporary)
    _try("lo", lambda: _up("lo"))
    _try("eth0", lambda: configure_link("eth0", protocol.GUEST_ADDRESS, "255.255.255.252", protocol.HOST_ADDRESS))
    _try("cgroups", lambda: _cgroups(mounted))
    for name, value in _SYSCTLS:
        _try(name, lambda name=name, value=value: _write(f"/proc/sys/{name}", value))
    cgroups = COMMANDS_CGROUP if os.path.exists(f"{COMMANDS_CGROUP}/cgroup.procs") else None
    return cgroups, SECRETS_ROOT if SECRETS_ROOT in _mounted() else None


def _try(what: str, act: Callable[[], object]) -> None:
    try:
        act()
    except (OSError, ValueError) as e:  # setrlimit says EPERM as a ValueError
        sys.stderr.write(f"skerry agent: {what}: {e}\n")


def _mounted() -> set[str]:
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as f:
        return {line.split(" ")[1] for line in f if line.count(" ") > 1}


def _mount(mounted: set[str], source: str, target: str, kind: str, options: str, flags: int) -> None:
    if target not in mounted:
        os.makedirs(target, exist_ok=True)
        linux.mount(source, target, kind, options, flags)


def _device_links() -> None:
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        if not os.path.lexists(f"/dev/{name}"):
            os.symlink(f"/proc/self/{target}", f"/dev/{name}")
    if not os.path.lexists("/dev/ptmx"):
        os.symlink("pts/ptmx", "/dev/ptmx")


def _temporary() -> None:
    """It stays on the disk: what agents put there may be larger than memory."""
    if not os.path.isdir(_TMP):
        os.mkdir(_TMP)
        os.chmod(_TMP, 0o1777)  # noqa: S103


def _cgroups(mounted: set[str]) -> None:
    if CGROUP_ROOT not in mounted:
        try:
            # Moving a process into its cgroup costs a grace period of the kernel's otherwise.
            linux.mount("cgroup2", CGROUP_ROOT, "cgroup2", "favordynmods", _PRIVATE)
        except OSError:
            linux.mount("cgroup2", CGROUP_ROOT, "cgroup2", "", _PRIVATE)
    os.makedirs(COMMANDS_CGROUP, exist_ok=True)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(text)


def _up(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14x", name.encode(), 0)
        flags = struct.unpack_from("H", fcntl.ioctl(s, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | _IFF_UP))


def configure_link(name: str, address: str, netmask: str, gateway: str) -> None:
    """Address, up, default route. Waits for the device for a while: its driver may still be looking for it."""
    end = time.monotonic() + _LINK_WAIT_S
    while not os.path.exists(f"/sys/class/net/{name}") and time.monotonic() < end:
        time.sleep(0.01)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, _SIOCSIFADDR, struct.pack("16s16s", name.encode(), _sockaddr(address)))
        fcntl.ioctl(s, _SIOCSIFNETMASK, struct.pack("16s16s", name.encode(), _sockaddr(netmask)))
        _up(name)
        try:
            fcntl.ioctl(s, _SIOCADDRT, route(gateway))
        except FileExistsError:
            return


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def route(gateway: str) -> bytes:
    """`struct rtentry` of a default route, x86-64: destination and mask are 0.0.0.0."""
    zero = _sockaddr("0.0.0.0")  # noqa: S104
    head = struct.pack("8x16s16s16sH", zero, _sockaddr(gateway), zero, _RTF_UP | _RTF_GATEWAY)
    return head.ljust(120, b"\0")
