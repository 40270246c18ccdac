"""Watches through a real agent: nothing is missed without a word."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import Conflict, InvalidRequest, NotFound, SkerryError, Unavailable
from skerry.core.models import WatchEvent, WatchKind
from skerry.node.contract import WatchStream
from support.guest_agent import SOMEONE, RunningAgent, identity, running_agent


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


async def events_until(stream: WatchStream, path: str, kind: WatchKind = WatchKind.CREATE) -> list[WatchEvent]:
    seen: list[WatchEvent] = []
    async with asyncio.timeout(60):
        async for event in stream:
            if event.path == path and event.kind is kind:
                return seen
            seen.append(event)
    raise AssertionError("the watch ended")


def told(events: list[WatchEvent]) -> list[tuple[str, str]]:
    return [(event.kind.value, event.path) for event in events]


async def test_what_editors_do_is_told(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    stream = await agent.link.watch(str(tmp_path))
    (tmp_path / "f.tmp").write_text("new")
    (tmp_path / "f.tmp").rename(tmp_path / "f")
    (tmp_path / "f").chmod(0o600)
    with (tmp_path / "f").open("a") as f:
        f.write("more")
    os.truncate(tmp_path / "f", 1)
    os.link(tmp_path / "f", tmp_path / "hard")
    (tmp_path / "soft").symlink_to("f")
    (tmp_path / "f").unlink()
    (tmp_path / "end").touch()
    seen = await events_until(stream, "end")
    [source], [target] = ([e for e in seen if e.kind is kind] for kind in (WatchKind.RENAME_FROM, WatchKind.RENAME_TO))
    assert (source.path, target.path) == ("f.tmp", "f")
    assert source.cookie == target.cookie != 0
    listed = told(seen)
    assert listed[0] == ("create", "f.tmp")
    for expected in (("chmod", "f"), ("write", "f"), ("create", "hard"), ("create", "soft"), ("remove", "f")):
        assert expected in listed


async def test_our_own_writes_show_no_temporary(agent: RunningAgent, tmp_path: Path) -> None:
    stream = await agent.link.watch(str(tmp_path))

    async def data() -> AsyncIterator[bytes]:
        yield b"x"

    await agent.link.write_file(f"{tmp_path}/f", data())
    (tmp_path / "end").touch()
    assert told(await events_until(stream, "end")) == [("rename_to", "f")]


async def test_new_directories_are_watched_and_renamed_ones_known_by_their_new_name(
    agent: RunningAgent, tmp_path: Path
) -> None:
    (tmp_path / "old" / "in").mkdir(parents=True)
    stream = await agent.link.watch(str(tmp_path), recursive=True)
    (tmp_path / "n1" / "a" / "b").mkdir(parents=True)
    (tmp_path / "n1" / "a" / "b" / "f").write_text("x")
    seen = await events_until(stream, "n1/a/b/f")
    assert [e.path for e in seen if e.kind is WatchKind.CREATE] == ["n1", "n1/a", "n1/a/b"]
    (tmp_path / "n1").rename(tmp_path / "n2")
    (tmp_path / "n2" / "a" / "b" / "t").touch()
    seen = await events_until(stream, "n2/a/b/t")
    renames = [(e.kind, e.path, e.is_dir) for e in seen if e.cookie]
    assert renames == [(WatchKind.RENAME_FROM, "n1", True), (WatchKind.RENAME_TO, "n2", True)]
    outside = tmp_path.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    (tmp_path / "old").rename(outside)
    [gone] = [e for e in await events_through(stream, "old") if e.kind is WatchKind.RENAME_FROM]
    assert gone.cookie == 0
    (outside / "in" / "quiet").touch()
    outside.rename(tmp_path / "back")
    (tmp_path / "back" / "in" / "seen").touch()
    seen = await events_until(stream, "back/in/seen")
    assert "quiet" not in {Path(e.path).name for e in seen if not e.path.startswith("back")}
    assert [e.path for e in seen if e.kind is WatchKind.CREATE] == ["back/in", "back/in/quiet"]


async def events_through(stream: WatchStream, path: str) -> list[WatchEvent]:
    async with asyncio.timeout(60):
        seen = []
        async for event in stream:
            seen.append(event)
            if event.path == path:
                break
    return seen


async def test_overflow_is_an_error_and_memory_stays_bounded(agent: RunningAgent, tmp_path: Path) -> None:
    stream = await agent.link.watch(str(tmp_path))
    before = agent.rss_kb()
    for n in range(25_000):  # twice as many events, of 250 bytes: more than sockets and the kernel's queue hold
        name = f"{tmp_path}/{n:0200}"
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.unlink(name)
    assert agent.rss_kb() - before < 32_000
    seen = 0
    with pytest.raises(Conflict) as e:
        async with asyncio.timeout(60):
            async for _ in stream:
                seen += 1
    assert e.value.code == "watch_overflow"
    assert seen > 0


async def test_a_watch_whose_root_goes_says_so(agent: RunningAgent, tmp_path: Path) -> None:
    for end in (lambda p: p.rmdir(), lambda p: p.rename(tmp_path / "elsewhere")):
        root = tmp_path / "root"
        root.mkdir()
        stream = await agent.link.watch(str(root), recursive=True)
        end(root)
        with pytest.raises(NotFound) as e:
            async with asyncio.timeout(60):
                await events_until(stream, "never")
        assert e.value.code == "path_not_found"
    for path, error, code in (
        (tmp_path / "none", NotFound, "path_not_found"),
        (Path("/etc/passwd"), Conflict, "not_a_directory"),
    ):
        with pytest.raises(error) as e:
            await agent.link.watch(str(path))
        assert e.value.code == code


async def test_an_unmounted_root_says_so(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    async with running_agent(wrapper=("unshare", "-m", "sh", "-c", mount, "sh")) as agent:
        stream = await agent.link.watch(str(tmp_path))
        await agent.run(f"umount {tmp_path}")
        with pytest.raises(NotFound):
            async with asyncio.timeout(60):
                await events_until(stream, "never")


async def test_watches_come_and_go_and_their_limit_is_typed(agent: RunningAgent, tmp_path: Path) -> None:
    import resource

    for n in range(3):
        stream = await agent.link.watch(str(tmp_path))
        await stream.aclose()
        again = await agent.link.watch(str(tmp_path))
        (tmp_path / f"f{n}").touch()
        assert await events_until(again, f"f{n}") == []
        await again.aclose()
    many = [await agent.link.watch(str(tmp_path)) for _ in range(50)]
    (tmp_path / "all").touch()
    for stream in many:
        assert told(await events_until(stream, "all")) in ([], [("write", "f2")])
    soft, hard = resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (used + 1, hard))
    try:
        with pytest.raises(Unavailable) as e:
            await agent.link.watch(str(tmp_path))
        assert e.value.code == "watch_limit"
    finally:
        resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    for stream in many:
        await stream.aclose()
        await agent.link.end_watch(stream.watch_id)
    async with asyncio.timeout(60):
        while len(os.listdir(f"/proc/{agent.process.pid}/fd")) > used - 90:
            await asyncio.sleep(0.02)


async def test_who_comes_back_to_a_watch_misses_nothing(agent: RunningAgent, tmp_path: Path) -> None:
    stream = await agent.link.watch(str(tmp_path))
    (tmp_path / "a").mkdir()
    first = await anext(stream)
    assert (first.path, first.offset) == ("a", 0)
    (tmp_path / "b").mkdir()
    await stream.aclose()
    (tmp_path / "c").mkdir()
    for offset, paths in ((1, ["b", "c"]), (0, ["a", "b", "c"]), (3, [])):
        again = await agent.link.attach_watch(stream.watch_id, offset=offset)
        assert [(await anext(again)).path for _ in paths] == paths
        await again.aclose()
    with pytest.raises(InvalidRequest):
        await agent.link.attach_watch(stream.watch_id, offset=4)
    one, other = [await agent.link.attach_watch(stream.watch_id, offset=3) for _ in range(2)]
    (tmp_path / "d").mkdir()
    assert (await anext(one)).path == (await anext(other)).path == "d"
    await agent.link.end_watch(stream.watch_id)
    for reader in (one, other):
        with pytest.raises(NotFound) as ended:
            await anext(reader)
        assert ended.value.code == "watch_not_found"
    for act in (agent.link.attach_watch, agent.link.end_watch):
        with pytest.raises(NotFound) as ended:
            await act(stream.watch_id)
        assert ended.value.code == "watch_not_found"


async def test_a_watch_outlives_an_identity_and_ends_with_a_fresh_one(agent: RunningAgent, tmp_path: Path) -> None:
    stream = await agent.link.watch(str(tmp_path))
    await agent.link.identify(identity(generation=2))
    with pytest.raises(SkerryError):
        await anext(stream)  # that line spoke to an earlier life
    (tmp_path / "a").mkdir()
    again = await agent.link.attach_watch(stream.watch_id)
    assert (await anext(again)).path == "a"
    await agent.link.identify(identity(generation=3, fresh=True))
    with pytest.raises(NotFound):
        await agent.link.attach_watch(stream.watch_id)


async def test_what_is_no_longer_kept_is_an_overflow(agent: RunningAgent, tmp_path: Path) -> None:
    stream = await agent.link.watch(str(tmp_path))
    for n in range(6000):  # of 300 bytes each
        (tmp_path / f"{n:0200}").mkdir()
        assert (await anext(stream)).offset == n
    await stream.aclose()
    with pytest.raises(Conflict) as lost:
        await agent.link.attach_watch(stream.watch_id)
    assert lost.value.code == "watch_overflow"
    again = await agent.link.attach_watch(stream.watch_id, offset=5500)
    assert [(await anext(again)).offset for _ in range(500)] == list(range(5500, 6000))


async def test_the_end_of_a_watch_is_told_to_who_comes_later(agent: RunningAgent, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    stream = await agent.link.watch(str(root))
    await stream.aclose()
    (root / "last").mkdir()
    shutil.rmtree(root)
    again = await agent.link.attach_watch(stream.watch_id)
    with pytest.raises(NotFound) as gone:
        await events_until(again, "never")
    assert gone.value.code == "path_not_found"
    with pytest.raises(NotFound) as gone:
        await agent.link.attach_watch(stream.watch_id)
    assert gone.value.code == "watch_not_found"


async def test_a_closed_directory_is_watched_from_when_it_opens(agent: RunningAgent) -> None:
    with tempfile.TemporaryDirectory() as name:  # not below pytest's own, which is closed to others
        root = Path(name)
        root.chmod(0o755)
        (root / "closed").mkdir(mode=0o700)
        stream = await agent.link.watch(name, recursive=True, user=SOMEONE)
        (root / "closed" / "unseen").touch()
        (root / "first").touch()
        assert told(await events_until(stream, "first")) == []
        (root / "closed" / "within").mkdir(mode=0o755)
        (root / "closed").chmod(0o755)
        seen = await events_until(stream, "closed/within")
        assert told(seen) == [("chmod", "closed"), ("create", "closed/unseen")]
        (root / "closed" / "within" / "f").touch()
        assert told(await events_until(stream, "closed/within/f")) == []
        (root / "closed").chmod(0o700)
        await stream.aclose()
