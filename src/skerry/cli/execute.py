"""`skerry run` and `skerry exec`: a command in a sandbox, as if it ran here.

Bytes pass through unchanged, the exit code passes through, standard input is taken only with `-i`.
"""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import base64
import contextlib
import os
import select
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import typer

from skerry.cli.environment import Env, SecretEnv, SecretFile, environment, pairs
from skerry.cli.output import DEADLINE, JsonOption, note, write_bytes, write_json
from skerry.cli.sandboxes import (
    Allow,
    AutoPause,
    AutoPauseDiskOnly,
    AutoResume,
    Cpu,
    Deny,
    Disk,
    Id,
    Memory,
    Metadata,
    NoNetwork,
    Template,
    create_options,
    network_options,
)
from skerry.core.errors import InvalidRequest, OutcomeUnknown, SkerryError, Unavailable
from skerry.core.limits import TIMEOUT_MS_MAX, TIMEOUT_MS_MIN
from skerry.sdk import Exited, ExitInfo, Gap, Output, Process, ProcessEvent, Sandbox, SecretRef, Started
from skerry.sdk.sandbox import CreateOptions

LIFETIME = 3600.0
"""Seconds that a sandbox of `skerry run` lives at most, unless told otherwise."""
SPARE = 60.0
"""Seconds that such a sandbox outlives its command's deadline."""
PIECE = 64 * 1024
PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between the attempts to reach a server whose line broke."""

CommandLine = Annotated[list[str], typer.Argument(metavar="COMMAND", help="A program and its arguments.")]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="Pass standard input on.")]
Deadline = Annotated[float | None, typer.Option("--timeout", help="The command's deadline, seconds. None by default.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="User in the sandbox.")]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", help="Working directory in the sandbox.")]


class How(TypedDict):
    """How a command is to run; None is the default of the sandbox."""

    env: dict[str, str | SecretRef]
    timeout: float | None
    user: str | None
    cwd: str | None


def run(
    command: CommandLine,
    template: Template = "base",
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    auto_pause: AutoPause = False,
    auto_pause_disk_only: AutoPauseDiskOnly = False,
    auto_resume: AutoResume = False,
    allow: Allow = None,
    deny: Deny = None,
    no_network: NoNetwork = False,
    env: Env = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    metadata: Metadata = None,
    timeout: Deadline = None,
    lifetime: Annotated[float | None, typer.Option(help="Seconds the sandbox lives at most; 3600.")] = None,
    user: User = None,
    cwd: Cwd = None,
    interactive: Interactive = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running and print its id.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox, run a command in it, kill it. The exit code is the command's."""
    options = create_options(
        cpu,
        memory,
        disk,
        environment(env, secret_env, secret_file),
        pairs("--metadata", metadata),
        auto_pause=auto_pause,
        auto_pause_disk_only=auto_pause_disk_only,
        auto_resume=auto_resume,
        network=network_options(allow, deny, nothing=no_network),
    )
    options["timeout"] = lifetime if lifetime is not None else _lifetime(timeout)
    with fresh(template, options, keep=keep) as sandbox:
        how: How = {"env": {}, "timeout": timeout, "user": user, "cwd": cwd}
        code = carry_out(sandbox, command, how, interactive=interactive, as_json=as_json)
    raise typer.Exit(code)


def execute(
    sandbox: Id,
    command: CommandLine,
    env: Env = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    timeout: Deadline = None,
    user: User = None,
    cwd: Cwd = None,
    interactive: Interactive = False,
    as_json: JsonOption = False,
) -> None:
    """Run a command in a sandbox that there is. The exit code is the command's. Ctrl-C kills the command."""
    variables = environment(env, secret_env, secret_file)
    how: How = {"env": variables, "timeout": timeout, "user": user, "cwd": cwd}
    with Sandbox.connect(sandbox) as box:
        code = carry_out(box, command, how, interactive=interactive, as_json=as_json)
    raise typer.Exit(code)


def _lifetime(timeout: float | None) -> float:
    if not timeout:
        return LIFETIME
    return min(max(timeout + SPARE, TIMEOUT_MS_MIN / 1000), TIMEOUT_MS_MAX / 1000)


@contextlib.contextmanager
def fresh(template: str, options: CreateOptions, *, keep: bool) -> Iterator[Sandbox]:
    """A new sandbox that is killed at the end, also when it was interrupted while it was being made."""
    key = uuid.uuid4().hex
    try:
        sandbox = Sandbox.create(template, idempotency_key=key, **options)
    except SkerryError:
        raise
    except BaseException:
        # It may be made already: the same key gives the same one, so that it can be killed.
        with contextlib.suppress(SkerryError), Sandbox.create(template, idempotency_key=key, **options):
            pass
        raise
    if not keep:
        with sandbox:
            yield sandbox
        return
    note(f"sandbox {sandbox.id} is kept")
    with contextlib.closing(sandbox):
        yield sandbox


