"""`skerry egress show | set | reset | narrow`: what may leave the project's sandboxes, or one of them."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import sys
import time
from typing import Annotated, Literal

import typer

from skerry.cli.output import JsonOption, guarded, moment, note, printable, write_fields, write_json, write_table
from skerry.cli.sandboxes import FOLLOW_S, Allow, Deny, Id, NoNetwork, network_options
from skerry.core.errors import InvalidRequest
from skerry.sdk import Client, NetworkEvent, NetworkInForce, ProjectEgress, Sandbox

app = typer.Typer(
    help="What may leave sandboxes: show, set, reset, narrow.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

MODES = {
    "deny": "the curated list, and the project's own rules",
    "allow": "the project's own rules alone",
    "open": "every public address that is not denied",
}

Template = Annotated[str | None, typer.Option("--template", "-t", help="Of this template's sandboxes only.")]


@app.command("show")
@guarded
def show(
    sandbox: Annotated[str | None, typer.Argument(metavar="[SANDBOX]", help="What holds for this one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what the project's sandboxes may reach and where each rule comes from, or what holds for a sandbox."""
    if sandbox is not None:
        with Sandbox.connect(sandbox) as box:
            _write_layers(box.network.get(), as_json=as_json)
        return
    with Client() as client:
        found = client.egress.get()
    if as_json:
        write_json(found)
        return
    write_fields([("project", found.project_id), ("mode", f"{found.policy.mode}: {MODES[found.policy.mode]}")])
    write_table(("", "RULE", "FOR", "SOURCE"), _rows(found))
    for line in found.notes:
        note(line)


def _rows(found: ProjectEgress) -> list[tuple[str, str, str, str]]:
    rows = [("allow", rule, "project", "egress set") for rule in found.policy.allow]
    if found.policy.mode == "deny":
        rows += [("allow", rule.rule, rule.tool, rule.source) for rule in found.curated]
    rows += [("deny", rule, "project", "egress set") for rule in found.policy.deny]
    for policy in found.templates:
        rows.append((policy.mode, "", f"template {policy.template}", "egress set"))
        rows += [("allow", rule, f"template {policy.template}", "egress set") for rule in policy.allow]
        rows += [("deny", rule, f"template {policy.template}", "egress set") for rule in policy.deny]
    return rows


@app.command("set")
@guarded
def put(
    mode: Annotated[
        Literal["deny", "allow", "open"],
        typer.Argument(metavar="MODE", help="deny: the curated list and --allow; allow: --allow alone; open: all."),
    ],
    allow: Annotated[list[str] | None, typer.Option("--allow", help="A rule. Repeatable.")] = None,
    deny: Annotated[list[str] | None, typer.Option("--deny", help="A rule. Repeatable.")] = None,
    template: Template = None,
    as_json: JsonOption = False,
) -> None:
    """Set what the project's sandboxes may reach, in place of what was set before. Connections it forbids are cut."""
    with Client() as client:
        done = client.egress.set(mode, allow=allow or (), deny=deny or (), template=template)
    if as_json:
        write_json(done)
        return
    write_fields([("mode", done.mode), ("allow", " ".join(done.allow)), ("deny", " ".join(done.deny))])
    note(f"{done.connections_cut} connections were cut")
    if done.pending:
        note(f"{done.pending} sandboxes are between two states and get it when they are through")


@app.command("reset")
@guarded
def reset(template: Template = None, as_json: JsonOption = False) -> None:
    """Back to the default: the curated list. With --template: that template narrows nothing any more."""
    with Client() as client:
        client.egress.reset(template=template)
    if as_json:
        write_json({"template": template})


@app.command("narrow")
@guarded
def narrow(
    sandbox: Id,
    allow: Allow = None,
    deny: Deny = None,
    no_network: NoNetwork = False,
    everything: Annotated[bool, typer.Option("--open", help="Whatever its project allows.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set a sandbox's own rules, in place of those it had. Connections that they forbid are cut."""
    wanted = network_options(allow, deny, nothing=no_network)
    if everything == (wanted is not None):
        raise InvalidRequest.of("SANDBOX", "give --open, --no-network, or --allow and --deny")
    with Sandbox.connect(sandbox) as box:
        done = box.network.update(True if wanted is None else wanted)
    if as_json:
        write_json(done)
        return
    write_fields([("mode", done.mode), ("allow", " ".join(done.allow)), ("deny", " ".join(done.deny))])
    note(f"{done.connections_cut} connections were cut")


def traffic(
    sandbox: Id,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was not allowed.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the sandbox is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what a sandbox looked up and connected to, and what was refused (with --json: NDJSON)."""
    with Sandbox.connect(sandbox) as box:
        seen = 0
        while True:
            over = box.info().state in ("killed", "error")
            found = list(box.network.events(refused=refused))
            for event in found[seen:]:
                if as_json:
                    write_json(event)
                else:
                    sys.stdout.write(printable(_line(event)) + "\n")
                    sys.stdout.flush()
            seen = len(found)
            if over or not follow:
                return
            time.sleep(FOLLOW_S)


def _line(event: NetworkEvent) -> str:
    host = event.name or event.address or ""
    where = (
        f"{host}:{event.port}" if event.port is not None else f"{host} {event.record or event.protocol or ''}".strip()
    )
    words = [moment(event.at) or "", event.kind, "allowed" if event.allowed else "refused", where]
    if event.kind == "connection" and event.allowed:
        to = f"to {event.address} " if event.name and event.address else ""
        words.append(f"{to}{event.sent_bytes} sent {event.received_bytes} received {event.duration_ms / 1000:.1f} s")
    words += [f"x{event.count}"] if event.count > 1 else []
    return "  ".join([*words, event.error or event.rule])


def _write_layers(found: NetworkInForce, *, as_json: bool) -> None:
    if as_json:
        write_json(found)
        return
    rows: list[tuple[str, str, str]] = []
    for layer in found.layers:
        rows += [(layer.origin, "allow", rule) for rule in layer.allow]
        rows += [(layer.origin, "deny", rule) for rule in layer.deny]
        rows.append((layer.origin, "open" if layer.mode == "open" else "deny", "everything else"))
    write_table(("LAYER", "", "RULE"), rows)
