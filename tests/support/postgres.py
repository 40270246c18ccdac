"""A real PostgreSQL for tests: Debian's package, a Unix socket in a temporary directory, no TCP, stopped by its pid."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "postgres"
START_S = 60.0
ROOM_BYTES = 2 << 30


def binaries() -> Path:
    """Where the newest installed server is. Raises LookupError: a missing PostgreSQL is a failure, not a skip."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    if not found:
        raise LookupError("no PostgreSQL: install Debian's package `postgresql`")
    return found[-1].parent


def _as_user() -> dict[str, object]:
    """PostgreSQL refuses to run as root: then it runs as Debian's `postgres`, else as whoever we are."""
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam(USER)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}


def _place() -> str:
    """Memory, where there is enough of it: every database is a thousand small files."""
    shared = Path("/dev/shm")
    if shared.is_dir():
        found = os.statvfs(shared)
        if found.f_bavail * found.f_frsize >= ROOM_BYTES:
            return str(shared)
    return "/tmp"


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database of a fresh server, which lives until the end of the block."""
    directory = Path(tempfile.mkdtemp(prefix="skerry-pg-", dir=_place()))
    who = _as_user()
    if who:
        os.chown(directory, int(str(who["user"])), int(str(who["group"])))
    try:
        data = directory / "data"
        subprocess.run(
            [binaries() / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            timeout=120,
            **who,
        )
        with _server(directory, data, who):
            yield f"postgresql+psycopg://{USER}@/postgres?host={directory}"
    finally:
        shutil.rmtree(directory)


@contextmanager
def _server(directory: Path, data: Path, who: dict[str, object]) -> Iterator[None]:
    log = directory / "log"
    with log.open("wb") as out:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(directory),
            "max_connections": "60",
            "shared_buffers": "16MB",
            # Nothing of it is to survive, and a disk that others use would be waited for.
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
        }
        argv = [str(binaries() / "postgres"), "-D", str(data)]
        argv += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        server = subprocess.Popen(argv, stdout=out, stderr=out, cwd=directory, **who)
    try:
        _wait(directory, server, log)
        yield
    finally:
        server.send_signal(signal.SIGINT)  # fast shutdown: PostgreSQL ends its own children
        server.wait(timeout=60)


def _wait(directory: Path, server: subprocess.Popen[bytes], log: Path) -> None:
    ready = [str(binaries() / "pg_isready"), "-q", "-h", str(directory), "-U", USER]
    deadline = time.monotonic() + START_S
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}")
        time.sleep(0.05)


def new_database(server_url: str, name: str) -> str:
    """Another empty database of the same server."""
    directory = server_url.split("host=", 1)[1]
    subprocess.run(
        [binaries() / "createdb", "-h", directory, "-U", USER, name], check=True, timeout=60, stdin=subprocess.DEVNULL
    )
    return f"postgresql+psycopg://{USER}@/{name}?host={directory}"
