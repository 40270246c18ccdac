"""Which client this is: the environments hold what they say."""

import os
from importlib.metadata import version


def test_the_released_client_is_the_one_that_was_asked_for():
    assert version("e2b").startswith(os.environ["SKERRY_COMPAT_CLIENT"].removeprefix("python-") + ".")


def broken():
    """No case: what the tests of the runner itself run."""
    raise ValueError("as it should")
