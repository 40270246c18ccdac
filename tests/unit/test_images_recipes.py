"""What recipes say, and how wheels become files."""

import dataclasses
import json
import stat
import zipfile
from pathlib import Path

import pytest

from skerry.core.errors import InternalError, NotFound
from skerry.images import TEMPLATES, recipe
from skerry.images.recipe import load_recipe
from skerry.images.wheels import unpack_wheel


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_recipe_can_be_read_and_names_files_that_are_there(name: str):
    read = load_recipe(name)
    assert read.packages == tuple(sorted(set(read.packages)))
    assert read.disks_mb
    assert f"files/{name}.json" in "\n".join(read.inputs())


def test_a_recipe_that_extends_another_has_all_of_its_packages():
    base, interpreter = load_recipe("base"), load_recipe("code-interpreter-v1")
    assert set(base.packages) <= set(interpreter.packages)
    assert interpreter.env == base.env
    assert base.start is None and base.memory_mb is None
    assert interpreter.start is not None and interpreter.start.ready is not None


def test_an_unknown_recipe_says_which_there_are():
    with pytest.raises(NotFound, match="there is: base, code-interpreter-v1") as caught:
        load_recipe("nope")
    assert caught.value.code == "template_not_found"


def test_a_template_is_another_when_our_code_in_it_is(tmp_path: Path):
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "code.pyc").write_text("")
    source = recipe.Source(recipe.SKERRY / "interpreter", "opt")
    assert all("__pycache__" not in path.parts for path in source.files())
    assert recipe.Source(tmp_path, "opt").files() == [tmp_path / "code.py"]
    names = load_recipe("code-interpreter-v1").inputs()
    assert "interpreter/server.py" in names
    assert "interpreter/server.py" not in load_recipe("base").inputs()


def test_locks_name_no_address_and_pin_every_package():
    for name in TEMPLATES:
        for wheels in load_recipe(name).wheels:
            text = wheels.lock.read_text()
            assert "://" not in text
            packages = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
            assert packages and all("==" in line and line.endswith("\\") for line in packages)


# -------------------------------------------------------------------------------------------------------------- wheels


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheels_parts_go_to_their_places(tmp_path: Path):
    made = wheel(
        tmp_path / "w.whl",
        {
            "pkg/__init__.py": "x = 1",
            "pkg-1.data/": "",
            "pkg-1.data/scripts/tool": "binary",
            "pkg-1.data/data/share/doc": "doc",
            "pkg-1.data/purelib/more.py": "y = 2",
            "pkg-1.data/headers/h.h": "",
            "pkg-1.dist-info/entry_points.txt": "[console_scripts]\nrun-it = pkg.cli:App.main [extra]\n[o]\na = b\n",
        },
    )
    site, prefix = tmp_path / "site", tmp_path / "prefix"
    unpack_wheel(made, site, prefix)
    files = {str(p.relative_to(tmp_path)) for p in (*site.rglob("*"), *prefix.rglob("*")) if p.is_file()}
    assert files == {
        "site/pkg/__init__.py", "site/more.py", "site/pkg-1.dist-info/entry_points.txt",
        "prefix/bin/tool", "prefix/bin/run-it", "prefix/share/doc",
    }  # fmt: skip
    program = prefix / "bin" / "run-it"
    assert program.read_text().startswith("#!/usr/bin/python3\n")
    assert "from pkg.cli import App\n\nsys.exit(App.main())" in program.read_text()
    assert stat.S_IMODE(program.stat().st_mode) == stat.S_IMODE((prefix / "bin" / "tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((site / "more.py").stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../b", "p-1.data/strange/x"])
def test_a_wheel_that_writes_elsewhere_is_refused(tmp_path: Path, name: str):
    made = wheel(tmp_path / "w.whl", {name: ""})
    with pytest.raises(InternalError):
        unpack_wheel(made, tmp_path / "site", tmp_path / "prefix")


def test_a_start_survives_the_manifest():
    start = load_recipe("code-interpreter-v1").start
    assert start is not None
    assert type(start)(**json.loads(json.dumps(dataclasses.asdict(start)))) == start
