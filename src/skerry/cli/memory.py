"""`skerry pause | resume | snapshot | fork | snapshots | pool | images`."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import sys
from typing import Annotated

import typer

from skerry.cli.environment import Env, SecretEnv, SecretFile, environment, pairs
from skerry.cli.output import FAILED, JsonOption, guarded, moment, note, write_error, write_json, write_table
from skerry.cli.sandboxes import Id, Metadata
from skerry.core.errors import NotFound, SkerryError
from skerry.sdk import Client, ForkIncomplete, Sandbox, SandboxInfo
from skerry.sdk.models import Image

Ids = Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Ids.")]
DiskOnly = Annotated[bool, typer.Option("--disk-only", help="Without its memory: what comes of it boots.")]

snapshots_app = typer.Typer(help="Snapshots: list, remove.", no_args_is_help=True, rich_markup_mode=None)
images_app = typer.Typer(
    help="Memory images of the server's machine: list, verify, collect.", no_args_is_help=True, rich_markup_mode=None
)


def pause(sandboxes: Ids, disk_only: DiskOnly = False, as_json: JsonOption = False) -> None:
    """Pause sandboxes: keep them on disk, and free their CPU and memory. A paused one stays as it is."""
    done: list[SandboxInfo] = []
    failed = False
    with Client() as client:
        for one in sandboxes:
            try:
                box = Sandbox.connect(one, client=client)
                if box.created.state == "paused":
                    note(f"{one} is paused already")
                done.append(box.pause(memory=not disk_only))
            except SkerryError as error:
                failed = _told(error, as_json=as_json)
            else:
                _say(one, as_json=as_json)
    _end(done, as_json=as_json, failed=failed)


def resume(
    sandboxes: Ids,
    timeout: Annotated[float | None, typer.Option(help="Seconds they live from now at least.")] = None,
    disk_only: Annotated[
        bool, typer.Option("--disk-only", help="Drop the memory that was kept, and boot from the disk.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Resume paused sandboxes. Of one that runs, only the timeout is extended."""
    done: list[SandboxInfo] = []
    failed = False
    with Client() as client:
        for one in sandboxes:
            try:
                done.append(Sandbox.resume(one, timeout=timeout, memory=not disk_only, client=client).created)
            except SkerryError as error:
                failed = _told(error, as_json=as_json)
            else:
                _say(one, as_json=as_json)
    _end(done, as_json=as_json, failed=failed)


