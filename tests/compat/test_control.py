"""E2B's control API by its released clients, against a real server with real VMs."""

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, cases


@pytest.mark.parametrize("case", cases("control.py", PYTHON), indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("control_async.py", PYTHON), indirect=True)
def test_python_async(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("control.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()
