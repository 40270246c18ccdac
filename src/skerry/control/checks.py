"""What a request must look like. Pure; every check yields all that is wrong, never the first thing only."""

import re
import signal as signals
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from skerry.core import ids, limits
from skerry.core.errors import InvalidRequest, Problem
from skerry.core.models import ProcessSpec, PtySize, SandboxSpec
from skerry.core.secrets import check_bindings

IDEMPOTENCY_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
MASK: Final = re.compile(r"([A-Za-z0-9._-]|\$\{PORT\})+(:([0-9]{1,5}|\$\{PORT\}))?")
MASK_MAX: Final = 255
PAGE_MAX: Final = 100
PTY_MAX: Final = 4096
TAG_MAX: Final = 256
NO_HALVES: Final = "text without NUL and without half of a surrogate pair"
"""Which stands for a byte that is not UTF-8 only in U+DC80 to U+DCFF."""
TEXT: Final = "Unicode text without NUL"
PATHS: Final = f"a path of 1 to {limits.PATH_BYTES_MAX} bytes"
USERS: Final = "a user of the sandbox, by name or number"
USER_MAX: Final = 256
IDLE_TIMEOUT_MS_MIN: Final = 1000
COMMAND_TIMEOUT_MS_MAX: Final = 2**53
SIGNALS: Final[Mapping[str, str]] = {
    name.removeprefix(prefix): s.name for s in signals.Signals for name in (s.name,) for prefix in ("", "SIG")
}
SIGNAL_MAX: Final = 64


def check_spec(spec: SandboxSpec, max_lifetime_ms: int) -> Iterator[Problem]:
    """A sandbox's. Whether the template exists is the nodes' to say."""
    yield from check_template(spec.template)
    yield from limits.check_range("cpu", spec.cpu, limits.CPU_MIN, limits.CPU_MAX)
    yield from limits.check_range("memory_mb", spec.memory_mb, limits.MEMORY_MB_MIN, limits.MEMORY_MB_MAX)
    yield from limits.check_range("disk_mb", spec.disk_mb, limits.DISK_MB_MIN, limits.DISK_MB_MAX)
    yield from check_timeout("timeout_ms", spec.timeout_ms, max_lifetime_ms)
    if spec.idle_timeout_ms is not None:
        yield from limits.check_range(
            "idle_timeout_ms", spec.idle_timeout_ms, IDLE_TIMEOUT_MS_MIN, limits.TIMEOUT_MS_MAX
        )
    yield from check_mask("mask_request_host", spec.mask_request_host)
    yield from check_auto_pause_memory(spec)
    yield from check_env("env", spec.env)
    yield from check_bindings(spec.secrets, spec.env)
    yield from check_metadata("metadata", spec.metadata)


def check_auto_pause_memory(spec: SandboxSpec) -> Iterator[Problem]:
    """What a request wakes must go on where it was: a boot in its place would lose what ran without a word."""
    if spec.auto_pause_memory:
        return
    if not spec.auto_pause:
        yield Problem("auto_pause_memory", "says how auto_pause pauses: it needs auto_pause", False, "true")  # noqa: FBT003
    if spec.auto_resume:
        yield Problem("auto_pause_memory", "cannot be false with auto_resume", False, "true")  # noqa: FBT003


def check_mask(field: str, mask: str | None) -> Iterator[Problem]:
    """What is to stand in a `Host` header. None: nothing is to be put there."""
    if mask is not None and not (len(mask) <= MASK_MAX and MASK.fullmatch(mask)):
        yield Problem(field, "must be a host with or without a port; ${PORT} stands for the port", mask, MASK.pattern)


def check_template(template: str | None, field: str = "template") -> Iterator[Problem]:
    """Its form; None is any."""
    if template is not None and not limits.TEMPLATE_NAME.fullmatch(template):
        yield Problem(field, "is not a template's name", template, limits.TEMPLATE_NAME.pattern)


def check_timeout(field: str, value: int, max_lifetime_ms: int) -> Iterator[Problem]:
    yield from limits.check_range(field, value, 0, min(limits.TIMEOUT_MS_MAX, max_lifetime_ms))


def check_env(field: str, env: Mapping[str, str]) -> Iterator[Problem]:
    """As `core.limits` says; a text that has no byte form is refused too."""
    whole = {key: value for key, value in env.items() if has_bytes(value)}
    yield from (
        Problem(f"{field}.{key[:40]}", "holds a character that no byte stands for", None, NO_HALVES)
        for key in env
        if key not in whole
    )
    yield from limits.check_env(field, whole)


def check_metadata(field: str, metadata: Mapping[str, str]) -> Iterator[Problem]:
    """As `core.limits` says; and what not every database can hold is refused on all of them."""
    yield from limits.check_metadata(field, metadata)
    for key, value in metadata.items():
        for what, said in (("key", key), ("value", value)):
            if "\0" in said or (not said.isascii() and not _utf8(said)):
                yield Problem(f"{field}.{_name(key)}", f"its {what} holds a NUL or is not Unicode text", None, TEXT)


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(key: str) -> str:
    return key[:40].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def has_bytes(text: str) -> bool:
    """Whether the text is UTF-8, or bytes carried with surrogate escapes."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def check_path(field: str, path: str) -> Iterator[Problem]:
    """Its form; whether it exists is the guest's to say."""
    if not path:
        yield Problem(field, "is empty", "", PATHS)
    elif "\0" in path or not has_bytes(path):
        yield Problem(field, "holds a character that no path can hold", path, NO_HALVES)
    elif (size := len(raw := path.encode("utf-8", "surrogateescape"))) > limits.PATH_BYTES_MAX:
        yield Problem(field, "is too long", f"{size} bytes", f"{limits.PATH_BYTES_MAX} bytes")
    elif (longest := max(map(len, raw.split(b"/")))) > limits.NAME_BYTES_MAX:
        yield Problem(field, "has a name that is too long", f"{longest} bytes", f"{limits.NAME_BYTES_MAX} bytes")


