"""What the command line writes: tables for people, JSON for programs, errors on standard error, exit codes."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skerry.core.errors import InvalidRequest, SkerryError
from skerry.sdk.errors import CommandDeadline, ForkIncomplete, TransferIncomplete, as_problem
from skerry.sdk.models import plain

P = ParamSpec("P")
T = TypeVar("T")

FAILED: Final = 1
"""Of several things that were asked for, some failed."""
USAGE: Final = 2
OUTCOME_UNKNOWN: Final = 122
UNREACHABLE: Final = 123
DEADLINE: Final = 124
ERROR: Final = 125
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON; errors as problem documents.")]


_COMMAND_CODES: Final = {"command_not_executable": NOT_EXECUTABLE, "command_not_found": NOT_FOUND}
"""A command that cannot start ends the program as a shell would have it."""


class ReaderGone(BaseException):
    """Whoever read our output is gone. Not an OSError: the command line's library would make exit code 1 of it."""


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Around every command: a broken pipe leaves by the same way as an interrupt, and nothing stays unwritten."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            raise ReaderGone from None

    return call


def exit_code(error: SkerryError) -> int:
    """What the process ends with for an error."""
    if isinstance(error, CommandDeadline):
        return DEADLINE
    if isinstance(error, (TransferIncomplete, ForkIncomplete)):
        return FAILED
    if error.code in ("server_unreachable", "connection_lost"):
        return UNREACHABLE
    if error.code in _COMMAND_CODES:
        return _COMMAND_CODES[error.code]
    return OUTCOME_UNKNOWN if error.retry == "unknown" else ERROR


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options (what stands behind `--` belongs to the command)."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def write_json(value: Any) -> None:
    """One JSON document, on one line."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=True) + "\n")
    sys.stdout.flush()


def write_error(error: SkerryError, *, as_json: bool) -> None:
    """An error, on standard error."""
    if as_json:
        sys.stderr.write(json.dumps(as_problem(error), ensure_ascii=True) + "\n")
        return
    lines = [f"skerry: {error.message}"]
    if isinstance(error, TransferIncomplete):
        lines = [f"skerry: {path}: {cause.message}" for path, cause in error.errors]
    elif isinstance(error, ForkIncomplete):
        lines += [f"  {cause.message}" for cause in error.errors]
    elif isinstance(error, InvalidRequest):
        lines += [
            f"  {p.field}: {p.message}" + (f" (allowed: {p.allowed})" if p.allowed is not None else "")
            for p in error.problems
        ]
    sys.stderr.write("\n".join(printable(line) for line in lines) + "\n")


def note(text: str) -> None:
    """A word to the person, on standard error."""
    sys.stderr.write(f"skerry: {printable(text)}\n")


def printable(text: str) -> str:
    """Text from a guest or server without what a terminal would act on."""
    return "".join(c if c.isprintable() or c == " " else repr(c)[1:-1] for c in text)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table: fitted to a terminal, or (into a pipe) without colours and never cut."""
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=10_000, no_color=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(printable("-" if cell is None else str(cell))) for cell in row))
    console.print(table)


def write_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one a line."""
    found = [(name, value) for name, value in fields]
    width = max((len(name) for name, _ in found), default=0)
    for name, value in found:
        sys.stdout.write(f"{name:<{width}}  {printable('-' if value is None else str(value))}\n")


def write_bytes(stream: str, data: bytes) -> None:
    """Bytes of a guest's command, unchanged and at once."""
    target = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
    target.write(data)
    target.flush()


def moment(value: datetime | None) -> str | None:
    """A time for a person, local."""
    return None if value is None else value.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def left(until: datetime) -> str:
    """How long until a time."""
    seconds = max(0, int((until - datetime.now(UTC)).total_seconds()))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}h{rest // 60:02d}m" if hours else f"{rest // 60}m{rest % 60:02d}s"


def silence_stdout() -> None:
    """After a broken pipe: what is still buffered must not fail again at exit."""
    with contextlib.suppress(OSError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
