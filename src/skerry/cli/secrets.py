"""`skerry secret set | ls | rm`. A value comes from standard input or a prompt, never from the command line."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import getpass
import sys
from typing import Annotated

import typer

from skerry.cli.output import JsonOption, guarded, moment, note, write_json, write_table
from skerry.core.errors import InvalidRequest
from skerry.core.secrets import VALUE_BYTES_MAX
from skerry.sdk import Client

app = typer.Typer(help="Secrets: set, list, delete.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The secret's name.")]


@app.command("set")
@guarded
def put(
    name: Name,
    exact: Annotated[bool, typer.Option("--exact", help="Keep the line break at the end of standard input.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set a secret, or a new version of it. The value is read from standard input, or asked for on a terminal."""
    value = _value(exact=exact)
    with Client() as client:
        made = client.secrets.set(name, value)
    if as_json:
        write_json(made)
        return
    sys.stdout.write(f"{made.name}@{made.version}\n")
    note("commands that start from now on get this version")


def _value(*, exact: bool) -> str:
    if sys.stdin.isatty():
        return getpass.getpass("Value: ")
    raw = sys.stdin.buffer.read(VALUE_BYTES_MAX + 3)
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest.of("value", "is not UTF-8; encode it, as base64 for example") from None
    if exact:
        return value
    return value.removesuffix("\n").removesuffix("\r")


@app.command("ls")
@guarded
def list_secrets(as_json: JsonOption = False) -> None:
    """List the secrets: names and versions. Values are never given back."""
    with Client() as client:
        found = client.secrets.list()
    if as_json:
        write_json(found)
        return
    rows = [(s.name, str(s.version), moment(s.updated_at), moment(s.created_at)) for s in found]
    write_table(("NAME", "VERSION", "UPDATED", "CREATED"), rows)


@app.command("rm")
@guarded
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of secrets.")],
    as_json: JsonOption = False,
) -> None:
    """Delete secrets: no command gets them any more."""
    with Client() as client:
        for name in names:
            client.secrets.delete(name)
            if as_json:
                write_json({"name": name})
            else:
                sys.stdout.write(f"{name}\n")
