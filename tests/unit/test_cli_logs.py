"""The server's log: what cannot be written is lost, and nobody who logs is held up or ended by it."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from skerry.cli import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("how", ["json", "console"])
def test_a_full_disk_ends_nobody_who_logs(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails
        monkeypatch.setattr(sys, "stderr", full)
        logs.configure("info", how)  # type: ignore[arg-type]
        logged = 0
        for _ in range(3):
            structlog.get_logger("skerry").warning("a line", text="x" * 20_000)
            logging.getLogger("other").warning("another")
            logged += 1
    assert logged == 3


def test_what_can_be_written_is(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    structlog.get_logger("skerry").info("a line", number=7)
    logging.getLogger("other").warning("another")
    said = capsys.readouterr().err.splitlines()
    assert ["a line" in said[0], "another" in said[1]] == [True, True]
