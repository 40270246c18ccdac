"""What all tests share: the order of files, real servers, and what they are made of.

Files run in two workers, each file in one (`bin/test`). A new file of end-to-end tests costs next to nothing: `server`,
`client` and `sandbox` lead to the one server that all of a worker's tests share. A test that needs a server of its
own, to kill it or to set it up otherwise, asks `new_server`; one that needs an engine asks `templates` to lend its data
directory the template's memory images. Booting a VM takes seconds, a clone of an image a fraction of one.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.postgres import postgres
from support.server import Server
from support.templates import SHAPES, Templates

# A shell that starts something in the background lets it ignore SIGINT, and everything that starts from there.
signal.signal(signal.SIGINT, signal.default_int_handler)

FIRST = ("/soak/", "/e2e/", "/security/", "/compat/", "/component/", "/contract/")
"""Long files first, so that no worker is left with one when the other has nothing more to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"e2e", "compat", "security"} & set(item.path.parts):
            item.add_marker(pytest.mark.vm)

    def turn(item: pytest.Item) -> tuple[bool, int]:
        place = [n for n, folder in enumerate(FIRST) if folder in str(item.path)]
        return "vm" not in item.keywords, place[0] if place else len(FIRST)

    turns: dict[Path, tuple[bool, int]] = {}
    for item in items:
        turns[item.path] = min(turn(item), turns.get(item.path, turn(item)))
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    base = tmp_path_factory.getbasetemp()
    return Templates((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "templates")


@pytest.fixture(scope="session")
def server(templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("skerry"))
    templates.lend(server.data_dir, *SHAPES)
    server.start()
    yield server
    server.finish()


@pytest.fixture(scope="session")
def client(server: Server) -> dict[str, str]:
    """Arguments that lead the SDK to the server."""
    return server.client


@pytest.fixture(scope="module")
def new_server(templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server with these settings (`SKERRY_…`). After the module's tests nothing of it may be left."""
    with contextlib.ExitStack() as servers:

        def start(**settings: str) -> Server:
            server = Server(tmp_path_factory.mktemp("server"), **settings)
            templates.lend(server.data_dir, *SHAPES)
            servers.callback(server.finish)
            return server.start()

        yield start


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL; `support.postgres.new_database` makes databases in it."""
    with postgres() as url:
        yield url
