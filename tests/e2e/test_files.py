"""Files on a real VM: names, bytes, sizes, links, users, watches. Cases BUG-18 to BUG-27."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skerry import NoSpace, Sandbox, SkerryError
from support.server import Server
from support.waiting import wait_until

NAMES = [
    "a b.txt", " lead", "trail ", "q'\"q", "$(touch pwned)", "`id`", ";rm -rf x", "-rf", "--help", "*", "?", "\\",
    "new\nline", "tab\t", "日本語", "👩‍👩‍👧", "\u00e9", "e\u0301", "\u202ertl", "%2e%2e", "%20", "+", "#", "a&b=c",
    ".hidden", "...", "n" * 255, "\udcff\udcfe-not-utf8",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_legal_name_makes_the_round_trip(sandbox: Sandbox, name: str) -> None:
    path = f"/home/user/names/{name}"
    assert sandbox.files.write(path, "content of it").path == path
    assert sandbox.files.stat(path).name == name
    assert name in [e.name for e in sandbox.files.list("/home/user/names")]
    assert sandbox.files.read(path) == "content of it"
    sandbox.files.move(path, "/home/user/names/moved")
    assert not sandbox.files.exists(path)
    sandbox.files.move("/home/user/names/moved", path)
    sandbox.files.remove(path)
    assert [e.name for e in sandbox.files.list("/home/user/names")] == []


def test_a_watch_tells_every_legal_name(sandbox: Sandbox) -> None:
    sandbox.files.mkdir("told")
    with sandbox.files.watch("told") as watch:
        for name in NAMES:
            sandbox.files.write(f"told/{name}", "x")
        sandbox.files.write("told/last", "x")
        seen = set()
        for event in watch:
            seen.add(event.path)
            if event.path == "last":
                break
    assert seen >= set(NAMES)


def test_composed_and_decomposed_are_two_files(sandbox: Sandbox) -> None:
    sandbox.files.write("nfc/\u00e9", "composed")
    sandbox.files.write("nfc/e\u0301", "decomposed")
    assert sandbox.files.read("nfc/\u00e9") == "composed"
    assert len(list(sandbox.files.list("nfc"))) == 2


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/tmp/" + "n" * 256, "path_too_long"),
        ("/" + "d/" * 2100, "path_too_long"),
        ("", "invalid_path"),
        ("/tmp/a\0b", "invalid_path"),
    ],
)
def test_a_path_that_cannot_be_is_refused_by_name(sandbox: Sandbox, path: str, code: str) -> None:
    for act in (lambda: sandbox.files.write(path, "x"), lambda: sandbox.files.read(path)):
        with pytest.raises(SkerryError) as refused:
            act()
        assert refused.value.code == code
        assert refused.value.status == 400


def test_paths_are_normalised_and_returned(sandbox: Sandbox) -> None:
    assert sandbox.files.write("../../tmp/up.txt", "x").path == "/tmp/up.txt"
    assert sandbox.files.write("/a/../tmp/b.txt", "x").path == "/tmp/b.txt"
    assert sandbox.files.write("x//y/./z", "x").path == "/home/user/x/y/z"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x89PNG\r\n\x1a\n", bytes(range(256)) * 4096, b"1", b"a\r\nb\r\n", "snow ☃".encode("utf-16"), b"a\0b",
        b"\x1f\x8b\x08\0\0\0\0\0", b"EOF\nSANDBOX_EOF\n-----BOUNDARY\n", os.urandom(10_000_000),
    ],
    ids=lambda c: f"{len(c)}-bytes",
)  # fmt: skip
def test_bytes_in_are_bytes_out(sandbox: Sandbox, content: bytes) -> None:
    entry = sandbox.files.write("bytes.bin", content)
    assert entry.size == len(content)
    assert sandbox.files.read_bytes("bytes.bin") == content
    assert b"".join(sandbox.files.stream("bytes.bin")) == content
    assert sandbox.run("sha256sum < bytes.bin").stdout.split()[0] == hashlib.sha256(content).hexdigest()
    if content:
        assert sandbox.files.read_bytes("bytes.bin", offset=1, length=3) == content[1:4]
        assert sandbox.files.read_bytes("bytes.bin", offset=len(content) + 5) == b""
        assert b"".join(sandbox.files.stream("bytes.bin", length=0)) == b""


def test_a_big_file_streams_and_nothing_grows(sandbox: Sandbox, server: Server) -> None:
    size, block = 512 * 1024 * 1024, os.urandom(1 << 20)
    sent, got = hashlib.sha256(), hashlib.sha256()

    def produce() -> Iterator[bytes]:
        for _ in range(size >> 20):
            sent.update(block)
            yield block

    assert server.process
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    assert sandbox.files.write("/tmp/big.bin", produce()).size == size
    for chunk in sandbox.files.stream("/tmp/big.bin"):
        got.update(chunk)
    assert got.digest() == sent.digest()
    assert process.memory_info().rss - before < 64 * 1024 * 1024
    sandbox.files.remove("/tmp/big.bin")


def test_a_page_of_a_sparse_file_is_only_that(sandbox: Sandbox) -> None:
    sandbox.run("truncate -s 8G /tmp/sparse; printf end | dd of=/tmp/sparse bs=1 seek=8589934589 conv=notrunc")
    assert sandbox.files.stat("/tmp/sparse").size == 8 * 1024**3
    assert sandbox.files.read_bytes("/tmp/sparse", offset=8 * 1024**3 - 3, length=10) == b"end"
    sandbox.files.remove("/tmp/sparse")


def test_a_stream_that_breaks_leaves_the_old_content(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/abort/kept.txt", "old")

    def broken() -> Iterator[bytes]:
        yield b"new" * 100_000
        raise RuntimeError("the client fell over")

    with pytest.raises(RuntimeError):
        sandbox.files.write("/tmp/abort/kept.txt", broken())
    assert sandbox.files.read("/tmp/abort/kept.txt") == "old"
    # the server has to see that the client is gone
    wait_until(lambda: [e.name for e in sandbox.files.list("/tmp/abort")] == ["kept.txt"])
    assert sandbox.files.read("/tmp/abort/kept.txt") == "old"


def test_a_path_of_any_legal_depth_is_written_listed_and_removed(sandbox: Sandbox) -> None:
    deep = "/home/user/deep" + "/d" * 1500 + "/f"
    sandbox.files.write(deep, "down here")
    assert sandbox.files.read(deep) == "down here"
    assert sandbox.run(["find", "deep", "-type", "f"]).stdout == deep.removeprefix("/home/user/") + "\n"
    sandbox.files.remove("deep")
    assert not sandbox.files.exists("deep")


def test_what_names_a_directory_is_no_file(sandbox: Sandbox) -> None:
    sandbox.files.write("slash/f", "old")
    for path in ("slash/f/", "slash/new/", "slash"):
        with pytest.raises(SkerryError) as refused:
            sandbox.files.write(path, "x")
        assert refused.value.code == "is_a_directory"
    assert [(e.name, e.size) for e in sandbox.files.list("slash")] == [("f", 3)]


def test_files_of_the_kernel_are_whole_or_refused(sandbox: Sandbox) -> None:
    assert sandbox.files.read("/proc/sys/kernel/ostype") == "Linux\n"
    sandbox.files.write("/proc/sys/net/ipv4/ip_default_ttl", "77", user="root")
    assert sandbox.run(["cat", "/proc/sys/net/ipv4/ip_default_ttl"]).stdout == "77\n"
    with pytest.raises(SkerryError) as refused:
        sandbox.files.read_bytes("/proc/kallsyms")
    assert (refused.value.code, refused.value.status) == ("size_unknown", 409)
    assert len(sandbox.files.read_bytes("/proc/kallsyms", offset=5 << 20, length=1000)) == 1000


def test_a_full_disk_is_said_and_leaves_nothing_half(client: dict[str, str]) -> None:
    with Sandbox.create(disk_mb=2048, **client) as sandbox:
        sandbox.files.write("/home/user/full/kept.txt", "old")
        sandbox.run("fallocate -l 1900M /tmp/ballast || true", user="root", timeout=120)
        with pytest.raises(NoSpace) as refused:
            sandbox.files.write("/home/user/full/kept.txt", (b"x" * (1 << 20) for _ in range(2048)))
        assert refused.value.status == 507
        assert sandbox.files.read("/home/user/full/kept.txt") == "old"
        assert [e.name for e in sandbox.files.list("/home/user/full")] == ["kept.txt"]


def test_a_tree_is_uploaded_and_downloaded_with_names_in_errors(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for n in range(300):
        (tree / f"d{n % 10}").mkdir(parents=True, exist_ok=True)
        (tree / f"d{n % 10}" / f"file {n}").write_bytes(os.urandom(n))
    (tree / "empty").touch()
    (tree / "link").symlink_to("empty")
    sandbox.files.upload(tree, "/home/user/tree")
    assert sandbox.run("find tree -type f | wc -l; readlink tree/link").stdout.split() == ["301", "empty"]
    sandbox.files.download("/home/user/tree", tmp_path / "back")
    assert subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "back"]).returncode == 0


# --------------------------------------------------------------------------------------- links and lists (BUG-23)


def test_links_are_links(sandbox: Sandbox) -> None:
    sandbox.run(
        "mkdir -p l/realdir/sub && cd l && echo x > realdir/f && ln -s realdir dir && ln -s . loop"
        " && ln -s nope dangling && ln -s b a && ln -s a b && mkfifo fifo && chmod 4755 realdir/f"
    )
    entries = {e.path: e for e in sandbox.files.list("l", depth=5)}
    assert entries["/home/user/l/dir"].kind == "symlink"
    assert entries["/home/user/l/dir"].target == "realdir"
    assert entries["/home/user/l/fifo"].kind == "fifo"
    assert entries["/home/user/l/realdir/f"].mode == 0o4755
    assert not any(p.startswith(("/home/user/l/dir/", "/home/user/l/loop/")) for p in entries)
    assert [e.path for e in sandbox.files.list("l/dir")] == ["/home/user/l/dir/f", "/home/user/l/dir/sub"]
    assert sandbox.files.exists("l/dangling")
    for path, code in (("l/fifo", "not_a_regular_file"), ("l/a", "path_not_found"), ("l/realdir", "is_a_directory")):
        with pytest.raises(SkerryError) as refused:
            sandbox.files.read(path)
        assert refused.value.code in {code, "symlink_loop"}
    sandbox.files.remove("l/dir")
    assert sandbox.files.exists("l/realdir/f")
    sandbox.files.remove("l")
    assert not sandbox.files.exists("l")


def test_a_move_is_rename_and_more_across_filesystems(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p m/d m/full; echo 1 > m/f; echo 2 > m/g; echo z > m/full/x; ln -s f m/l", check=True)
    sandbox.files.move("m/l", "m/link")
    assert (sandbox.files.stat("m/link").kind, sandbox.files.stat("m/link").target) == ("symlink", "f")
    sandbox.files.move("m/f", "m/g")
    assert sandbox.files.read("m/g") == "1\n"
    sandbox.files.move("m/full", "m/d")  # an empty directory gives way
    sandbox.files.mkdir("m/other")
    for source, target, code in (
        ("m/g", "m/d", "is_a_directory"),
        ("m/d", "m/g", "not_a_directory"),
        ("m/other", "m/d", "directory_not_empty"),
        ("m/d", "m/d/below", "invalid_request"),
        ("m/none", "m/x", "path_not_found"),
    ):
        with pytest.raises(SkerryError) as refused:
            sandbox.files.move(source, target)
        assert refused.value.code == code
    sandbox.files.move("m/g", "/dev/shm/g")
    sandbox.files.move("m/d", "/dev/shm/d")
    assert (sandbox.files.read("/dev/shm/g"), sandbox.files.read("/dev/shm/d/x")) == ("1\n", "z\n")
    assert [entry.name for entry in sandbox.files.list("m")] == ["link", "other"]


def test_a_file_that_grows_or_shrinks_meanwhile_is_read_or_refused(sandbox: Sandbox) -> None:
    change = "while :; do truncate -s 0 changing; head -c 3000000 /dev/zero >> changing; done"
    changing = sandbox.commands.start(change)
    for _ in range(10):
        try:
            sandbox.files.read_bytes("changing")
        except SkerryError as error:  # it became shorter than it was said to be; or it is not there yet
            assert error.code in {"connection_lost", "path_not_found"}
    changing.kill()
    assert sandbox.run("echo alive").stdout == "alive\n"


def test_twenty_thousand_entries_come_complete_and_in_order(sandbox: Sandbox) -> None:
    sandbox.run("mkdir many && cd many && seq -f %05g 1 20000 | xargs touch", timeout=120)
    assert [e.name for e in sandbox.files.list("many")] == [f"{n:05}" for n in range(1, 20001)]
    sandbox.files.remove("many")


def test_metadata_is_what_stat_says(sandbox: Sandbox) -> None:
    sandbox.run("touch -d '1999-12-31 23:59:59.123456789 UTC' t; chmod 640 t; echo 12345 > s")
    entry = sandbox.files.stat("t")
    assert entry.mtime_ns == 946684799_123456789
    assert (entry.mode, entry.owner, entry.group, entry.uid) == (0o640, "user", "user", 1000)
    assert sandbox.files.stat("s").size == 6


def test_an_unreadable_directory_is_said_in_its_entry(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p p/closed p/open && touch p/open/f && chmod 000 p/closed")
    entries = {e.name: e for e in sandbox.files.list("p", depth=2)}
    assert entries["closed"].error
    assert "f" in entries


# --------------------------------------------------------------------------------------------- whose (BUG-18)


def test_users_have_their_own_homes_and_rights(sandbox: Sandbox) -> None:
    assert sandbox.files.write("rel.txt", "r", user="root").path == "/root/rel.txt"
    assert sandbox.files.stat("/root/rel.txt", user="root").owner == "root"
    assert sandbox.files.write("rel.txt", "u").path == "/home/user/rel.txt"
    assert sandbox.files.write("~/t.txt", "u").path == "/home/user/t.txt"
    sandbox.run("echo 1 > /tmp/a")
    sandbox.files.write("/tmp/a", "2")
    sandbox.run("echo 3 | sudo tee /tmp/a", user="user")
    sandbox.files.write("/tmp/a", "4")
    assert sandbox.run("cat /tmp/a").stdout == "4"
    sandbox.run("echo s > /root/secret; touch /tmp/roots", user="root")
    for act in (
        lambda: sandbox.files.write("/etc/x", "x"),
        lambda: sandbox.files.read("/root/secret"),
        lambda: sandbox.files.remove("/tmp/roots"),
    ):
        with pytest.raises(SkerryError) as refused:
            act()
        assert (refused.value.code, refused.value.status) == ("permission_denied", 403)
    with pytest.raises(SkerryError) as below:
        sandbox.files.write("/home/user/rel.txt/below", "x")
    assert below.value.code == "not_a_directory"
    with pytest.raises(SkerryError) as directory:
        sandbox.files.write("/home/user", "x")
    assert directory.value.code == "is_a_directory"


# --------------------------------------------------------------------------------------------- watches (BUG-27)


def test_a_watch_follows_renames_and_sees_saves(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p w/n1")
    with sandbox.files.watch("w", recursive=True) as watch:
        sandbox.run(
            "mv w/n1 w/n2; touch w/n2/t; echo x > w/f.tmp; mv w/f.tmp w/f; mkdir -p w/deep/er; touch w/deep/er/z"
        )
        seen: list[tuple[str, str]] = []
        for event in watch:
            seen.append((event.type, event.path))
            if event.path == "deep/er/z":
                break
    assert ("rename_from", "n1") in seen
    assert ("rename_to", "n2") in seen
    assert ("create", "n2/t") in seen
    assert any(path == "f" for _, path in seen)
    assert not any(path.startswith("n1/") for _, path in seen)


def test_an_overflowing_watch_says_so(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p flood; echo 16 | sudo tee /proc/sys/fs/inotify/max_queued_events")  # for queues made from now
    with sandbox.files.watch("flood") as watch:
        sandbox.run("cd flood && seq 1 5000 | xargs touch", timeout=280)
        with pytest.raises(SkerryError) as overflow:
            for _ in watch:
                pass
    assert overflow.value.code == "watch_overflow"


def test_a_watch_on_nothing_or_whose_root_goes_is_a_typed_error(sandbox: Sandbox) -> None:
    with pytest.raises(SkerryError) as missing:
        sandbox.files.watch("nothing-here").__enter__()
    assert missing.value.code == "path_not_found"
    sandbox.run("mkdir -p gone")
    with sandbox.files.watch("gone") as watch:
        sandbox.run("rm -r gone")
        with pytest.raises(SkerryError) as gone:
            for _ in watch:
                pass
    assert gone.value.code == "path_not_found"
