"""`skerry shell`: a terminal in a sandbox."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Annotated

import typer

from skerry.cli.environment import Env, SecretEnv, SecretFile, environment
from skerry.cli.execute import LIFETIME, Cwd, User, fresh
from skerry.cli.output import JsonOption
from skerry.cli.sandboxes import Template
from skerry.core.errors import InvalidRequest, SkerryError
from skerry.sdk import ExitInfo, Pty, Sandbox

PIECE = 64 * 1024


def shell(
    sandbox: Annotated[str | None, typer.Argument(metavar="[SANDBOX]", help="Without: a new one.")] = None,
    template: Template = "base",
    env: Env = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    user: User = None,
    cwd: Cwd = None,
    command: Annotated[str | None, typer.Option("--command", "-c", help="Instead of a login shell.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave a new sandbox running.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Open a terminal in a sandbox, or in a new one that is killed at the end. The exit code is the shell's."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "a shell needs a terminal; for a pipe use: skerry exec -i SANDBOX -- sh", code="no_terminal"
        )
    if as_json:
        raise InvalidRequest.of("--json", "a terminal's output is no JSON")
    variables = environment(env, secret_env, secret_file)
    if sandbox is not None:
        if keep or template != "base":
            raise InvalidRequest.of("--keep, --template", "are for a new sandbox")
        opened = contextlib.nullcontext(Sandbox.connect(sandbox))
    else:
        opened = fresh(template, {"timeout": LIFETIME}, keep=keep)
    with opened as box:
        size = shutil.get_terminal_size()
        variables.setdefault("TERM", os.environ.get("TERM", "xterm-256color"))
        with box.pty(command, cols=size.columns, rows=size.lines, env=variables, user=user, cwd=cwd) as terminal:
            ended = attend(terminal)
    raise typer.Exit(ended.code)


def attend(terminal: Pty) -> ExitInfo:
    """This terminal is that terminal, until its process ends. Restores this one whatever happens."""
    screen = Screen(terminal)
    with raw(sys.stdin.fileno()), screen:
        screen.type_until_end()
    return screen.outcome()


@contextlib.contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """Raw mode: each key goes to the guest, Ctrl-C too."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Screen:
    """Moves bytes: a thread shows what the guest writes, the main thread types and tells of a new size."""

    def __init__(self, terminal: Pty) -> None:
        self._terminal = terminal
        self._error: SkerryError | OSError | None = None
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._show, name="screen", daemon=True)
        self._ended = threading.Event()
        self._resized = False

    def __enter__(self) -> "Screen":
        self._before = signal.signal(signal.SIGWINCH, self._on_resize)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGWINCH, self._before)
        if self._thread.is_alive():
            self._terminal.close()
        self._thread.join(5.0)
        os.close(self._woken)
        os.close(self._wake)

    def type_until_end(self) -> None:
        source = sys.stdin.fileno()
        sources = [source, self._woken]
        while not self._ended.is_set():
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, PIECE)
                if self._resized:
                    self._resized = False
                    size = shutil.get_terminal_size()
                    self._terminal.resize(size.columns, size.lines)
            if source in ready:
                data = os.read(source, PIECE)
                if not data:
                    sources.remove(source)  # this terminal hung up: the signal that says so comes too
                else:
                    self._terminal.send(data)

    def outcome(self) -> ExitInfo:
        if self._error is not None:
            raise self._error
        if self._terminal.exit is None:
            raise InvalidRequest("the terminal was closed before its process ended", code="closed")
        return self._terminal.exit

    def _on_resize(self, *_: object) -> None:
        self._resized = True
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")

    def _show(self) -> None:
        try:
            for data in self._terminal:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(sys.stdout.fileno(), rest) :]
        except (SkerryError, OSError) as error:
            self._error = error
        finally:
            self._ended.set()
            self._poke()
