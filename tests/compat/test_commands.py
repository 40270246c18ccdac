"""Commands and terminals of E2B's released clients."""

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, cases


@pytest.mark.parametrize("case", [*cases("commands.py", PYTHON), *cases("commands_async.py", PYTHON)], indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("commands.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()
