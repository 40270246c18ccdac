"""Secrets that are lent to a process of a real agent: there for the process, and for nobody else."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.core.errors import InvalidRequest, Unavailable
from support.guest_agent import SOMEONE, RunningAgent, running_agent

VALUE = "line 1-Xq7-marker\n$HOME 'x' \"y\" ü"


@pytest.fixture
def place() -> Iterator[Path]:
    """Not below pytest's directories, which are their owner's alone: another user is to get to the files."""
    with tempfile.TemporaryDirectory(prefix="secrets-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.fixture
async def agent(place: Path) -> AsyncIterator[RunningAgent]:
    async with running_agent("--secrets", str(place), env={"A": "sandbox"}) as running:
        yield running


async def test_a_value_is_in_the_environment_and_in_no_list(agent: RunningAgent) -> None:
    stream = await agent.start('printf %s "$S|$A"; exec sleep 600', env={"A": "own", "B": "2"}, secret_env={"S": VALUE})
    seen = b""
    while len(seen) < len(f"{VALUE}|own".encode()):
        event = await anext(stream)
        seen += getattr(event, "data", b"")
    assert seen == f"{VALUE}|own".encode()
    (process,) = await agent.link.processes()
    assert process.env == {"A": "own", "B": "2"}
    assert "marker" not in repr(process)
    await agent.link.kill_process(process.process_id)
    assert (await agent.run('printf %s "${S-none}"')).stdout == b"none"


async def test_a_secret_wins_over_all_other_layers(agent: RunningAgent) -> None:
    assert (await agent.run('printf %s "$A"', secret_env={"A": "lent-Xq7-value"})).stdout == b"lent-Xq7-value"


@pytest.mark.parametrize("user", [None, SOMEONE])
async def test_a_file_is_the_users_alone_and_goes_with_the_process(
    agent: RunningAgent, place: Path, user: str | None
) -> None:
    command = 'cat "$F"; stat -c "%a %u" "$F" >&2; echo "$F" >&2'
    seen = await agent.run(command, secret_files={"F": VALUE, "G": "other"}, user=user, cwd="/")
    assert seen.stdout == VALUE.encode()
    mode, path = seen.stderr.decode().splitlines()
    assert mode == f"400 {user or 0}"
    assert Path(path).parent.parent == place
    assert list(place.iterdir()) == []


async def test_files_are_gone_after_a_kill_a_deadline_and_a_start_that_failed(agent: RunningAgent, place: Path) -> None:
    stream = await agent.start("exec sleep 600", secret_files={"F": VALUE})
    assert len(list(place.rglob("F"))) == 1
    await agent.link.kill_process(stream.process.process_id)
    async for _ in stream:
        pass
    await agent.run("exec sleep 600", secret_files={"F": VALUE}, timeout_ms=50)
    with pytest.raises(InvalidRequest) as missing:
        await agent.run(argv=("/no/such/program",), secret_files={"F": VALUE}, secret_env={"S": VALUE})
    assert missing.value.code == "command_not_found"
    assert "marker" not in repr(missing.value.context)
    assert list(place.iterdir()) == []


async def test_two_processes_have_their_own_files(agent: RunningAgent, place: Path) -> None:
    first = await agent.start('read x; cat "$F"', secret_files={"F": "first-Xq7-value"}, stdin=True)
    assert (await agent.run('cat "$F"', secret_files={"F": "second-Xq7-value"})).stdout == b"second-Xq7-value"
    assert len(list(place.rglob("F"))) == 1
    await agent.link.close_stdin(first.process.process_id)
    seen = [getattr(event, "data", None) async for event in first]
    assert seen[:1] == [b"first-Xq7-value"]


@pytest.mark.parametrize("name", ["../F", "a/b"])
async def test_a_name_leads_nowhere_else(agent: RunningAgent, place: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await agent.run("true", secret_files={name: VALUE})
    assert list(place.iterdir()) == []


async def test_without_a_place_in_memory_files_are_refused() -> None:
    async with running_agent() as agent:
        with pytest.raises(Unavailable) as refused:
            await agent.run("true", secret_files={"F": VALUE})
        assert refused.value.code == "no_secret_files"
        assert (await agent.run('printf %s "$S"', secret_env={"S": VALUE})).stdout == VALUE.encode()
