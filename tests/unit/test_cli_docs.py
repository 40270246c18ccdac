"""Every command, option and exit code is told in the reference."""

import re
from pathlib import Path
from typing import Any

import typer.main

from skerry.cli import output
from skerry.cli.app import app

CLI = (Path(__file__).resolve().parents[2] / "docs/reference/cli.md").read_text()
COMMON = {"--help", "--json", "--version"}


def commands(group: Any, prefix: str = "skerry") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix} {name}")
        else:
            found[f"{prefix} {name}"] = command
    return found


def test_every_command_is_documented_and_every_documented_one_exists() -> None:
    subcommands = "create|ls|revoke|rm|verify|collect|set|rotate|erase|show|reset|narrow"
    documented = {
        m.split(" SANDBOX")[0] for m in re.findall(rf"^\| `(skerry [a-z0-9-]+(?: (?:{subcommands}))?)", CLI, re.M)
    }
    assert documented == set(commands(typer.main.get_command(app)))


def test_every_command_says_what_it_does_and_takes_json() -> None:
    for name, command in commands(typer.main.get_command(app)).items():
        assert command.help, name
        if name != "skerry serve":
            assert "--json" in {o for p in command.params for o in p.opts}, name


def test_every_exit_code_is_documented() -> None:
    for name in (
        "FAILED",
        "USAGE",
        "OUTCOME_UNKNOWN",
        "UNREACHABLE",
        "DEADLINE",
        "ERROR",
        "NOT_EXECUTABLE",
        "NOT_FOUND",
        "INTERRUPTED",
        "BROKEN_PIPE",
    ):
        assert re.search(rf"^\| (?:[\d, ]*, )?{getattr(output, name)}\b", CLI, re.M), name
