"""The claim: a secret that is lent to a command is on no disk, in no log, event, argument, journal or row, and in no
memory image that a snapshot keeps without being told to. Real VMs, real searches."""

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from skerry import Client, Sandbox, SandboxInfo, secret
from skerry.core.errors import Conflict
from support.machine import vms
from support.server import Server

MARKER = f"marker-{uuid4().hex}"
VALUE = f"pg://app:{MARKER}@db"
DIGEST = hashlib.sha256(VALUE.encode()).hexdigest()


@pytest.fixture(scope="module")
def server(new_server: Callable[..., Server]) -> Server:
    return new_server()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(**server.client) as made:
        made.secrets.set("db-prod", VALUE)
        yield made


@pytest.fixture
def box(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create(env={"S": secret("db-prod"), "F": secret("db-prod", file=True)}, client=client) as made:
        yield made


def holding(folder: Path) -> list[Path]:
    """Files that hold the marker. Their names from the folder on."""
    found = subprocess.run(["grep", "-rlaF", MARKER, str(folder)], capture_output=True, text=True, check=False)
    assert found.returncode in {0, 1}, found.stderr
    return [Path(line).relative_to(folder) for line in found.stdout.splitlines()]


def lend(box: Sandbox) -> None:
    """The command gets it both ways, in memory."""
    seen = box.run('printf %s "$S" | sha256sum; sha256sum <"$F"; stat -f -c %T "$F"; stat -c %a "$F"', check=True)
    assert seen.stdout.split() == [DIGEST, "-", DIGEST, "-", "tmpfs", "400"]


def test_it_is_where_it_was_lent_and_nowhere_else(server: Server, client: Client, box: Sandbox) -> None:
    lend(box)
    process = box.commands.start("exec sleep 600")
    look = "cat /proc/[0-9]*/cmdline; find /run/secrets -type f | wc -l"
    shown = box.run(look, env={"S": "", "F": ""}, user="root", check=True)
    assert MARKER not in shown.stdout
    assert shown.stdout.endswith("1\n")  # the running process's own
    assert MARKER not in repr(box.commands.list())
    assert MARKER not in repr(list(box.logs())) + box.console()
    assert MARKER not in repr(client.secrets.list())
    process.kill()
    for each in (*vms(server.data_dir), psutil.Process(server.process.pid if server.process else 0)):
        assert MARKER not in repr((each.cmdline(), each.environ()))
    assert holding(server.data_dir) == []
    for run in Path("/run").glob("skerry*"):
        assert holding(run) == []


def test_no_file_of_it_is_left_when_the_process_is_over(box: Sandbox) -> None:
    lend(box)
    assert box.run("find /run/secrets -type f | wc -l", env={"F": ""}, user="root", check=True).stdout == "0\n"


def test_a_snapshot_of_the_disk_holds_nothing_and_one_of_the_memory_must_be_told_to(
    server: Server, client: Client, box: Sandbox
) -> None:
    lend(box)
    with pytest.raises(Conflict) as refused:
        box.snapshot()
    assert refused.value.code == "secrets_in_memory"
    disk = box.snapshot(memory=False)
    assert holding(server.data_dir) == []
    kept = box.snapshot(secrets="keep")
    assert kept.holds_secrets
    assert len(holding(server.data_dir)) == 1  # the search finds what is there
    client.snapshots.delete(kept)
    client.snapshots.delete(disk)
    assert holding(server.data_dir) == []


def test_nothing_is_left_of_a_pause_when_the_sandbox_is_over(server: Server, client: Client, box: Sandbox) -> None:
    lend(box)
    paused: SandboxInfo = box.pause()
    assert paused.state == "paused"
    box.resume()
    lend(box)
    box.pause()
    box.kill()
    assert holding(server.data_dir) == []
