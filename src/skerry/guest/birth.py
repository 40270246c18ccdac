"""Starts a program through the compiled half, `birth.c`, and waits for it as long as a short command takes.

In an emulated guest each step of the interpreter is dear, and dearer still right after another process has run; so what
lies between "ready to start" and "it is over" is done by one call. The library is made with the agent's image
(`skerry.images.agent`) and stands beside this file there.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOM: Final = 16 * 1024
"""How much of each output is taken in while waiting; a program that writes more is looked after by the pump."""
CLONE, USER, DIRECTORY, TERMINAL, PROGRAM, INTERPRETER = range(1, 7)
"""Where it failed."""
MEMBERS: Final = (
    "candidates", "argc", "envc", "uid", "gid", "groups", "cgroup", "terminal", "in_", "out", "err", "hold_ms",
    "reader", "from_out", "from_err", "pid", "pidfd", "stage", "error", "ended", "status", "out_bytes", "err_bytes",
)  # fmt: skip
_TABLE = 256
_SPARE = 8


class Job(ctypes.Structure):
    """`struct job` of birth.c, where its members are explained."""

    _fields_ = [(name, ctypes.c_long) for name in MEMBERS]

    candidates: int
    argc: int
    envc: int
    uid: int
    gid: int
    groups: int
    cgroup: int
    terminal: int
    in_: int
    out: int
    err: int
    hold_ms: int
    reader: int
    from_out: int
    from_err: int
    pid: int
    pidfd: int
    stage: int
    error: int
    ended: int
    status: int
    out_bytes: int
    err_bytes: int


class Bed:
    """The memory of one birth, used again."""

    __slots__ = ("at", "buffer", "buffer_at", "job", "table", "table_at")

    def __init__(self) -> None:
        self.job = Job()
        self.at = ctypes.addressof(self.job)
        self.table = (ctypes.c_void_p * _TABLE)()
        self.table_at = ctypes.addressof(self.table)
        self.buffer = ctypes.create_string_buffer(2 * ROOM)
        self.buffer_at = ctypes.addressof(self.buffer)

    def output(self) -> tuple[bytes, bytes]:
        job = self.job
        out = ctypes.string_at(self.buffer_at, job.out_bytes) if job.out_bytes else b""
        return out, ctypes.string_at(self.buffer_at + ROOM, job.err_bytes) if job.err_bytes else b""


_beds: list[Bed] = []


def bed() -> Bed:
    """One that nobody uses. Give it to `make_bed` afterwards."""
    try:
        return _beds.pop()
    except IndexError:
        return Bed()


def make_bed(used: Bed) -> None:
    if len(_beds) < _SPARE:
        _beds.append(used)


_spawn: Any = None
_groups: dict[tuple[int, ...], Any] = {}
_GROUPS_MAX = 256


def load(path: str | None = None) -> None:
    """Load the library; None: the one beside this file. Raises OSError."""
    global _spawn  # noqa: PLW0603 - there is one for all threads
    library = ctypes.CDLL(path or str(Path(__file__).with_name("libbirth.so")))
    library.prepare.restype = None
    library.prepare()
    function = library.spawn
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_char_p, pointer, pointer, pointer, ctypes.c_long]
    function.restype = None
    _spawn = function


def _kernels(groups: tuple[int, ...]) -> Any:
    """A list of groups as the kernel takes it."""
    array = _groups.get(groups)
    if array is None:
        if len(_groups) >= _GROUPS_MAX:
            _groups.clear()
        array = _groups[groups] = (ctypes.c_uint32 * len(groups))(*groups)
    return array


def spawn(
    to: Bed, directory: str, terminal: str | None, candidates: Sequence[str], argv: Sequence[str],
    env: Mapping[str, str], groups: tuple[int, ...],
) -> None:  # fmt: skip
    """Start the first of `candidates` that can be executed, and wait as `to.job` says. What came of it is in `to`.

    The rest of the job's members has been set by the caller. Raises ValueError for a text that holds a NUL character.
    """
    job = to.job
    job.candidates, job.argc, job.envc = len(candidates), len(argv), len(env)
    job.terminal = 0 if terminal is None else 1
    words = [directory, *candidates, *argv, *[f"{name}={value}" for name, value in env.items()], ""]
    if terminal is not None:
        words.insert(1, terminal)
    texts = "\0".join(words).encode("utf-8", "surrogateescape")
    if texts.count(b"\0") != len(words) - 1:
        raise ValueError("a text holds a NUL character")
    table_at = to.table_at
    pointers = len(argv) + len(env) + 2
    if pointers > _TABLE:
        table = (ctypes.c_void_p * pointers)()
        table_at = ctypes.addressof(table)
    array = _kernels(groups)  # held here as long as the call takes
    _spawn(to.at, texts, table_at, ctypes.addressof(array), to.buffer_at, ROOM)