def refuse_paths(problems: Iterable[Problem] = (), **paths: str) -> None:
    """Raise InvalidRequest if anything is wrong with these paths or else. Where it is the paths alone, the code says
    so, as the guest's own does: `path_too_long` or `invalid_path`."""
    wrong = [problem for field, path in paths.items() for problem in check_path(field, path)]
    other = list(problems)
    if wrong and not other:
        code = "path_too_long" if all("too long" in problem.message for problem in wrong) else "invalid_path"
        raise InvalidRequest("; ".join(f"{p.field} {p.message}" for p in wrong), problems=wrong, code=code)
    limits.refuse([*wrong, *other])


def check_user(user: str | None) -> Iterator[Problem]:
    if user is not None and (not 0 < len(user) <= USER_MAX or not user.isprintable()):
        yield Problem("user", "is not a user's name or number", user, USERS)


def check_process(spec: ProcessSpec) -> ProcessSpec:
    """The spec as it is passed on (a timeout of 0 is none). Raises InvalidRequest.

    Over-long command texts have the code `command_too_long`, so that a program can tell.
    """
    if spec.timeout_ms == 0:
        spec = replace(spec, timeout_ms=None)
    refuse_paths(_process_problems(spec), **({} if spec.cwd is None else {"cwd": spec.cwd}))
    long = list(_too_long(spec))
    if long:
        raise InvalidRequest(f"{long[0].field} {long[0].message}", problems=long, code="command_too_long")
    return spec


def _process_problems(spec: ProcessSpec) -> Iterator[Problem]:
    if not ids.is_id(spec.process_id, ids.PROCESS):
        yield Problem("process_id", "is not a process id", spec.process_id, f"{ids.PROCESS}…")
    if (spec.argv is None) == (spec.shell is None):
        yield Problem("command", "give exactly one of argv and command", None, "argv or command")
    if spec.argv is not None and not (spec.argv and spec.argv[0]):
        yield Problem("argv", "must start with a program's name", list(spec.argv), "[PROGRAM, ARGUMENT…]")
    field = "argv" if spec.argv is not None else "command"
    for argument in (*(spec.argv or ()), spec.shell or ""):
        if "\0" in argument or not has_bytes(argument):
            yield Problem(field, "holds a character that no argument can hold", None, NO_HALVES)
            break
    yield from check_env("env", spec.env)
    yield from check_user(spec.user)
    if spec.timeout_ms is not None:
        yield from limits.check_range("timeout_ms", spec.timeout_ms, 0, COMMAND_TIMEOUT_MS_MAX)
    if spec.pty is not None:
        yield from check_pty(spec.pty)
    if spec.tag is not None and (not 0 < len(spec.tag) <= TAG_MAX or not spec.tag.isprintable()):
        yield Problem("tag", "must be printable and not too long", spec.tag, f"1..{TAG_MAX} characters")


def _too_long(spec: ProcessSpec) -> Iterator[Problem]:
    arguments = spec.argv if spec.argv is not None else (spec.shell or "",)
    field = "argv" if spec.argv is not None else "command"
    sizes = [len(argument.encode("utf-8", "surrogateescape")) for argument in arguments]
    if (longest := max(sizes)) > limits.ARGUMENT_BYTES_MAX:
        what = "has an argument that is too long" if spec.argv is not None else "is too long"
        yield Problem(field, what, f"{longest} bytes", f"{limits.ARGUMENT_BYTES_MAX} bytes")
    elif (total := sum(sizes)) > limits.COMMAND_BYTES_MAX:
        yield Problem(field, "is too long in total", f"{total} bytes", f"{limits.COMMAND_BYTES_MAX} bytes")


def check_pty(size: PtySize) -> Iterator[Problem]:
    yield from limits.check_range("cols", size.cols, 1, PTY_MAX)
    yield from limits.check_range("rows", size.rows, 1, PTY_MAX)


def signal_name(given: str) -> str:
    """ "SIGINT" for "INT", "SIGINT" or "2". Raises InvalidRequest. Real-time signals stay numbers."""
    if given in SIGNALS:
        return SIGNALS[given]
    if given.isascii() and given.isdigit() and len(given) <= 2 and 1 <= int(given) <= SIGNAL_MAX:
        number = int(given)
        return next((s.name for s in signals.Signals if s.value == number), str(number))
    allowed = f"a name such as SIGINT, or 1..{SIGNAL_MAX}"
    raise InvalidRequest.of("signal", "is not a signal", given=given, allowed=allowed, code="unknown_signal")


def check_snapshot_name(name: str | None) -> Iterator[Problem]:
    """None: it has none. A name can never be taken for an id."""
    if name is None:
        return
    if not limits.SNAPSHOT_NAME.fullmatch(name):
        yield Problem("name", "is not a snapshot's name", name, limits.SNAPSHOT_NAME.pattern)
    elif ids.is_id(name, ids.SNAPSHOT):
        yield Problem("name", "has the form of a snapshot's id", name, "another name")
    elif name.endswith(f":{limits.TAG_DEFAULT}"):
        yield Problem("name", "has the tag that a name without one has: leave it out", name, name.partition(":")[0])


def check_page(limit: int) -> Iterator[Problem]:
    yield from limits.check_range("limit", limit, 1, PAGE_MAX)
