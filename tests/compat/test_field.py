"""The field's forty cases as far as E2B's clients can show them (docs/CASES.md), by the released clients."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.clients import JAVASCRIPT, PYTHON, Case, Runners, by_address, cases
from support.server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", cases("field.py", PYTHON), indirect=True)
def test_python(case: Case) -> None:
    case.run()


@pytest.mark.parametrize("case", cases("field.mjs", JAVASCRIPT), indirect=True)
def test_javascript(case: Case) -> None:
    case.run()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"SKERRY_MAX_SANDBOXES": "1"}, "test_too_many_is_a_rate_limit"),
        ({"SKERRY_DISK_FLOOR_MB": "1000000000"}, "test_no_room_is_a_busy_service"),
    ],
)
@pytest.mark.parametrize("client", PYTHON)
def test_a_full_server(
    new_server: Callable[..., Server], tmp_path: Path, settings: dict[str, str], name: str, client: str
) -> None:
    server = new_server(SKERRY_POOL_FLOOR="0", SKERRY_POOL_CEILING="0", **settings)
    with Runners(by_address(server), tmp_path) as runners:
        runners.of(client, "limits.py").run(name)
