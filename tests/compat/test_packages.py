"""Released packages that sit on E2B's SDK, as they are: what they do for their own users, without a language model."""

import pytest

from support.clients import Case, cases

pytestmark = pytest.mark.slow


def of(package: str) -> list[object]:
    """The cases of a package, in an environment of its own."""
    return cases(f"on_{package.replace('-', '_')}.py", [f"on-{package}"])


@pytest.mark.parametrize("case", of("langchain-e2b"), indirect=True)
def test_langchain(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", of("openai-agents"), indirect=True)
def test_openai_agents(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", of("e2b-haystack"), indirect=True)
def test_haystack(case: Case) -> None:
    case.run()


@pytest.mark.usefixtures("code_interpreter")
@pytest.mark.parametrize("secure_case", of("e2b-adk"), indirect=True)
def test_google_adk(secure_case: Case) -> None:
    secure_case.run()


@pytest.mark.usefixtures("code_interpreter")
@pytest.mark.parametrize("secure_case", of("e2b-mcp-server"), indirect=True)
def test_mcp_server(secure_case: Case) -> None:
    secure_case.run()
