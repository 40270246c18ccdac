"""`skerry serve` and what else needs the server's parts: imported late, with a word about how to get them."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from skerry.core.errors import InvalidRequest, SkerryError

if TYPE_CHECKING:
    from skerry.cli.settings import Settings
    from skerry.node.config import NodeConfig


@contextlib.contextmanager
def server_parts() -> Iterator[None]:
    """Around imports of the server. Raises InvalidRequest `server_not_installed` where only the client is there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "skerry":
            raise
        raise InvalidRequest(
            f"only the client is installed here ({error.name} is missing); get the server by: "
            "pip install 'skerry[server]'",
            code="server_not_installed",
        ) from None


def serve(context: typer.Context) -> None:
    """Run the server of this machine (`skerry serve --help` tells its options)."""
    with server_parts():
        from skerry.cli.serve import cannot_start
        from skerry.cli.serve import serve as run_server
        from skerry.cli.settings import Settings, load_settings
    flags = vars(parser(Settings).parse_args(context.args))
    try:
        settings = load_settings(**flags)
    except SkerryError as error:
        raise typer.Exit(cannot_start(error)) from None
    raise typer.Exit(run_server(settings))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything that keeps a server from starting."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser(settings: "type[Settings]") -> argparse.ArgumentParser:
    """Every setting as an option; `load_settings` judges the values."""
    made = _Parser(
        prog="skerry serve",
        description="Run the server of this machine. Options win over SKERRY_… variables, those over the file.",
        allow_abbrev=False,
    )
    for name, field in settings.model_fields.items():
        made.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar=name.upper().rsplit("_", 1)[-1],
            help=(field.description or "").replace("%", "%%"),
        )
    return made


def node_config(settings: "Settings") -> "NodeConfig":
    """What of the settings concerns the engine."""
    from skerry.node.config import NodeConfig

    shared = {f.name for f in dataclasses.fields(NodeConfig)} & set(type(settings).model_fields)
    return NodeConfig(**{name: getattr(settings, name) for name in shared})
