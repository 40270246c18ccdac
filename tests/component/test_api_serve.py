"""`skerry serve` as a process: what it says when it cannot start, and what it leaves for clients."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.cli import client_file
from skerry.cli.serve import EXIT_CODES, introduce, keep_private, listen
from skerry.control import open_services
from skerry.core.errors import Conflict, Unavailable
from skerry.store import open_store
from support.fake_node import FakeNode

ROOT_ONLY = os.geteuid() == 0


def serve(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end: these servers cannot start."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    return subprocess.run(
        [str(Path(sys.executable).parent / "skerry"), "serve", "--data-dir", str(folder / "data"), *flags],
        env={**clean, "SKERRY_CACHE_DIR": str(folder / "cache"), "SKERRY_ACCELERATOR": "tcg", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str], code: str) -> str:
    """One line that names the code, nothing on standard output, and the exit code of the page."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("skerry: ")
    assert lines[0].endswith(f"[{code}]")
    assert done.returncode == EXIT_CODES[code]
    return lines[0]


def test_a_wrong_setting(tmp_path: Path) -> None:
    assert "port" in check(serve(tmp_path, "--port", "70000"), "invalid_settings")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    assert ROOT_ONLY, "this suite has to run as root"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in check(serve(tmp_path, "--port", port), "address_in_use")


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    check(serve(tmp_path, "--host", "192.0.2.1", "--port", "0"), "address_unusable")


def test_images_that_are_not_built(tmp_path: Path) -> None:
    check(serve(tmp_path, "--port", "0"), "images_not_built")


def test_without_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c",
            "import sys; from skerry.cli.serve import serve; from skerry.cli.settings import load_settings;"
            f" sys.exit(serve(load_settings(data_dir={str(tmp_path)!r}, port=0)))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    check(done, "needs_root")


async def test_a_database_that_is_newer_is_said_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "skerry.db"
    async with open_store(f"sqlite:///{path}"):
        pass
    with sqlite3.connect(path) as db:
        db.execute("UPDATE alembic_version SET version_num = '9999'")
    db.close()
    with pytest.raises(Exception, match="newer") as caught:
        async with open_store(f"sqlite:///{path}"):
            pass
    assert getattr(caught.value, "code", None) == "database_too_new"
    assert EXIT_CODES["database_too_new"] == 7


def test_a_database_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    assert "database_url" in check(serve(tmp_path, "--port", "0", "--database-url", "mysql://x"), "invalid_settings")
    check(serve(tmp_path, "--port", "0", "--database-url", "sqlite:///relative.db"), "invalid_settings")
    assert not (tmp_path / "relative.db").exists()
    nowhere = f"postgresql+psycopg://u:hunter2@/x?host={tmp_path}"
    assert "hunter2" not in check(serve(tmp_path, "--port", "0", "--database-url", nowhere), "database_unavailable")
    (tmp_path / "data" / "skerry.db").write_text("garbage" * 1000)
    check(serve(tmp_path, "--port", "0"), "database_error")


def test_a_flag_that_is_empty_or_unknown_is_one_line(tmp_path: Path) -> None:
    check(serve(tmp_path, "--data-dir", ""), "invalid_settings")
    assert not (tmp_path / "node-id").exists()
    unknown = serve(tmp_path, "--nope", "1")
    assert (unknown.returncode, unknown.stdout, len(unknown.stderr.splitlines())) == (2, "", 1)
    assert "--nope" in unknown.stderr


def test_listening() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(Conflict), listen("127.0.0.1", first.getsockname()[1]):
        pass
    with pytest.raises(Unavailable), listen("no such host", 0):
        pass


def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"")
    path.chmod(0o644)
    keep_private(path)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_the_client_file_keeps_a_good_key_and_replaces_a_lost_or_revoked_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "client.json"
    async with (
        open_store(f"sqlite:///{tmp_path}/skerry.db") as store,
        FakeNode() as node,
        open_services(store, node) as services,
    ):
        assert await introduce(services, path, "http://127.0.0.1:1") == ""
        assert path.stat().st_mode & 0o777 == 0o600
        first = json.loads(path.read_text())
        assert first["url"] == "http://127.0.0.1:1"
        principal = await services.keys.authenticate(first["api_key"])
        assert principal.is_admin

        assert await introduce(services, path, "http://127.0.0.1:2") == ""
        assert json.loads(path.read_text()) == {"url": "http://127.0.0.1:2", "api_key": first["api_key"]}

        path.unlink()
        assert "new one" in await introduce(services, path, "http://127.0.0.1:2")
        second = client_file.read_key(path)
        assert second not in {None, first["api_key"]}
        again = await services.keys.authenticate(second or "")
        assert again.tenant_id == principal.tenant_id

        await services.keys.revoke(principal, again.key_id)
        assert "new one" in await introduce(services, path, "http://127.0.0.1:2")
        path.write_text("{ not json")
        assert "new one" in await introduce(services, path, "http://127.0.0.1:2")
        assert [entry.name for entry in path.parent.iterdir()] == ["client.json"]
