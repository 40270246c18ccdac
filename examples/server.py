"""Start `skerry serve` in the background unless a server answers already, or stop the one that was started here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from skerry.cli.settings import load_settings
from skerry.core.errors import SkerryError

START_DEADLINE_S = 60.0


def client_file() -> Path:
    """Where the server leaves its address and key: as it decides it itself, from the same settings."""
    return load_settings().client_path


def pid_file() -> Path:
    return client_file().with_name("demo-server.pid")


def log_file() -> Path:
    return client_file().with_name("demo-server.log")


def answers() -> str | None:
    """The address of a server that runs on this machine, if one does."""
    try:
        url = json.loads(client_file().read_text())["url"]
        return url if httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK else None
    except (OSError, ValueError, KeyError, httpx.HTTPError):
        return None


def start() -> int:
    if url := answers():
        print(f"a server answers at {url}")
        return 0
    log_file().parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with log_file().open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "skerry"), "serve"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    pid_file().write_text(f"{process.pid}\n")
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if url := answers():
            print(f"started a server at {url} (process {process.pid}, log {log_file()})")
            return 0
        if process.poll() is not None:
            break
        time.sleep(0.05)
    print("the server did not start; the end of its log:", file=sys.stderr)
    print("\n".join(log_file().read_text(errors="replace").splitlines()[-5:]), file=sys.stderr)
    pid_file().unlink(missing_ok=True)
    return 1


def stop() -> int:
    try:
        pid = int(pid_file().read_text())
        if b"serve" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            raise ProcessLookupError
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        print("no server that bin/demo started is running")
        pid_file().unlink(missing_ok=True)
        return 0
    deadline = time.monotonic() + START_DEADLINE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid_file().unlink(missing_ok=True)
    print(f"stopped the server (process {pid}); its sandboxes run on until their timeouts")
    return 0


if __name__ == "__main__":
    try:
        sys.exit({"start": start, "stop": stop}[sys.argv[1]]())
    except SkerryError as problem:
        sys.exit(f"skerry: {problem}")
