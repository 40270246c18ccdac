"""`skerry create | ls | info | ps | logs | kill`."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from skerry.cli.environment import Env, SecretEnv, SecretFile, environment, pairs
from skerry.cli.output import (
    FAILED,
    JsonOption,
    left,
    moment,
    printable,
    write_error,
    write_fields,
    write_json,
    write_table,
)
from skerry.core.errors import Gone, InvalidRequest, NotFound, SkerryError
from skerry.sdk import Client, Sandbox, SecretRef
from skerry.sdk.models import SandboxInfo
from skerry.sdk.network import Network, NetworkOptions
from skerry.sdk.sandbox import CreateOptions

FOLLOW_S = 1.0
"""Seconds between two looks of `logs -f`."""

Template = Annotated[str, typer.Option("--template", "-t", help="Template, or snapshot (id or name), to start from.")]
AutoPause = Annotated[bool, typer.Option("--auto-pause", help="At its timeout or idle time pause it, not kill it.")]
AutoPauseDiskOnly = Annotated[
    bool, typer.Option("--auto-pause-disk-only", help="As --auto-pause, without its memory: a resume boots.")
]
AutoResume = Annotated[bool, typer.Option("--auto-resume", help="The first request to it while paused resumes it.")]
Cpu = Annotated[int | None, typer.Option("--cpu", help="CPUs, 1 to 8.")]
Memory = Annotated[int | None, typer.Option("--memory", help="Memory, MB.")]
Disk = Annotated[int | None, typer.Option("--disk", help="Disk, MB.")]
Metadata = Annotated[list[str] | None, typer.Option("--metadata", "-m", help="K=V. Repeatable.")]
Allow = Annotated[
    list[str] | None, typer.Option("--allow", help="It may reach this alone, within its project's policy. Repeatable.")
]
Deny = Annotated[list[str] | None, typer.Option("--deny", help="It may not reach this. Repeatable.")]
NoNetwork = Annotated[bool, typer.Option("--no-network", help="It may reach nothing.")]
Id = Annotated[str, typer.Argument(metavar="SANDBOX", help="A sandbox's id.")]


def network_options(allow: list[str] | None, deny: list[str] | None, *, nothing: bool) -> Network | None:
    """What was said of the network; None where nothing was."""
    if nothing:
        if allow or deny:
            raise InvalidRequest.of("--no-network", "cannot be given with --allow or --deny")
        return False
    if not allow and not deny:
        return None
    network: NetworkOptions = {"deny": deny or []}
    if allow:
        network["allow"] = allow
    return network


def create_options(
    cpu: int | None,
    memory: int | None,
    disk: int | None,
    env: Mapping[str, str | SecretRef],
    metadata: dict[str, str],
    *,
    auto_pause: bool = False,
    auto_pause_disk_only: bool = False,
    auto_resume: bool = False,
    private_ports: bool = False,
    mask_host: str | None = None,
    network: Network | None = None,
) -> CreateOptions:
    """What was given, and nothing else: the rest is the server's default."""
    options: CreateOptions = {}
    if cpu is not None:
        options["cpu"] = cpu
    if memory is not None:
        options["memory_mb"] = memory
    if disk is not None:
        options["disk_mb"] = disk
    if env:
        options["env"] = env
    if metadata:
        options["metadata"] = metadata
    if auto_pause or auto_pause_disk_only:
        options["auto_pause"] = True
    if auto_pause_disk_only:
        options["auto_pause_memory"] = False
    if auto_resume:
        options["auto_resume"] = True
    if private_ports:
        options["public_ports"] = False
    if mask_host is not None:
        options["mask_request_host"] = mask_host
    if network is not None:
        options["network"] = network
    return options


