"""`skerry keys rotate` and `skerry tenants erase`: the operator's, on the server's machine, beside its database."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.output import JsonOption, guarded, note, write_json
from skerry.cli.serving import server_parts
from skerry.core.errors import InvalidRequest

if TYPE_CHECKING:
    from skerry.cli.settings import Settings
    from skerry.control.vault import Rotation

keys_app = typer.Typer(help="The vault's root key: rotate.", no_args_is_help=True, rich_markup_mode=None)
tenants_app = typer.Typer(help="Tenants: erase.", no_args_is_help=True, rich_markup_mode=None)


@keys_app.command("rotate")
@guarded
def rotate(as_json: JsonOption = False) -> None:
    """Make a new root key and wrap all tenants' keys with it. The server may run meanwhile.

    Takes the settings of `skerry serve` (SKERRY_…, /etc/skerry/skerry.toml). Cut off anywhere, nothing is lost; the
    next call finishes it.
    """
    with server_parts():
        from skerry.cli.settings import load_settings
    settings = load_settings()
    done = asyncio.run(_rotate(settings))
    if as_json:
        write_json({"key_id": done.key_id, "tenants": done.tenants, "finished": done.finished})
        return
    sys.stdout.write(f"{done.key_id}\n")
    if done.finished:
        note("an earlier rotation, which had been cut off, was finished; no further key was made")
    note(f"{done.tenants} tenants' keys wrapped anew; the key in {settings.root_key_path} is a new one: copy it again")


async def _rotate(settings: "Settings") -> "Rotation":
    with server_parts():
        from skerry.cli.serve import database
        from skerry.control.vault import rotate as rotate_root
    async with database(settings) as store:
        return await rotate_root(store, settings.root_key_path)


@tenants_app.command("erase")
@guarded
def erase(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it: nothing brings the tenant's secrets back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Destroy a tenant's key, and with it all its secrets, and prove that none opens any more.

    Takes the settings of `skerry serve`. Sandboxes that run keep what they were given until they end.
    """
    if not yes:
        raise InvalidRequest.of("--yes", "is missing: what is erased cannot be brought back")
    with server_parts():
        from skerry.cli.settings import load_settings
    tenant_id, gone = asyncio.run(_erase(load_settings(), tenant))
    if as_json:
        write_json({"tenant_id": tenant_id, "secrets": gone})
        return
    sys.stdout.write(f"{tenant_id}\n")
    note(f"its key is destroyed, and {gone} sealed values with it")


async def _erase(settings: "Settings", tenant: str) -> tuple[str, int]:
    with server_parts():
        from skerry.cli.serve import database
        from skerry.control.vault import erase as erase_tenant
    async with database(settings) as store:
        return await erase_tenant(store, tenant)
