"""Python packages for a template: wheels for the guest's Python, pinned by hash, unpacked and never run.

pip on the host fetches them, so that its own configuration says where packages come from; nothing is built or executed,
neither on the host nor in an emulated guest.
"""

import configparser
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

from skerry.core.errors import InternalError
from skerry.images.process import run

PYTHON: Final = "3.13"
"""The guest's: Debian trixie's."""
GLIBC_MINOR: Final = 41
DOWNLOAD_SECONDS: Final = 1200
SCRIPT: Final = """#!/usr/bin/python3
import sys

from {module} import {first}

sys.exit({call}())
"""


def install_wheels(tree: Path, lock: Path, site: str, prefix: str, scratch: Path, say: Callable[[str], None]) -> None:
    """Put what `lock` names into `site`, and its programs and data below `prefix` (both relative to `tree`).

    `scratch` is a directory to work in, removed at the end. Raises InternalError.
    """
    say(f"Python packages of {lock.name}")
    for wheel in _download(lock, scratch):
        unpack_wheel(wheel, tree / site, tree / prefix)
    shutil.rmtree(scratch)


def _download(lock: Path, scratch: Path) -> list[Path]:
    run(["/usr/bin/python3", "-m", "venv", scratch / "venv"], timeout=300)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    run(
        [
            scratch / "venv" / "bin" / "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
            "--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp",
            "--python-version", PYTHON, *(word for tag in tags for word in ("--platform", tag)),
            "--dest", scratch / "wheels", "-r", lock,
        ],
        timeout=DOWNLOAD_SECONDS,
    )  # fmt: skip
    return sorted((scratch / "wheels").glob("*.whl"))


def unpack_wheel(wheel: Path, site: Path, prefix: Path) -> None:
    """As the wheel format says: the tree into `site`, what is in `.data` to its places, programs for entry points."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = None if member.is_dir() else _target(member.filename, site, prefix)
            if target is None:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            target.chmod(0o755 if target.parent == prefix / "bin" else 0o644)
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                _programs(archive.read(name).decode(), prefix / "bin")


def _target(name: str, site: Path, prefix: Path) -> Path | None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InternalError(f"a wheel wants to write to {name}", code="package_unexpected")
    if not path.parts[0].endswith(".data"):
        return site / path
    places = {"scripts": prefix / "bin", "data": prefix, "purelib": site, "platlib": site, "headers": None}
    if len(path.parts) < 3 or path.parts[1] not in places:
        raise InternalError(f"a wheel holds {name}, which has no place", code="package_unexpected")
    place = places[path.parts[1]]
    return place.joinpath(*path.parts[2:]) if place else None


def _programs(text: str, directory: Path) -> None:
    entries = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    entries.optionxform = str  # pyright: ignore[reportAttributeAccessIssue] - names of programs keep their case
    entries.read_string(text)
    if not entries.has_section("console_scripts"):
        return
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in entries.items("console_scripts"):
        module, _, call = value.partition("[")[0].strip().partition(":")
        program = directory / name
        program.write_text(SCRIPT.format(module=module, first=call.split(".")[0], call=call), encoding="utf-8")
        program.chmod(0o755)
