"""The program: its commands, and what becomes of an error."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

import skerry
from skerry.cli import (
    copy,
    doctor,
    domain,
    egress,
    execute,
    keys,
    memory,
    port,
    sandboxes,
    secrets,
    serving,
    shell,
    vault,
)
from skerry.cli.output import (
    BROKEN_PIPE,
    ERROR,
    INTERRUPTED,
    ReaderGone,
    exit_code,
    guarded,
    silence_stdout,
    wants_json,
    write_error,
)
from skerry.core.errors import InvalidRequest, SkerryError

app = typer.Typer(
    name="skerry",
    help="A Linux microVM for every AI agent, on your own hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(guarded(execute.run))
app.command("exec")(guarded(execute.execute))
app.command("shell")(guarded(shell.shell))
app.command("cp")(guarded(copy.copy))
app.command("create")(guarded(sandboxes.create))
app.command("ls")(guarded(sandboxes.list_sandboxes))
app.command("info")(guarded(sandboxes.info))
app.command("ps")(guarded(sandboxes.processes))
app.command("logs")(guarded(sandboxes.logs))
app.command("kill")(guarded(sandboxes.kill))
app.command("port")(guarded(port.port))
app.command("pause")(guarded(memory.pause))
app.command("resume")(guarded(memory.resume))
app.command("snapshot")(guarded(memory.snapshot))
app.command("fork")(guarded(memory.fork))
app.add_typer(memory.snapshots_app, name="snapshots")
app.command("pool")(guarded(memory.pool))
app.add_typer(memory.images_app, name="images")
app.add_typer(keys.app, name="key")
app.add_typer(secrets.app, name="secret")
app.add_typer(egress.app, name="egress")
app.command("net")(guarded(egress.traffic))
app.add_typer(vault.keys_app, name="keys")
app.add_typer(vault.tenants_app, name="tenants")
app.command("domain")(guarded(domain.domain))
app.command("e2b-env")(guarded(keys.e2b_env))
app.command("doctor")(guarded(doctor.doctor))


app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(serving.serve)


def _version(value: bool) -> None:  # noqa: FBT001 - the form of an option's callback
    if value:
        sys.stdout.write(f"skerry {skerry.__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version  # its callback has done what it is for


class Terminated(BaseException):
    """SIGTERM or SIGHUP came: leave by the same way as Ctrl-C, so that what was made is undone."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def start(arguments: Sequence[str]) -> int:
    """Run the program; the exit code."""
    as_json = wants_json(arguments)
    serving = bool(arguments) and arguments[0] == "serve"
    if not serving:  # the server has its own way with signals
        signal.signal(signal.SIGTERM, _terminate)
        signal.signal(signal.SIGHUP, _terminate)
    try:
        return int(app(args=list(arguments), prog_name="skerry", standalone_mode=False) or 0)
    except SkerryError as error:
        write_error(error, as_json=as_json)
        return exit_code(error)
    except Terminated as stopped:
        return 128 + stopped.number
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except ReaderGone:
        silence_stdout()
        return BROKEN_PIPE
    except Exception as error:
        shown = _usage(error, as_json=as_json)
        if shown is None:
            raise
        return shown


def _usage(error: Any, *, as_json: bool) -> int | None:
    """Wrong usage, as the command line's library raises it: told, and its exit code. None for another error."""
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if not callable(message) or not isinstance(code, int):
        return None
    if as_json:
        write_error(InvalidRequest(str(message()) or "wrong usage", code="usage"), as_json=True)
    else:
        error.show(file=sys.stderr)
    return code or ERROR