def carry_out(sandbox: Sandbox, command: list[str], how: How, *, interactive: bool, as_json: bool) -> int:
    """Run a command, its output to here; the exit code."""
    if not command:
        raise InvalidRequest.of("COMMAND", "is missing")
    running = Running(sandbox, command, how)
    with contextlib.ExitStack() as stack:
        stack.push(running.abandon)
        events = running.events(interactive=interactive)
        if interactive:
            stack.enter_context(running.feeding())
        for event in events:
            show(event, as_json=as_json)
            if isinstance(event, Exited):
                return _code(event.exit, how["timeout"])
    raise OutcomeUnknown("the line broke before the command's exit", sandbox_id=sandbox.id)


def _code(ended: ExitInfo, timeout: float | None) -> int:
    if ended.reason == "deadline":
        note(f"the command reached its deadline of {timeout:g} s and was stopped" if timeout else "deadline reached")
        return DEADLINE
    if ended.reason == "killed":
        note("the command was killed by a client")
    return ended.code


def show(event: ProcessEvent, *, as_json: bool) -> None:
    """An event of a command: as its bytes, or as a line of JSON."""
    if as_json:
        shown = _as_json(event)
        if shown is not None:
            write_json(shown)
    elif isinstance(event, Output):
        write_bytes(event.stream, event.data)
    elif isinstance(event, Gap):
        note(f"{event.missed} bytes of {event.stream} are lost")


def _as_json(event: ProcessEvent) -> dict[str, Any] | None:
    if isinstance(event, Started):
        return {"type": "started", "process_id": event.process_id, "pid": event.pid}
    if isinstance(event, Gap):
        return {"type": "gap", "stream": event.stream, "offset": event.offset, "missed": event.missed}
    if isinstance(event, Output):
        if not event.data and not event.text:
            return None
        data = base64.b64encode(event.data).decode("ascii")
        return {"type": event.stream, "offset": event.offset, "text": event.text, "data": data}
    ended = event.exit
    return {
        "type": "exit",
        "reason": ended.reason,
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "duration_ms": ended.duration_ms,
    }


class Running:
    """A command on its way. Left by Ctrl-C or a broken pipe, it is killed."""

    def __init__(self, sandbox: Sandbox, command: list[str], how: How) -> None:
        self._sandbox = sandbox
        self._command = command
        self._how = how
        self._process: Process | None = None
        self._id: str | None = None
        self._over = False

    def events(self, *, interactive: bool) -> Iterator[ProcessEvent]:
        """Its events; a line that breaks is taken up again where it broke."""
        if interactive:
            self._process = self._sandbox.commands.start(self._command, stdin=True, **self._how)
            self._id = self._process.process_id
            return self._interactive(self._process)
        return self._plain()

    def _interactive(self, process: Process) -> Iterator[ProcessEvent]:
        yield Started(process.process_id, process.pid)
        for event in process:
            self._over = isinstance(event, Exited)
            yield event

    def _plain(self) -> Iterator[ProcessEvent]:
        try:
            with self._sandbox.commands.stream(self._command, **self._how) as events:
                for event in events:
                    if isinstance(event, Started):
                        self._id = event.process_id
                    self._over = isinstance(event, Exited)
                    yield event
        except OutcomeUnknown as broken:
            if self._id is None:
                raise
            for event in self._taken_up(self._id, broken):
                self._over = isinstance(event, Exited)
                yield event

    def _taken_up(self, process_id: str, broken: OutcomeUnknown) -> Process:
        """The command again, from where its line broke; a server that restarts is waited for."""
        at = {name: broken.context[name] for name in ("stdout_offset", "stderr_offset")}
        for wait in PATIENCE:
            try:
                return self._sandbox.commands.attach(process_id, **at)
            except Unavailable:
                time.sleep(wait)
        try:
            return self._sandbox.commands.attach(process_id, **at)
        except Unavailable as gone:
            raise broken from gone

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Pass standard input on, in a thread that ends with the block although its source stays open."""
        process = self._process
        if process is None:
            raise InvalidRequest("only an interactive command has an input")
        stop, wake = os.pipe()
        thread = threading.Thread(target=_pump, args=(process, stop), name="stdin", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(wake)
            # A piece that is on its way to a full pipe ends with the process; the thread is a daemon in any case.
            thread.join(1.0)
            if not thread.is_alive():
                os.close(stop)

    def abandon(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Kill the command if it is left before its end by something other than an error of the line."""
        if error is None or self._over or isinstance(error, SkerryError) or self._id is None:
            return
        with contextlib.suppress(SkerryError):
            self._sandbox.commands.kill(self._id)


def _pump(process: Process, stop: int) -> None:
    """Standard input to the process, until either ends."""
    source = sys.stdin.fileno()
    with contextlib.suppress(SkerryError, OSError):  # the process is over, or reads no more: its exit tells
        while True:
            ready, _, _ = select.select([source, stop], [], [])
            if stop in ready:
                return
            data = os.read(source, PIECE)
            if not data:
                process.close_stdin()
                return
            process.send_stdin(data)