def snapshot(
    sandbox: Id,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name to create others by.")] = None,
    disk_only: DiskOnly = False,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Keep the memory of a sandbox that was given secrets, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep the state of a sandbox and print the snapshot's id. The sandbox goes on."""
    with Sandbox.connect(sandbox) as box:
        found = box.snapshot(name, memory=not disk_only, secrets="keep" if keep_secrets else "refuse")
    if as_json:
        write_json(found)
    else:
        sys.stdout.write(found.id + "\n")


def fork(
    sandbox: Id,
    count: Annotated[int, typer.Option("--count", "-n", help="Copies, 1 to 20.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds until they are killed; the original's.")] = None,
    env: Env = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    metadata: Metadata = None,
    as_json: JsonOption = False,
) -> None:
    """Make running copies of a sandbox and print their ids. The sandbox goes on."""
    failed = False
    with Sandbox.connect(sandbox) as box:
        try:
            copies = box.fork(
                count,
                timeout=timeout,
                env=environment(env, secret_env, secret_file) or None,
                metadata=pairs("--metadata", metadata) or None,
            )
        except ForkIncomplete as incomplete:
            copies = list(incomplete.copies)
            failed = _told(incomplete, as_json=as_json)
    for copy in copies:
        _say(copy.id, as_json=as_json)
    _end([copy.created for copy in copies], as_json=as_json, failed=failed)


def _told(error: SkerryError, *, as_json: bool) -> bool:
    """One of several failed. What fails for all of them is raised."""
    if error.status in (401, 403) or error.code in ("server_unreachable", "connection_lost"):
        raise error
    write_error(error, as_json=as_json)
    return True


def _say(sandbox_id: str, *, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(sandbox_id + "\n")


def _end(done: list[SandboxInfo], *, as_json: bool, failed: bool) -> None:
    if as_json:
        write_json(done)
    if failed:
        raise typer.Exit(FAILED)


# ---------------------------------------------------------------------------------------------------------- snapshots


@snapshots_app.command("ls")
@guarded
def list_snapshots(
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List snapshots, newest first."""
    with Client() as client:
        found = client.snapshots.list(name=name, sandbox_id=sandbox)
    if as_json:
        write_json(found)
        return
    write_table(
        ("ID", "NAME", "STATE", "OF", "TEMPLATE", "KEEPS", "SIZE", "CREATED"),
        [
            (
                one.id,
                one.name,
                one.state if one.error is None else f"{one.state}: {one.error}",
                one.sandbox_id,
                one.template,
                _keeps(memory=one.memory),
                None if one.size_bytes is None else _size(one.size_bytes),
                moment(one.created_at),
            )
            for one in found
        ],
    )


@snapshots_app.command("rm")
@guarded
def remove_snapshots(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT…", help="Ids or names.")],
    as_json: JsonOption = False,
) -> None:
    """Remove snapshots. Sandboxes made of them live on."""
    removed: list[str] = []
    failed = False
    with Client() as client:
        for one in snapshots:
            try:
                if not client.snapshots.delete(one):
                    raise NotFound(f"there is no snapshot {one}", code="snapshot_not_found", snapshot=one)
            except SkerryError as error:
                failed = _told(error, as_json=as_json)
            else:
                removed.append(one)
                _say(one, as_json=as_json)
    if as_json:
        write_json({"removed": removed})
    if failed:
        raise typer.Exit(FAILED)


# ------------------------------------------------------------------------------------------------------- pool, images


def pool(as_json: JsonOption = False) -> None:
    """Show the warm clones that stand ready, and how many creates they have served."""
    with Client() as client:
        found = client.pool()
    if as_json:
        write_json(found)
        return
    write_table(
        ("TEMPLATE", "CPU", "MEMORY", "READY", "WANTED", "HITS", "MISSES", "OLDEST"),
        [
            (
                one.template,
                one.cpu,
                f"{one.memory_mb} MB",
                one.ready,
                one.wanted,
                one.hits,
                one.misses,
                _age(one.oldest_s),
            )
            for one in found
        ],
    )


@images_app.command("ls")
@guarded
def list_images(as_json: JsonOption = False) -> None:
    """List the memory images and disks that the server's machine keeps."""
    with Client() as client:
        found = client.images()
    _write_images(found, as_json=as_json)


@images_app.command("verify")
@guarded
def verify_images(as_json: JsonOption = False) -> None:
    """Read every byte of every image and compare it with what was saved. Exit code 1 if one is damaged."""
    with Client() as client:
        found = client.images(verify=True)
    _write_images(found, as_json=as_json)
    if any(image.damage is not None for image in found):
        raise typer.Exit(FAILED)


@images_app.command("collect")
@guarded
def collect_images(as_json: JsonOption = False) -> None:
    """Remove images that nothing needs, and print their ids."""
    with Client() as client:
        removed = client.collect_images()
    if as_json:
        write_json({"removed": removed})
        return
    for image_id in removed:
        sys.stdout.write(image_id + "\n")


def _write_images(found: list[Image], *, as_json: bool) -> None:
    if as_json:
        write_json(found)
        return
    write_table(
        ("ID", "KIND", "TEMPLATE", "KEEPS", "SIZE", "CREATED", "USED BY", "DAMAGE"),
        [
            (
                image.image_id,
                image.kind,
                image.template,
                _keeps(memory=image.memory),
                _size(image.size_bytes),
                image.created_at,
                " ".join(image.used_by) or "nothing",
                image.damage,
            )
            for image in found
        ],
    )


def _keeps(*, memory: bool) -> str:
    return "memory and disk" if memory else "disk"


def _size(size: int) -> str:
    return f"{size / 1_000_000:.1f} MB"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s"
