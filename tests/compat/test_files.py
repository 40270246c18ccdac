"""Files, signed URLs and watches of E2B's released clients."""

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, cases


@pytest.mark.parametrize("case", [*cases("files.py", PYTHON), *cases("files_async.py", PYTHON)], indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("files.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()
