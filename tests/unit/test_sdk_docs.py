"""Everything public is told in the reference, and both clients have the same methods."""

import inspect
import re
from pathlib import Path

import pytest

import skerry
from skerry import sdk
from skerry.sdk import blocking, client, commands, files, network, process, pty, sandbox

SDK = (Path(__file__).resolve().parents[2] / "docs/reference/sdk.md").read_text()
TWINS = [
    (blocking.Sandbox, sandbox.AsyncSandbox),
    (blocking.Commands, commands.AsyncCommands),
    (blocking.Process, process.AsyncProcess),
    (blocking.Files, files.AsyncFiles),
    (blocking.Pty, pty.AsyncPty),
    (blocking.Keys, client.AsyncKeys),
    (blocking.Egress, client.AsyncEgress),
    (blocking.Network, network.AsyncNetwork),
    (blocking.Client, client.AsyncClient),
]
RENAMED = {"aclose": "close"}
INTERNAL = {"open", "over", "connection"}
"""`AsyncPty.open` and `AsyncClient.over` make the objects."""


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} - INTERNAL


@pytest.mark.parametrize(("plain", "twin"), TWINS)
def test_both_clients_have_the_same_methods(plain: type, twin: type) -> None:
    assert {RENAMED.get(name, name) for name in public(twin)} - public(plain) == set()


@pytest.mark.parametrize("kind", [plain for plain, _ in TWINS])
def test_every_method_is_documented(kind: type) -> None:
    missing = [name for name in public(kind) if not re.search(rf"[`.]{name}\b|\b{name}\(", SDK)]
    assert missing == []


@pytest.mark.parametrize(("plain", "twin"), TWINS)
def test_every_parameter_is_documented(plain: type, twin: type) -> None:
    for name in public(twin):
        method = inspect.getattr_static(twin, name)
        function = inspect.unwrap(getattr(method, "__func__", method))
        if not inspect.isfunction(function):
            continue
        for parameter in inspect.signature(function).parameters:
            if parameter not in {"self", "cls", "options"}:
                assert re.search(rf"\b{parameter}\b", SDK), f"{twin.__name__}.{name}({parameter})"


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    for name in skerry.__all__:
        assert getattr(skerry, name) is not None
        if name != "__version__":
            assert name.removeprefix("Async") in SDK, name
    for name in sdk.__all__:
        assert getattr(sdk, name) is not None


def test_methods_of_the_blocking_client_have_signatures_and_words() -> None:
    assert "on_stdout" in inspect.signature(blocking.Commands.run).parameters
    assert "non-zero exit code" in (blocking.Commands.run.__doc__ or "")
    assert not inspect.iscoroutinefunction(blocking.Commands.run)


def test_importing_the_package_loads_nothing_of_the_client() -> None:
    import subprocess
    import sys

    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, skerry; print([m for m in sys.modules if m.startswith(('skerry', 'httpx'))])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "['skerry']\n"


def test_the_client_needs_nothing_of_the_server() -> None:
    import subprocess
    import sys

    script = (
        "import sys, skerry, skerry.cli.app; skerry.Sandbox; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "{'fastapi', 'pydantic', 'sqlalchemy', 'uvicorn', 'structlog', 'pyroute2'} or m.startswith(('skerry.api', "
        "'skerry.control', 'skerry.node', 'skerry.store', 'skerry.images', 'skerry.guest'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        skerry.Nothing  # noqa: B018
    assert "Sandbox" in dir(skerry)
