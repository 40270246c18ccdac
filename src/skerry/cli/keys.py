"""`skerry key create | ls | revoke`, and `skerry e2b-env`."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import shlex
import sys
from typing import Annotated

import typer

from skerry.cli.output import JsonOption, guarded, moment, note, plain, write_json, write_table
from skerry.core.api_keys import e2b_spelling
from skerry.sdk import Client
from skerry.sdk.config import discover

SCOPES = ["sandboxes:read", "sandboxes:write", "sandboxes:use"]

app = typer.Typer(help="API keys: create, list, revoke.", no_args_is_help=True, rich_markup_mode=None)


@app.command("create")
@guarded
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="sandboxes:read, sandboxes:write, sandboxes:use, secrets:read, secrets:write, secrets:use, keys:write "
            "or admin. Repeatable; the first three by default."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print its text: this once, and never again."""
    with Client() as client:
        key = client.keys.create(name, scope or SCOPES)
    e2b_secret = e2b_spelling(key.secret or "")
    if as_json:
        write_json({**plain(key), "e2b_secret": e2b_secret})
        return
    sys.stdout.write(f"{key.secret}\n")
    if sys.stdout.isatty():  # a script wants the key, and a log neither
        sys.stdout.write(f"{e2b_secret}  (the same, for E2B's clients)\n")
    note(f"key {key.id} ({', '.join(key.scopes)}); its text is not shown again")


def e2b_env(as_json: JsonOption = False) -> None:
    """Print the environment that leads E2B's clients to this server: eval "$(skerry e2b-env)"."""
    target = discover()
    settings = {
        "E2B_API_URL": target.url,
        "E2B_SANDBOX_URL": target.url,
        "E2B_API_KEY": e2b_spelling(target.api_key),
    }
    if as_json:
        write_json(settings)
        return
    sys.stdout.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())


@app.command("ls")
@guarded
def list_keys(as_json: JsonOption = False) -> None:
    """List the keys, without their texts."""
    with Client() as client:
        keys = client.keys.list()
    if as_json:
        write_json(keys)
        return
    write_table(
        ("ID", "NAME", "PREFIX", "SCOPES", "CREATED", "LAST USED", "REVOKED"),
        [
            (
                k.id,
                k.name,
                k.prefix,
                ",".join(k.scopes),
                moment(k.created_at),
                moment(k.last_used_at),
                moment(k.revoked_at),
            )
            for k in keys
        ],
    )


@app.command("revoke")
@guarded
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key's id.")],
    as_json: JsonOption = False,
) -> None:
    """Revoke a key: from now on it opens nothing."""
    with Client() as client:
        gone = client.keys.revoke(key)
    if as_json:
        write_json(gone)
    else:
        sys.stdout.write(f"{gone.id}\n")
