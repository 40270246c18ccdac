"""Files through a real agent where the host asks for more: root's hand in a user's name, in place, in detail."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import Conflict, InvalidRequest, SkerryError
from skerry.core.models import FileKind, WatchEvent, WatchKind
from skerry.node.contract import WatchStream
from support.guest_agent import SOMEONE, RunningAgent, running_agent

UID = int(SOMEONE)


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory of root's that nobody else may even look into."""
    (tmp_path / "closed").mkdir(mode=0o700)
    return tmp_path / "closed"


async def once(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_privileged_call_goes_where_the_user_may_not_and_what_it_makes_is_the_users(
    agent: RunningAgent, closed: Path
) -> None:
    link, who = agent.link, {"user": SOMEONE, "privileged": True}
    with pytest.raises(SkerryError, match="permission"):
        await link.make_dir(f"{closed}/a/b", user=SOMEONE)
    info, new = await link.make_dir(f"{closed}/a/b", **who)
    assert (new, info.uid, info.gid) == (True, UID, UID)
    assert (closed / "a").stat().st_uid == UID
    written = await link.write_file(f"{closed}/new/deep/file", once(b"1", b"2"), in_place=True, **who)
    assert (written.uid, written.gid, written.mode, written.size) == (UID, UID, 0o644, 2)
    assert (closed / "new").stat().st_uid == UID
    assert [entry.name async for entry in link.list_dir(str(closed), **who)] == ["a", "new"]
    download = await link.read_file(f"{closed}/new/deep/file", **who)
    assert b"".join([part async for part in download]) == b"12"
    assert (await link.move(f"{closed}/new", f"{closed}/moved", **who)).uid == UID
    await link.remove(f"{closed}/moved", **who)
    assert os.listdir(closed) == ["a"]


async def test_a_write_in_place_keeps_the_file_and_gives_it_to_the_user(agent: RunningAgent, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    path.chmod(0o600)
    os.link(path, tmp_path / "other name")
    before = path.stat()
    info = await agent.link.write_file(str(path), once(b"new"), user=SOMEONE, in_place=True, privileged=True)
    assert (tmp_path / "other name").read_bytes() == b"new"
    assert path.stat().st_ino == before.st_ino
    assert (info.uid, info.mode) == (UID, 0o600)


async def test_a_write_in_place_that_is_cut_off_leaves_what_was(agent: RunningAgent, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise asyncio.IncompleteReadError(b"", 4)

    (tmp_path / "old").write_bytes(b"old")
    for name in ("old", "new"):
        with pytest.raises(asyncio.IncompleteReadError):
            await agent.link.write_file(f"{tmp_path}/{name}", broken(), in_place=True)
    async with asyncio.timeout(30):
        while os.listdir(tmp_path) != ["old"]:
            await asyncio.sleep(0.01)
    assert (tmp_path / "old").read_bytes() == b"old"
    with pytest.raises(InvalidRequest, match="announced"):
        await agent.link.write_file(f"{tmp_path}/deep/new", once(b"short"), size=9, in_place=True)
    assert os.listdir(tmp_path) == ["old"]


async def test_attributes_are_replaced_whole_and_told_in_detail(agent: RunningAgent, tmp_path: Path) -> None:
    path, link = str(tmp_path / "file"), agent.link
    for in_place in (False, True):
        await link.write_file(path, once(b"x"), xattrs={"user.e2b.a": "1", "user.b": "two"}, in_place=in_place)
        assert (await link.stat(path, detail=True)).xattrs == {"user.e2b.a": "1", "user.b": "two"}
        assert (await link.stat(path)).xattrs is None
        await link.write_file(path, once(b"y"), xattrs={"user.c": "ü"}, in_place=in_place)
        (entry,) = [entry async for entry in link.list_dir(str(tmp_path), detail=True)]
        assert entry.xattrs == {"user.c": "ü"}
        await link.write_file(path, once(b"y"), xattrs={}, in_place=in_place)
        assert (await link.stat(path, detail=True)).xattrs == {}
    with pytest.raises(SkerryError):
        await link.write_file(path, once(b"z"), xattrs={"user.big": "x" * 70_000})
    assert Path(path).read_bytes() == b"y"


async def test_detail_says_where_a_link_leads(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("dir")
    (tmp_path / "nowhere").symlink_to("missing")
    info = await agent.link.stat(f"{tmp_path}/one", detail=True)
    assert (info.kind, info.target) == (FileKind.SYMLINK, "two")
    assert (info.resolved, info.resolved_kind) == (f"{tmp_path}/dir", FileKind.DIRECTORY)
    info = await agent.link.stat(f"{tmp_path}/nowhere", detail=True)
    assert (info.resolved, info.resolved_kind) == (f"{tmp_path}/missing", None)


async def test_a_new_file_in_place_is_seen_as_it_comes(agent: RunningAgent, closed: Path) -> None:
    watch = await agent.link.watch(str(closed), user=SOMEONE, privileged=True)
    await agent.link.write_file(f"{closed}/file", once(b"1"), user=SOMEONE, in_place=True, privileged=True)
    kinds = [(event.kind, event.path) for event in await some(watch, 3)]
    assert kinds == [(WatchKind.CREATE, "file"), (WatchKind.CHMOD, "file"), (WatchKind.WRITE, "file")]
    await agent.link.write_file(f"{closed}/file", once(b"2"), user=SOMEONE, in_place=True, privileged=True)
    assert {event.kind for event in await some(watch, 1)} == {WatchKind.WRITE}
    await watch.aclose()


async def some(watch: WatchStream, count: int) -> list[WatchEvent]:
    async with asyncio.timeout(30):
        return [await watch.__anext__() for _ in range(count)]


async def test_what_cannot_be_written_in_place_is_refused(agent: RunningAgent, tmp_path: Path) -> None:
    with pytest.raises(Conflict) as told:
        await agent.link.write_file(str(tmp_path), once(b""), in_place=True, privileged=True)
    assert told.value.code == "is_a_directory"


async def test_a_watch_that_is_settled_has_told_all_that_had_changed(agent: RunningAgent, tmp_path: Path) -> None:
    watch = await agent.link.watch(str(tmp_path))
    assert await agent.link.settle_watch(watch.watch_id) == 0
    for number in range(50):
        (tmp_path / str(number)).mkdir()
        assert await agent.link.settle_watch(watch.watch_id) == number + 1
        (told,) = await some(watch, 1)
        assert (told.kind, told.path, told.offset) == (WatchKind.CREATE, str(number), number)
    await watch.aclose()
    await agent.link.end_watch(watch.watch_id)
    with pytest.raises(SkerryError) as refused:
        await agent.link.settle_watch(watch.watch_id)
    assert refused.value.code == "watch_not_found"
