"""bin/lib.sh, run by bash: what it refuses and where it puts things. Fakes stand before it in PATH only to lie."""

import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "bin" / "lib.sh"


def bash(text: str, *, path: Path | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
    script = f"set -euo pipefail; source {LIB}; {text}"
    search = f"{path}:/usr/sbin:/usr/bin:/sbin:/bin" if path else "/usr/sbin:/usr/bin:/sbin:/bin"
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env={"PATH": search, "HOME": "/h", **env}
    )


def tool(directory: Path, name: str, text: str) -> Path:
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)
    return directory


def test_this_machine_is_accepted():
    assert bash("sk_host; echo yes").stdout == "yes\n"


def test_another_architecture_is_refused_in_one_line(tmp_path: Path):
    done = bash("sk_host; echo yes", path=tool(tmp_path, "dpkg", "echo arm64"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "skerry: an amd64 machine is needed; this is arm64\n"


def test_only_missing_packages_are_named(tmp_path: Path):
    assert bash("sk_missing bash dpkg no-such-package").stdout == "no-such-package\n"
    log = tmp_path / "log"
    fakes = tool(tmp_path, "apt-get", f'echo "$@" >> {log}')
    assert bash("sk_packages bash dpkg", path=fakes).returncode == 0
    assert not log.exists()


def test_lists_are_fetched_when_a_package_is_not_in_them_and_one_call_installs(tmp_path: Path):
    log = tmp_path / "log"
    fakes = tool(tool(tmp_path, "apt-get", f'echo "$@" >> {log}'), "apt-cache", "exit 100")
    assert bash("sk_packages bash no-such-package another-missing", path=fakes).returncode == 0
    update, install = log.read_text().splitlines()
    assert update == "-q update"
    assert install.endswith("install --no-install-recommends another-missing no-such-package")


def test_packages_that_cannot_be_had_end_it_with_their_names(tmp_path: Path):
    fakes = tool(tmp_path, "apt-get", '[ "$2" = update ]')
    done = bash("sk_packages no-such-package", path=fakes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "skerry: these packages could not be installed: no-such-package"


@pytest.mark.parametrize(("env", "place"), [({"SKERRY_CACHE_DIR": "/c"}, "/c"), ({}, None)])
def test_the_cache_directory_is_the_codes_own(env: dict[str, str], place: str | None):
    import os

    default = "/var/cache/skerry" if os.geteuid() == 0 else "/h/.cache/skerry"
    assert bash("sk_cache_dir", **env).stdout == f"{place or default}\n"


def test_indexes_that_are_directories_which_do_not_exist_are_left_out(tmp_path: Path):
    words = f"https://a.example/simple file:///no/such/dir file://{tmp_path} /no/such {tmp_path}"
    assert bash(f"sk_existing '{words}'").stdout == f"https://a.example/simple file://{tmp_path} {tmp_path}"
