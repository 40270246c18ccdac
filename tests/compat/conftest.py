"""Released clients of others, led to a server of ours: by its one address, or under TLS by names of its domain."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry import Sandbox
from support.clients import Case, Runners, by_address, e2b_key
from support.names import Names
from support.server import Server, free_port

DOMAIN = "boxes.test"


@pytest.fixture(scope="session")
def e2b_env(server: Server) -> dict[str, str]:
    return by_address(server)


@pytest.fixture(scope="module")
def runners(e2b_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    with Runners(e2b_env, tmp_path_factory.mktemp("clients")) as running:
        yield running


@pytest.fixture
def case(runners: Runners, request: pytest.FixtureRequest) -> Case:
    return Case(runners, request.param)


@pytest.fixture(scope="module")
def secure_env(
    new_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Server, dict[str, str]]:
    """A server with a certificate that `skerry domain` made, and what leads an E2B client to it: a domain, no URL."""
    port, folder = free_port(), tmp_path_factory.mktemp("tls")
    skerry = str(Path(sys.executable).parent / "skerry")
    make = [skerry, "domain", DOMAIN, "--out", str(folder), "--port", str(port), "--json"]
    said = json.loads(subprocess.run(make, capture_output=True, timeout=60, check=True).stdout)
    server = new_server(
        SKERRY_DOMAIN=said["address"],
        SKERRY_TLS_CERT=said["cert"],
        SKERRY_TLS_KEY=said["key"],
        SKERRY_TLS_PORT=str(port),
    )
    trust = {"SSL_CERT_FILE": said["ca"], "NODE_EXTRA_CA_CERTS": said["ca"]}
    return server, trust | {"E2B_DOMAIN": said["address"], "E2B_API_KEY": e2b_key(server)}


@pytest.fixture(scope="module")
def code_interpreter(secure_env: tuple[Server, dict[str, str]]) -> None:
    """The template's memory image is made when its first sandbox is: longer than a case may take, on a busy machine."""
    Sandbox.create("code-interpreter-v1", **secure_env[0].client).kill()


@pytest.fixture(scope="module")
def secure_runners(
    secure_env: tuple[Server, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runners]:
    logs = tmp_path_factory.mktemp("clients")
    with Names(DOMAIN, logs / "names") as names, Runners(secure_env[1], logs, names) as running:
        yield running


@pytest.fixture
def secure_case(secure_runners: Runners, request: pytest.FixtureRequest) -> Case:
    return Case(secure_runners, request.param)
