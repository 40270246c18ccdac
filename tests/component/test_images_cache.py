"""The cache: an artefact is complete or absent, whatever happens to its builder. Real processes and real files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skerry.core.errors import InternalError
from skerry.images import Silent
from skerry.images.cache import Cache, default_cache_dir
from skerry.images.process import run

BUILDER = """
import sys, time
from pathlib import Path
from skerry.images import Silent
from skerry.images.cache import Cache
root = Path(sys.argv[1])
def make(work):
    with (root / "made").open("a") as log:
        log.write("x")
    (work / "half").write_text("1")
    (root / "begun").touch()
    time.sleep(float(sys.argv[2]))
    (work / "other").write_text("2")
print(Cache(root).build("thing", "k", make, progress=Silent(), step="thing"))
"""


def builder(root: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(root), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def fail(work: Path) -> None:
        (work / "half").touch()
        raise InternalError("no")

    cache = Cache(tmp_path)
    with pytest.raises(InternalError):
        cache.build("thing", "k", fail, progress=Silent(), step="thing")
    assert cache.find("thing", "k") is None
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]


def test_two_builders_make_it_once(tmp_path: Path):
    first, second = builder(tmp_path, 0.5), builder(tmp_path, 0.5)
    outputs = {process.communicate(timeout=60)[0] for process in (first, second)}
    assert outputs == {f"{tmp_path / 'thing-k'}\n"}
    assert (tmp_path / "made").read_text() == "x"
    assert sorted(path.name for path in (tmp_path / "thing-k").iterdir()) == ["half", "other"]


def test_what_a_killed_builder_left_is_never_used(tmp_path: Path):
    process = builder(tmp_path, 60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert Cache(tmp_path).find("thing", "k") is None
    assert len(list(tmp_path.glob(".building-*"))) == 1

    def make(work: Path) -> None:
        (work / "whole").touch()

    place = Cache(tmp_path).build("thing", "k", make, progress=Silent(), step="thing")
    assert [path.name for path in place.iterdir()] == ["whole"]
    assert list(tmp_path.glob(".building-*")) == []


def test_the_cache_directory_is_as_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKERRY_CACHE_DIR", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere")
    monkeypatch.delenv("SKERRY_CACHE_DIR")
    home = Path("/var/cache/skerry") if os.geteuid() == 0 else Path.home() / ".cache" / "skerry"
    assert default_cache_dir() == home


def test_a_cache_that_cannot_be_made_is_said_in_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InternalError, match="SKERRY_CACHE_DIR") as caught:
        Cache(tmp_path / "file" / "below").prepare()
    assert caught.value.code == "cache_unusable"
    assert "\n" not in caught.value.message


def test_a_tool_that_fails_is_repeated_with_its_last_words():
    with pytest.raises(InternalError, match=r"sh failed \(exit 3\): went wrong"):
        run(["sh", "-c", "echo went wrong >&2; exit 3"], timeout=20)
    lines: list[str] = []
    with pytest.raises(InternalError, match="second"):
        run(["sh", "-c", "echo first; echo second; exit 1"], timeout=20, on_line=lines.append)
    assert lines == ["first", "second"]


def test_a_tool_that_is_missing_or_hangs_is_told_apart():
    with pytest.raises(InternalError) as caught:
        run(["/no/such/tool"], timeout=20)
    assert caught.value.code == "tool_missing"
    for listener in (None, lambda _: None):
        with pytest.raises(InternalError) as caught:
            run(["sleep", "600"], timeout=0.2, on_line=listener)
        assert caught.value.code == "tool_timeout"
