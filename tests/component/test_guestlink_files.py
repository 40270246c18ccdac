"""Files through a real agent: names, bytes, permissions, links, whole trees, errors that leave nothing behind."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import Conflict, Forbidden, InvalidRequest, NoSpace, NotFound, SkerryError
from skerry.core.models import FileInfo, FileKind
from support.guest_agent import SOMEONE, RunningAgent, running_agent

UID = int(SOMEONE)


@pytest.fixture
async def agent() -> AsyncIterator[RunningAgent]:
    async with running_agent() as running:
        yield running


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory below which every user may act; `mine` in it is SOMEONE's."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    (tmp_path / "mine").mkdir()
    os.chown(tmp_path / "mine", UID, UID)
    return tmp_path


async def once(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(agent: RunningAgent, path: object, **options: object) -> bytes:
    download = await agent.link.read_file(str(path), **options)  # type: ignore[arg-type]
    data = b"".join([part async for part in download])
    assert len(data) == download.length
    return data


async def write(agent: RunningAgent, path: object, data: bytes, **options: object) -> FileInfo:
    return await agent.link.write_file(str(path), once(data), **options)  # type: ignore[arg-type]


async def names(agent: RunningAgent, path: object, **options: object) -> list[str]:
    return [info.name async for info in agent.link.list_dir(str(path), **options)]  # type: ignore[arg-type]


NAMES = [
    "a b.txt", " lead", "trail ", "q'\"q", "$(id)", "`id`", ";rm -rf x", "-rf", "--help", "*", "?", "\\", "new\nline",
    "tab\t", "日本語", "\U0001f469\u200d\U0001f467", "\u00e9", "e\u0301", "\u202egnp.txt", "%2e%2e", "%20",
    "+", "#", "a&b=c", ".hidden", "...",
    "x" * 255, os.fsdecode(b"not \xff utf-8 \xfe"), "\x01\x7f",
]  # fmt: skip


async def test_every_legal_name_round_trips(agent: RunningAgent, tmp_path: Path) -> None:
    for name in NAMES:
        path = f"{tmp_path}/{name}"
        info = await write(agent, path, name.encode("utf-8", "surrogateescape"))
        assert (info.path, info.name) == (path, name)
        assert await agent.link.stat(path) == info
        assert await read(agent, path) == os.fsencode(name)
        moved = await agent.link.move(path, f"{tmp_path}/moved")
        assert moved.name == "moved"
        await agent.link.move(f"{tmp_path}/moved", path)
    assert await names(agent, tmp_path) == sorted(NAMES, key=os.fsencode)
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)
    for name in NAMES:
        await agent.link.remove(f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == []


async def test_bad_paths_are_typed(agent: RunningAgent, tmp_path: Path) -> None:
    for path, code in (
        ("", "invalid_path"),
        ("a\0b", "invalid_path"),
        (f"{tmp_path}/{'x' * 256}", "path_too_long"),
        ("/" + "d/" * 2047 + "xx", "path_too_long"),
        (f"{tmp_path}/missing", "path_not_found"),
        (f"{tmp_path}/\ud800", "invalid_request"),
    ):
        with pytest.raises(SkerryError) as e:
            await agent.link.stat(path)
        assert e.value.code == code, path[:40]
    longest = "/" + "d/" * 2046 + "x" * 2  # 4095 bytes
    with pytest.raises(NotFound):
        await agent.link.stat(longest)


async def test_relative_paths_start_at_the_users_home(agent: RunningAgent) -> None:
    name = f"skerry-{os.getpid()}"
    try:
        info = await write(agent, f"{name}/rel.txt", b"r")
        assert info.path == f"/root/{name}/rel.txt"
        assert (await agent.link.stat(f"~/{name}/./x/../rel.txt")).path == info.path
        assert (await agent.link.stat("~")).path == "/root"
        assert (await agent.link.stat("etc", user=SOMEONE)).path == "/etc"
    finally:
        shutil.rmtree(f"/root/{name}")


async def test_ranges_and_sizes(agent: RunningAgent, tmp_path: Path) -> None:
    for size in (0, 1, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 3_000_000):
        data = os.urandom(size)
        info = await write(agent, tmp_path / "f", data, size=size)
        assert info.size == size
        assert await read(agent, tmp_path / "f") == data
        assert await read(agent, tmp_path / "f", offset=size // 3, length=100_000) == data[size // 3 :][:100_000]
        assert await read(agent, tmp_path / "f", offset=size + 10) == b""
        assert await read(agent, tmp_path / "f", length=0) == b""
    with (tmp_path / "sparse").open("wb") as f:
        f.truncate(8 << 30)
    before = agent.rss_kb()
    assert await read(agent, tmp_path / "sparse", offset=(8 << 30) - 5000, length=9000) == bytes(5000)
    download = await agent.link.read_file(str(tmp_path / "sparse"))
    assert download.length == download.info.size == 8 << 30
    for _ in range(200):
        await download.__anext__()
    await download.aclose()
    assert agent.rss_kb() - before < 16_000


async def test_files_that_claim_to_be_empty(agent: RunningAgent) -> None:
    assert await read(agent, "/proc/version") == Path("/proc/version").read_bytes()
    assert await read(agent, "/sys/kernel/mm/transparent_hugepage/enabled")
    assert await read(agent, "/proc/version", length=5) == b"Linux"


async def test_a_file_that_shrinks_is_an_error_and_not_a_hang(agent: RunningAgent, tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as f:
        f.truncate(200 << 20)
    download = await agent.link.read_file(str(path))
    await download.__anext__()
    os.truncate(path, 1000)
    with pytest.raises(Conflict) as e:
        async with asyncio.timeout(60):
            async for _ in download:
                pass
    assert e.value.code == "file_changed"


async def test_a_write_keeps_mode_and_owner_and_makes_parents(agent: RunningAgent, shared: Path) -> None:
    deep = shared / "mine" / "a" / "b" / "f"
    info = await write(agent, deep, b"1", user=SOMEONE)
    assert (info.mode, info.uid, info.gid, info.owner) == (0o644, UID, UID, SOMEONE)
    assert [(p.stat().st_uid, stat.S_IMODE(p.stat().st_mode)) for p in (deep.parent, deep.parent.parent)] == [
        (UID, 0o755)
    ] * 2
    deep.chmod(0o751)
    inode = deep.stat().st_ino
    info = await write(agent, deep, b"22")
    assert (info.mode, info.uid, info.gid, info.size) == (0o751, UID, UID, 2)
    assert deep.stat().st_ino != inode  # replaced as a whole: readers saw the old or the new one
    info = await write(agent, deep, b"333", mode=0o600, mtime_ns=1_234_567_890_123_456_789, user=SOMEONE)
    assert (info.mode, info.mtime_ns) == (0o600, 1_234_567_890_123_456_789)
    assert (await agent.link.chmod(str(deep), 0o4711)).mode == 0o4711


async def test_a_write_goes_through_a_link_and_leaves_it(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_text("old")
    (tmp_path / "link").symlink_to("real/f")
    (tmp_path / "dangling").symlink_to("real/new")
    (tmp_path / "loop").symlink_to("loop")
    assert (await write(agent, tmp_path / "link", b"new")).kind is FileKind.SYMLINK
    await write(agent, tmp_path / "dangling", b"made")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "f").read_text() == "new"
    assert (tmp_path / "real" / "new").read_text() == "made"
    with pytest.raises(Conflict) as e:
        await write(agent, tmp_path / "loop", b"x")
    assert e.value.code == "symlink_loop"


async def test_the_kernel_judges_as_the_user(agent: RunningAgent, shared: Path) -> None:
    secret = shared / "secret"
    secret.write_text("s")
    secret.chmod(0o600)
    open_to_read = shared / "mine" / "root's"
    open_to_read.write_text("r")
    for act in (
        lambda: read(agent, secret, user=SOMEONE),
        lambda: write(agent, "/etc/skerry-x", b"x", user=SOMEONE),
        lambda: write(agent, shared / "x", b"x", user=SOMEONE),
        lambda: write(agent, open_to_read, b"x", user=SOMEONE),  # though the directory is the user's
        lambda: write(agent, "/proc/sys/kernel/hostname", b"x", user=SOMEONE),
        lambda: agent.link.remove(str(secret), user=SOMEONE),
        lambda: agent.link.chmod(str(secret), 0o777, user=SOMEONE),
        lambda: agent.link.make_dir(str(shared / "d"), user=SOMEONE),
        lambda: names(agent, "/root" if not os.stat("/root").st_mode & 0o5 else "/proc/1/fd", user=SOMEONE),
    ):
        with pytest.raises(Forbidden) as e:
            await act()
        assert e.value.code == "permission_denied"
    assert open_to_read.read_text() == "r"
    assert os.listdir(shared / "mine") == ["root's"]


async def test_where_only_the_file_may_be_written_it_is_written_in_place(agent: RunningAgent, shared: Path) -> None:
    """A sticky directory, another's file that all may write, a directory that is not the user's."""
    sticky = shared / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    closed = shared / "closed"
    closed.mkdir()
    for path, owner in ((sticky / "a", 0), (closed / "b", UID), (shared / "mine" / "c", 0)):
        path.write_text("a longer old text")
        path.chmod(0o666)
        os.chown(path, owner, owner)
        inode = path.stat().st_ino
        info = await write(agent, path, b"new", user=SOMEONE)
        assert path.read_text() == "new"
        assert (info.uid, info.mode, path.stat().st_ino) == (owner, 0o666, inode)
        assert os.listdir(path.parent) == [path.name]
    # Command and file interface are the same user, so each may write what the other made.
    await agent.run(f"echo 1 > {sticky}/n", user=SOMEONE)
    await write(agent, sticky / "n", b"2", user=SOMEONE)
    assert (await agent.run(f"echo 3 >> {sticky}/n; cat {sticky}/n", user=SOMEONE)).stdout == b"23\n"


async def test_what_has_no_bytes_is_refused_without_waiting(agent: RunningAgent, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "sock"))
    for path, code in (
        (tmp_path / "fifo", "not_a_regular_file"),
        (tmp_path / "sock", "not_a_regular_file"),
        ("/dev/zero", "not_a_regular_file"),
        (tmp_path, "is_a_directory"),
    ):
        for act in (read(agent, path), write(agent, path, b"x")):
            with pytest.raises(Conflict) as e:
                async with asyncio.timeout(60):
                    await act
            assert e.value.code == code
    for act in (read(agent, "/etc/passwd/x"), write(agent, "/etc/passwd/x", b"x"), names(agent, "/etc/passwd")):
        with pytest.raises(Conflict) as e:
            await act
        assert e.value.code == "not_a_directory"


async def test_an_upload_that_stops_leaves_the_old_file_and_no_litter(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")

    async def breaks() -> AsyncIterator[bytes]:
        yield b"x" * 500_000
        raise RuntimeError("the caller's source broke")

    with pytest.raises(RuntimeError):
        await agent.link.write_file(str(tmp_path / "f"), breaks())
    started = asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield b"x" * 500_000
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(agent.link.write_file(str(tmp_path / "g"), hangs()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(InvalidRequest) as e:
        await write(agent, tmp_path / "f", b"short", size=6)
    assert e.value.code == "size_mismatch"
    async with asyncio.timeout(60):
        while os.listdir(tmp_path) != ["f"]:
            await asyncio.sleep(0.02)
    assert (tmp_path / "f").read_text() == "old"


async def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    async with running_agent(wrapper=("unshare", "-m", "sh", "-c", mount, "sh")) as agent:
        await write(agent, tmp_path / "f", b"old")
        for path in (tmp_path / "f", tmp_path / "new"):
            with pytest.raises(NoSpace) as e:
                await agent.link.write_file(str(path), once(*[b"x" * 100_000] * 40))
            assert (e.value.code, e.value.status) == ("no_space", 507)
        assert await names(agent, tmp_path) == ["f"]
        assert await read(agent, tmp_path / "f") == b"old"
        # Across filesystems: copied, dressed, and removed at the source.
        source = tmp_path.parent / "tree"
        (source / "d").mkdir(parents=True)
        (source / "d" / "f").write_text("inner")
        (source / "l").symlink_to("/nowhere")
        os.utime(source / "d", ns=(5, 5_000_000_007))
        os.chown(source / "d" / "f", UID, UID)
        await agent.link.move(str(source), str(tmp_path / "tree"))
        assert not source.exists()
        listed = {i.path.removeprefix(f"{tmp_path}/"): i async for i in agent.link.list_dir(str(tmp_path), depth=9)}
        assert list(listed) == ["f", "tree", "tree/d", "tree/d/f", "tree/l"]
        assert (listed["tree/d"].mtime_ns, listed["tree/d/f"].uid, listed["tree/l"].target) == (
            5_000_000_007,
            UID,
            "/nowhere",
        )
        big = tmp_path.parent / "big"
        big.write_bytes(bytes(4_000_000))
        with pytest.raises(NoSpace):
            await agent.link.move(str(big), str(tmp_path / "big"))
        assert big.exists()
        assert await names(agent, tmp_path) == ["f", "tree"]


async def test_lists_tell_kinds_and_links_and_end(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "realdir" / "sub").mkdir(parents=True)
    (tmp_path / "realdir" / "sub" / "leaf").touch()
    (tmp_path / "dir").symlink_to("realdir")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "suid").touch()
    (tmp_path / "suid").chmod(0o4755)
    listed = {i.path.removeprefix(f"{tmp_path}/"): i async for i in agent.link.list_dir(str(tmp_path), depth=50)}
    assert list(listed) == [
        "a", "b", "dir", "fifo", "loop", "null", "realdir", "realdir/sub", "realdir/sub/leaf", "suid",
    ]  # fmt: skip
    kinds = {name: info.kind.value for name, info in listed.items()}
    assert kinds["dir"] == kinds["loop"] == kinds["a"] == "symlink"
    assert (kinds["fifo"], kinds["null"], kinds["realdir/sub"]) == ("fifo", "char_device", "directory")
    assert (listed["dir"].target, listed["loop"].target, listed["suid"].mode) == ("realdir", ".", 0o4755)
    through = [i.path async for i in agent.link.list_dir(f"{tmp_path}/dir", depth=2)]
    assert through == [f"{tmp_path}/dir/sub", f"{tmp_path}/dir/sub/leaf"]
    assert len([i async for i in agent.link.list_dir(str(tmp_path), depth=1)]) == 8


async def test_a_directory_that_may_not_be_read_says_so_itself(agent: RunningAgent, shared: Path) -> None:
    (shared / "mine" / "closed" / "x").mkdir(parents=True)
    (shared / "mine" / "closed").chmod(0o700)
    (shared / "mine" / "half").mkdir()
    (shared / "mine" / "half" / "inner").touch()
    (shared / "mine" / "half").chmod(0o744)
    listed = {i.name: i async for i in agent.link.list_dir(str(shared / "mine"), depth=3, user=SOMEONE)}
    assert list(listed) == ["closed", "half", "inner"]
    assert "permission denied" in (listed["closed"].error or "")
    assert "permission denied" in (listed["inner"].error or "")
    assert listed["half"].error is None


async def test_twenty_thousand_entries(agent: RunningAgent, tmp_path: Path) -> None:
    for n in range(20_000):
        os.close(os.open(f"{tmp_path}/{n:05}", os.O_CREAT | os.O_WRONLY))
    assert await names(agent, tmp_path) == [f"{n:05}" for n in range(20_000)]
    await agent.link.remove(str(tmp_path))
    assert not tmp_path.exists()


async def test_remove_never_follows_a_link(agent: RunningAgent, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "f").touch()
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to("kept")
    await agent.link.remove(str(tmp_path / "link"))
    await agent.link.remove(str(tree))
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (kept / "f").exists()
    with pytest.raises(NotFound):
        await agent.link.remove(str(tree))
    with pytest.raises(InvalidRequest):
        await agent.link.remove("/tmp/..")
    deep = str(tmp_path)
    for _ in range(1500):  # deeper than recursion, and than a path may be long
        deep = "d"
    code = "import os\nfor _ in range(1500):\n os.mkdir('d'); os.chdir('d')"
    assert (await agent.run(argv=("/usr/bin/python3", "-c", code), cwd=str(tmp_path))).status
    await agent.link.remove(f"{tmp_path}/{deep}")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


async def test_directories_moves_and_links(agent: RunningAgent, tmp_path: Path) -> None:
    info, new = await agent.link.make_dir(f"{tmp_path}/x/y", mode=0o2750)
    assert (info.kind, info.mode, new) == (FileKind.DIRECTORY, 0o2750, True)
    assert await agent.link.make_dir(f"{tmp_path}/x/y") == (info, False)
    await write(agent, tmp_path / "x" / "f", b"1")
    with pytest.raises(Conflict) as e:
        await agent.link.make_dir(f"{tmp_path}/x/f")
    assert e.value.code == "path_exists"
    (tmp_path / "full" / "in").mkdir(parents=True)
    for source, target, code in (
        ("x", "full", "directory_not_empty"),
        ("x/f", "full", "is_a_directory"),
        ("full", "x/f", "not_a_directory"),
        ("none", "other", "path_not_found"),
        ("x", "none/x", "path_not_found"),
    ):
        with pytest.raises(SkerryError) as e:
            await agent.link.move(f"{tmp_path}/{source}", f"{tmp_path}/{target}")
        assert e.value.code == code, (source, target)
    with pytest.raises(InvalidRequest):
        await agent.link.move(f"{tmp_path}/x", f"{tmp_path}/x/y/z")
    link = await agent.link.symlink("x/f", f"{tmp_path}/l")
    assert (link.kind, link.target) == (FileKind.SYMLINK, "x/f")
    with pytest.raises(Conflict):
        await agent.link.symlink("y", f"{tmp_path}/l")
    assert (await agent.link.move(f"{tmp_path}/l", f"{tmp_path}/m")).kind is FileKind.SYMLINK


async def test_metrics_are_sane(agent: RunningAgent) -> None:
    for _ in range(2):
        metrics = await agent.link.metrics()
        assert metrics.cpu_count == os.cpu_count()
        assert 0 <= metrics.cpu_used_pct <= 100
        assert 0 < metrics.memory_used_bytes < metrics.memory_total_bytes
        assert 0 < metrics.disk_used_bytes <= metrics.disk_total_bytes
        assert metrics.processes > 1


async def test_a_path_of_any_legal_depth_is_made(agent: RunningAgent, tmp_path: Path) -> None:
    deep = f"{tmp_path}/d" + "/d" * 1000
    info, new = await agent.link.make_dir(deep)
    assert (info.path, new) == (deep, True)
    assert (await agent.link.make_dir(deep))[1] is False
    deepest = f"{tmp_path}/e"
    deepest += "/e" * ((4095 - len(deepest) - 2) // 2) + "/f"
    assert 4094 <= len(deepest) <= 4095
    assert (await write(agent, deepest, b"x")).path == deepest
    await agent.link.remove(f"{tmp_path}/d")
    await agent.link.remove(f"{tmp_path}/e")
    assert os.listdir(tmp_path) == []


async def test_parents_that_were_made_for_a_file_go_with_it(agent: RunningAgent, shared: Path) -> None:
    (shared / "mine" / "kept").mkdir()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise RuntimeError("the client fell over")

    with pytest.raises(RuntimeError):
        await agent.link.write_file(f"{shared}/mine/kept/a/b/f", broken())
    with pytest.raises(InvalidRequest):
        await write(agent, shared / "mine" / "kept" / "c" / "d" / "f", b"1", size=2)
    with pytest.raises(InvalidRequest):
        await agent.link.make_dir(f"{shared}/mine/kept/e/f/{'x' * 256}")
    async with asyncio.timeout(60):
        while os.listdir(shared / "mine" / "kept"):
            await asyncio.sleep(0.01)


async def test_a_path_that_names_a_directory_is_not_written_to(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    for name in ("f/", "f/.", "new/", "new//"):
        with pytest.raises(Conflict) as e:
            await write(agent, f"{tmp_path}/{name}", b"x")
        assert e.value.code == "is_a_directory"
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


async def test_a_setting_of_the_kernel_is_written_in_place(agent: RunningAgent) -> None:
    setting = Path("/proc/sys/net/ipv4/ip_default_ttl")
    old = setting.read_bytes()
    try:
        await write(agent, setting, b"77")
        assert setting.read_bytes() == b"77\n"
    finally:
        setting.write_bytes(old)


async def test_a_file_of_unknown_size_is_whole_or_refused(agent: RunningAgent) -> None:
    symbols = "/proc/kallsyms"
    with pytest.raises(Conflict) as e:
        await read(agent, symbols)
    assert e.value.code == "size_unknown"
    whole = Path(symbols).read_bytes()
    assert len(whole) > 4 << 20
    assert await read(agent, symbols, offset=4 << 20, length=100_000) == whole[4 << 20 :][:100_000]


async def test_a_write_in_place_keeps_the_old_bytes_where_there_is_no_room(agent: RunningAgent, shared: Path) -> None:
    """The user may write the file but nothing into its directory: its bytes are replaced, all or none."""
    full = shared / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "skerry-test", full], check=True)
    try:
        (full / "f").write_bytes(b"old" * 1000)
        os.chown(full / "f", UID, UID)
        with pytest.raises(NoSpace):
            await write(agent, full / "f", os.urandom(2 << 20), user=SOMEONE)
        assert (full / "f").read_bytes() == b"old" * 1000
        for size in (500_000, 10, 0):
            data = os.urandom(size)
            await write(agent, full / "f", data, user=SOMEONE)
            assert (full / "f").read_bytes() == data
    finally:
        subprocess.run(["umount", full], check=True)
