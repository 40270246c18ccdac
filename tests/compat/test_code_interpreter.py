"""The template `code-interpreter-v1` with E2B's released code interpreter clients, by one address and by names."""

import pytest

from support.clients import Case, cases
from support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("code_interpreter")]

PYTHON = cases("code_interpreter.py", ["python-2.63"])
JAVASCRIPT = cases("code_interpreter.mjs", ["js-2.51"])


@pytest.fixture(scope="module")
def e2b_env(secure_env: tuple[Server, dict[str, str]]) -> dict[str, str]:
    """One server for both ways to it."""
    server, by_name = secure_env
    return {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": by_name["E2B_API_KEY"]}


@pytest.mark.parametrize("case", PYTHON, indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", JAVASCRIPT, indirect=True)
def test_javascript(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("secure_case", [*PYTHON[:3], *JAVASCRIPT[:3]], indirect=True)
def test_by_name(secure_case: Case) -> None:
    secure_case.run()
