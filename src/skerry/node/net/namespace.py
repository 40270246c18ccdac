"""Network namespaces by name, as `ip netns` has them, made and entered from this process.

All functions here block; call them in a thread, except `socket_in`, which takes some ten microseconds.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from skerry.core.errors import InternalError
from skerry.node.net import rules

T = TypeVar("T")

NETNS_DIR: Final = Path("/run/netns")
TUN: Final = "/dev/net/tun"
CLONE_NEWNET: Final = 0x40000000
MS_BIND, MS_REC, MS_SHARED, MNT_DETACH = 4096, 16384, 1 << 20, 2

IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUNSETIFF, TUNSETPERSIST = 0x400454CA, 0x400454CB
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFHWADDR, SIOCSARP = 0x8914, 0x8916, 0x891C, 0x8924, 0x8955
IFF_UP, ARPHRD_ETHER, ATF_COM, ATF_PERM = 0x1, 1, 0x02, 0x04

COMMAND_TIMEOUT_S: Final = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def inside(fd: int, function: Callable[[], T]) -> T:
    """Run a function in a thread of its own that has entered the namespace of `fd`. Children it starts stay in it."""

    def body() -> T:
        _call("setns", fd, CLONE_NEWNET)
        return function()

    return _in_own_thread(body)


def _in_own_thread(body: Callable[[], T]) -> T:
    """A thread is in the namespace it entered for good, so it is used once."""
    result: list[T] = []
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            result.append(body())
        except BaseException as error:  # noqa: BLE001 - raised in the caller below
            failure.append(error)

    thread = threading.Thread(target=guarded, name="netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def open_namespace(name: str) -> int:
    """A file descriptor of the namespace. Raises InternalError if there is none of that name."""
    try:
        return os.open(NETNS_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InternalError(f"network namespace {name}: {error.strerror}", step="netns") from error


_home_fd = -1


def socket_in(
    fd: int, kind: int = socket.SOCK_STREAM, *, family: int = socket.AF_INET, protocol: int = 0
) -> socket.socket:
    """A new non-blocking socket that lives in the namespace of `fd`.

    The calling thread visits the namespace for the one system call. If it could not come home, everything that this
    process does next would happen in a sandbox's network: the process ends instead.
    """
    global _home_fd  # noqa: PLW0603 - opened once: all threads start in the same namespace
    if _home_fd < 0:
        _home_fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", fd, CLONE_NEWNET)
    try:
        made = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    finally:
        if _libc.setns(_home_fd, CLONE_NEWNET) != 0:
            os.abort()
    return made


def _prepare_netns_dir() -> None:
    """/run/netns as a shared mount of its own, as iproute2 does it, so that others see the names come and go."""
    if not NETNS_DIR.is_dir():
        NETNS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        _call("mount", b"", bytes(NETNS_DIR), b"none", MS_SHARED | MS_REC, None)
    except OSError:
        _call("mount", bytes(NETNS_DIR), bytes(NETNS_DIR), b"none", MS_BIND | MS_REC, None)
        _call("mount", b"", bytes(NETNS_DIR), b"none", MS_SHARED | MS_REC, None)


def create(name: str) -> None:
    """Make a namespace with its tap, addresses and rules. On failure nothing is left. Raises InternalError."""
    path = NETNS_DIR / name

    def body() -> None:
        _call("unshare", CLONE_NEWNET)
        source = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
        _call("mount", source, bytes(path), b"none", MS_BIND, None)
        _set_up()

    try:
        _prepare_netns_dir()
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        _in_own_thread(body)
    except (OSError, subprocess.SubprocessError) as error:
        delete(name)
        detail = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        raise InternalError(f"network namespace {name} could not be made: {detail}", step="netns") from error


def _set_up() -> None:
    """In the new namespace: no IPv6, no forwarding, rules before the tap comes up."""
    for setting, value in (
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "0"),
    ):
        file = Path("/proc/sys/net") / setting
        if file.exists():  # a host without IPv6 has no switch for it
            file.write_text(value)
    subprocess.run(
        ["nft", "-f", "-"], input=rules.ruleset().encode(), capture_output=True, check=True, timeout=COMMAND_TIMEOUT_S
    )
    tap = open_tap_here(rules.TAP)
    try:
        fcntl.ioctl(tap, TUNSETPERSIST, 1)
    finally:
        os.close(tap)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _interface_up(control, "lo")
        hardware = struct.pack("16sH14s", rules.TAP.encode(), ARPHRD_ETHER, _mac(rules.HOST_MAC))
        fcntl.ioctl(control, SIOCSIFHWADDR, hardware)
        fcntl.ioctl(control, SIOCSIFADDR, _ifreq_address(rules.TAP, rules.HOST_ADDRESS))
        fcntl.ioctl(control, SIOCSIFNETMASK, _ifreq_address(rules.TAP, rules.NETMASK))
        _interface_up(control, rules.TAP)
        # struct arpreq: protocol address, hardware address, flags, netmask, device. A permanent entry: no look-up
        # before the first packet, and nothing the guest says changes it.
        entry = struct.pack(
            "16sH14si16s16s",
            _sockaddr(rules.GUEST_ADDRESS),
            ARPHRD_ETHER,
            _mac(rules.GUEST_MAC),
            ATF_COM | ATF_PERM,
            b"",
            rules.TAP.encode(),
        )
        fcntl.ioctl(control, SIOCSARP, entry)


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _ifreq_address(interface: str, address: str) -> bytes:
    return struct.pack("16s16s8x", interface.encode(), _sockaddr(address))


def _interface_up(control: socket.socket, interface: str) -> None:
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", interface.encode(), IFF_UP))


def open_tap_here(tap: str) -> int:
    """The tap of the calling thread's namespace, as QEMU wants it: raw frames with the virtio header."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    except OSError:
        os.close(fd)
        raise
    return fd


def delete(name: str) -> None:
    """Remove the name; the kernel removes the namespace with its tap and rules when nobody is in it. Idempotent."""
    path = NETNS_DIR / name
    while True:  # a crash between two mounts can leave several
        if _libc.umount2(bytes(path), MNT_DETACH) != 0:
            break
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise InternalError(f"network namespace {name} could not be removed: {error}", step="netns") from error


def names(prefix: str) -> list[str]:
    """Names of namespaces that begin with `prefix`."""
    if not NETNS_DIR.is_dir():
        return []
    return sorted(p.name for p in NETNS_DIR.iterdir() if p.name.startswith(prefix))
