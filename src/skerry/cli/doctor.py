"""`skerry doctor`: what this machine can do as a server, what is missing, and how to get it."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import asyncio
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from skerry.cli.output import FAILED, JsonOption, printable, write_json
from skerry.cli.serving import node_config, server_parts

if TYPE_CHECKING:
    from skerry.node.doctor import Check

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: JsonOption = False) -> None:
    """Examine this machine. Exit code 1 if anything that is needed is missing."""
    checks = examine()
    if as_json:
        write_json([{"name": c.name, "status": c.level, "detail": c.detail, "remedy": c.remedy} for c in checks])
    else:
        _write(checks)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(FAILED)


def examine() -> "list[Check]":
    """The checks of the engine. Raises InvalidRequest where only the client is installed."""
    with server_parts():
        from skerry.cli.settings import load_settings
        from skerry.node.doctor import examine as look
    return asyncio.run(look(node_config(load_settings())))


def _write(checks: "list[Check]") -> None:
    console = Console(no_color=not sys.stdout.isatty(), highlight=False, soft_wrap=True)
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        line = Text(f"{check.level:<4}", style=COLOURS.get(check.level, ""))
        line.append(f"  {check.name:<{width}}  {printable(str(check.detail))}", style="default")
        console.print(line)
        if check.remedy and check.level != "ok":
            console.print(Text(f"{'':<{width + 8}}{printable(str(check.remedy))}"))
