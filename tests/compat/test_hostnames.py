"""E2B's released clients under TLS, led by a domain alone: every port of every sandbox has a name of its own."""

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, cases


@pytest.mark.parametrize("secure_case", cases("hostnames.py", PYTHON), indirect=True)
def test_python(secure_case: Case) -> None:
    secure_case.run()


@pytest.mark.parametrize("secure_case", cases("hostnames_async.py", PYTHON), indirect=True)
def test_python_async(secure_case: Case) -> None:
    secure_case.run()


@pytest.mark.parametrize("secure_case", cases("hostnames.mjs", JAVASCRIPT), indirect=True)
def test_javascript(secure_case: Case) -> None:
    secure_case.run()
