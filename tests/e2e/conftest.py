"""A sandbox for the end-to-end tests of each module; its server is in tests/conftest.py."""

from collections.abc import Iterator

import pytest

from skerry import Sandbox


@pytest.fixture(scope="module")
def sandbox(client: dict[str, str]) -> Iterator[Sandbox]:
    """A sandbox that the tests of one module share: what they do in it must not get in each other's way."""
    with Sandbox.create("base", timeout=3600, idle_timeout=None, **client) as sandbox:
        yield sandbox
