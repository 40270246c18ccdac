"""The environments of the released clients, and the way in which tests drive them."""

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, Runners, cases


@pytest.mark.parametrize("case", cases("clients.py", PYTHON), indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("clients.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()


@pytest.mark.parametrize(("client", "file"), [(PYTHON[0], "clients.py"), (JAVASCRIPT[0], "clients.mjs")])
def test_a_case_that_fails_fails_its_test(runners: Runners, client: str, file: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="as it should"):
        runners.of(client, file).run("broken")
