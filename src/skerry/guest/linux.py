"""System calls that Python has no call for, with per-thread meaning.

Credentials: libc's setuid family changes all threads of a process; the kernel's calls change one. The agent switches
the calling thread only. Calls go through PyDLL (the interpreter lock is kept): each takes microseconds, and no other
thread runs in between. x86-64 only, as Skerry is.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_SYS_SETGROUPS, _SYS_SETRESUID, _SYS_SETRESGID = 116, 117, 119
_CLONE_FS = 0x200
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_RB_POWER_OFF = 0x4321FEDC
_GROUP_ARRAYS_MAX = 256

_quick = ctypes.PyDLL(None, use_errno=True)
_slow = ctypes.CDLL(None, use_errno=True)
_syscall = _quick.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long]


class CredentialsLost(SystemExit):
    """A thread could not get its own credentials back: it must end, and does."""


def _fail(path: str | None = None) -> NoReturn:
    number = ctypes.get_errno()
    if path is None:
        raise OSError(number, os.strerror(number))
    raise OSError(number, os.strerror(number), path)


_group_arrays: dict[tuple[int, ...], Any] = {}


def _setgroups(groups: tuple[int, ...]) -> None:
    array = _group_arrays.get(groups)
    if array is None:
        if len(_group_arrays) >= _GROUP_ARRAYS_MAX:
            _group_arrays.clear()
        array = _group_arrays[groups] = (ctypes.c_uint32 * len(groups))(*groups)
    if _syscall(_SYS_SETGROUPS, len(groups), ctypes.addressof(array), 0) != 0:
        _fail()


def _setresgid(real: int, effective: int, saved: int) -> None:
    if _syscall(_SYS_SETRESGID, real, effective, saved) != 0:
        _fail()


def _setresuid(real: int, effective: int, saved: int) -> None:
    if _syscall(_SYS_SETRESUID, real, effective, saved) != 0:
        _fail()


OWN_UID = os.getuid()
OWN_GID = os.getgid()
OWN_GROUPS = tuple(os.getgroups())


def _restore() -> None:
    try:
        _setresuid(OWN_UID, OWN_UID, OWN_UID)
        _setresgid(OWN_GID, OWN_GID, OWN_GID)
        if OWN_UID == 0:
            _setgroups(OWN_GROUPS)
    except OSError as e:
        raise CredentialsLost(f"cannot take the agent's credentials back: {e}") from None


@contextmanager
def acting_as(uid: int, gid: int, groups: tuple[int, ...]) -> Iterator[None]:
    """This thread does what it does as that user: the kernel checks each path, and gives it no capability.

    Only the effective ids change. The real and saved ones stay the agent's, so that the user's processes can neither
    signal nor trace the thread meanwhile.
    """
    if uid == OWN_UID and gid == OWN_GID:
        yield
        return
    try:
        _setgroups(groups)
        _setresgid(-1, gid, -1)
        _setresuid(-1, uid, -1)
        yield
    finally:
        _restore()


def own_directory_and_umask() -> None:
    """From here on this thread's working directory and umask are its own."""
    if _quick.unshare(ctypes.c_int(_CLONE_FS)) != 0:
        _fail()


def hide_memory() -> None:
    """The agent's memory, environment and files in /proc belong to root alone."""
    if _quick.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0) != 0:
        _fail()


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, as PID 1 is by nature."""
    if _quick.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        _fail()


def mount(source: str, target: str, kind: str, options: str = "", flags: int = 0) -> None:
    if _slow.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        _fail(target)


def power_off() -> None:
    """Write everything to disk and end the machine. Does not return where it works."""
    os.sync()
    if _slow.reboot(ctypes.c_int(_RB_POWER_OFF)) != 0:
        _fail()


def inotify_open() -> int:
    fd = _slow.inotify_init1(ctypes.c_int(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        _fail()
    return fd


def inotify_add(fd: int, path: bytes, mask: int) -> int:
    wd = _quick.inotify_add_watch(ctypes.c_int(fd), ctypes.c_char_p(path), ctypes.c_uint32(mask))
    if wd < 0:
        _fail(os.fsdecode(path))
    return wd


def inotify_remove(fd: int, wd: int) -> None:
    """No error where the watch is gone already."""
    if _quick.inotify_rm_watch(ctypes.c_int(fd), ctypes.c_int(wd)) != 0 and ctypes.get_errno() != errno.EINVAL:
        _fail()
