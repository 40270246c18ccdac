"""What is left of a sandbox's content when it is gone: nothing, anywhere in the data directory."""

import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry import Sandbox
from support.server import Server

pytestmark = pytest.mark.vm


def holding(root: Path, marker: bytes) -> list[str]:
    """Files below `root` in which these bytes are, as names below it."""
    found = []
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(marker) >= 0:
                    found.append(str(path.relative_to(root)))
    return found


def test_of_a_killed_sandbox_no_content_is_left(new_server: Callable[..., Server]) -> None:
    server = new_server(SKERRY_POOL_CEILING="0")
    marker = secrets.token_hex(16)
    with Sandbox.create(memory_mb=256, env={"MARKER": marker}, **server.client) as sandbox:
        sandbox.files.write("/home/user/file", marker * 100)
        sandbox.run("cat > /home/user/stdin; echo $MARKER", stdin=marker, check=True)
        sandbox.commands.start(["sleep", "1000"], env={"ALSO": marker})
        sandbox.run("sync", check=True)
        sandbox.pause()
        assert holding(server.data_dir, marker.encode()), "else this shows nothing"
        sandbox = Sandbox.resume(sandbox.id, **server.client)
        copies = sandbox.fork(1)
        for one in copies:
            one.kill()
    assert holding(server.data_dir, marker.encode()) == []
    held = [os.readlink(link) for link in Path(f"/proc/{server.process.pid}/fd").iterdir()] if server.process else []
    assert not [target for target in held if target.endswith("(deleted)") and str(server.data_dir) in target]