def create(
    template: Template = "base",
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until it is killed, 60 to 14400.")] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(help="Seconds of disuse until it is killed; 0: never for that.")
    ] = None,
    auto_pause: AutoPause = False,
    auto_pause_disk_only: AutoPauseDiskOnly = False,
    auto_resume: AutoResume = False,
    private_ports: Annotated[
        bool, typer.Option("--private-ports", help="Its ports can be reached with its traffic token only.")
    ] = False,
    mask_host: Annotated[
        str | None, typer.Option("--mask-host", help="What its servers see as Host; ${PORT} stands for the port.")
    ] = None,
    allow: Allow = None,
    deny: Deny = None,
    no_network: NoNetwork = False,
    env: Env = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    metadata: Metadata = None,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox and print its id. It lives until its timeout, or `skerry kill`."""
    options = create_options(
        cpu,
        memory,
        disk,
        environment(env, secret_env, secret_file),
        pairs("--metadata", metadata),
        auto_pause=auto_pause,
        auto_pause_disk_only=auto_pause_disk_only,
        auto_resume=auto_resume,
        private_ports=private_ports,
        mask_host=mask_host,
        network=network_options(allow, deny, nothing=no_network),
    )
    if timeout is not None:
        options["timeout"] = timeout
    if idle_timeout is not None:
        options["idle_timeout"] = idle_timeout or None
    sandbox = Sandbox.create(template, **options)
    sandbox.close()
    if as_json:
        write_json(sandbox.created)
    else:
        sys.stdout.write(sandbox.id + "\n")


def list_sandboxes(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    state: Annotated[list[str] | None, typer.Option(help="Only of this state. Repeatable.")] = None,
    template: Annotated[str | None, typer.Option("--template", "-t", help="Only of this template.")] = None,
    metadata: Metadata = None,
    as_json: JsonOption = False,
) -> None:
    """List sandboxes, newest first."""
    if state and everything:
        raise InvalidRequest.of("--all", "cannot be given with --state")
    states = state or (None if everything else ["creating", "running", "pausing", "paused", "resuming"])
    found = list(Sandbox.list(state=states, template=template, metadata=pairs("--metadata", metadata)))
    if as_json:
        write_json(found)
        return
    write_table(
        ("ID", "STATE", "TEMPLATE", "CPU", "MEMORY", "CREATED", "ENDS", "METADATA"),
        [
            (
                box.id,
                box.state,
                box.template,
                box.cpu,
                f"{box.memory_mb} MB",
                moment(box.created_at),
                _ends(box),
                " ".join(f"{k}={v}" for k, v in box.metadata.items()),
            )
            for box in found
        ],
    )


def _ends(box: SandboxInfo) -> str | None:
    if box.state == "paused":
        return None
    return box.end_reason or (moment(box.ended_at) if box.ended_at else f"in {left(box.expires_at)}")


def info(sandbox: Id, as_json: JsonOption = False) -> None:
    """Tell all about a sandbox, with the load of its guest if it runs."""
    with Client() as client:
        box = Sandbox.connect(sandbox, client=client)
        found = box.created
        metrics = None
        if found.state == "running":
            try:
                metrics = box.metrics()
            except Gone:
                found = box.info()
    if as_json:
        write_json({**_fields(found), "metrics": metrics})
        return
    rows = [
        (name, moment(value) if name.endswith("_at") else value)
        for name, value in _fields(found).items()
        if name != "metadata"
    ]
    rows += [(f"metadata.{name}", value) for name, value in found.metadata.items()]
    if metrics is not None:
        rows += [(name, value) for name, value in _fields(metrics).items() if name != "at_ms"]
    write_fields(rows)


def _fields(value: SandboxInfo | Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


def processes(sandbox: Id, as_json: JsonOption = False) -> None:
    """List the processes that clients started in a sandbox."""
    with Sandbox.connect(sandbox) as box:
        found = box.commands.list()
    if as_json:
        write_json(found)
        return
    write_table(
        ("ID", "PID", "STATE", "USER", "TAG", "COMMAND"),
        [
            (
                p.process_id,
                p.pid,
                p.state if p.exit is None else f"exited {p.exit.code}",
                p.user,
                p.tag,
                " ".join(p.argv)[:500],
            )
            for p in found
        ],
    )


def logs(
    sandbox: Id,
    console: Annotated[bool, typer.Option("--console", help="The end of the serial console instead.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the sandbox is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what was done to a sandbox (with --json: NDJSON, one event a line)."""
    if console and follow:
        raise InvalidRequest.of("--follow", "cannot be given with --console")
    with Sandbox.connect(sandbox) as box:
        if console:
            text = box.console()
            if as_json:
                write_json({"console": text})
            else:
                sys.stdout.write("".join(line + "\n" for line in map(printable, text.splitlines())))
            return
        seen = 0
        while True:
            over = box.info().state in ("killed", "error")
            events = list(box.logs())
            for event in events[seen:]:
                _write_event(event, as_json=as_json)
            seen = len(events)
            if over or not follow:
                return
            time.sleep(FOLLOW_S)


def _write_event(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(event)
        return
    detail = " ".join(f"{k}={v}" for k, v in (event.get("detail") or {}).items())
    words = (event.get("at"), event.get("action"), event.get("outcome"), event.get("actor") or "-", detail)
    sys.stdout.write(printable("  ".join(str(w) for w in words if w)) + "\n")
    sys.stdout.flush()


def kill(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX…", help="Ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that live.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Kill sandboxes. One that is over already is no error."""
    if bool(sandboxes) == everything:
        raise InvalidRequest.of("SANDBOX", "give ids, or --all")
    failed = False
    ended: list[SandboxInfo] = []
    with Client() as client:
        ids = sandboxes or [
            box.id
            for box in Sandbox.list(state=["creating", "running", "pausing", "paused", "resuming"], client=client)
        ]
        for one in ids:
            try:
                ended.append(Sandbox.connect(one, client=client).kill())
            except NotFound as error:
                failed = True
                write_error(error, as_json=as_json)
            except SkerryError as error:
                if error.status in (401, 503):
                    raise
                failed = True
                write_error(error, as_json=as_json)
            else:
                if not as_json:
                    sys.stdout.write(one + "\n")
    if as_json:
        write_json(ended)
    if failed:
        raise typer.Exit(FAILED)
