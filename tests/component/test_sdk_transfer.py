"""Trees between this machine's real file system and a guest, which may be hostile."""

import json
import os
import socket
import stat
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from skerry import Client, Forbidden, Gone, NoSpace, NotFound, Sandbox, TransferIncomplete
from support.scripted_server import SANDBOX


class Guest:
    """A guest's files as a dictionary: path to (kind, mode, mtime, content)."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[str, int, int, bytes]] = {"/": ("directory", 0o755, 1, b"")}
        self.refused: dict[str, tuple[int, str]] = {}
        self.extra: list[dict[str, Any]] = []
        """Listed, but not there: what a hostile guest says."""

    def entry(self, path: str) -> dict[str, Any]:
        kind, mode, mtime, content = self.entries[path]
        return {
            "path": path,
            "name": PurePosixPath(path).name,
            "kind": kind,
            "size": len(content),
            "mode": f"{mode:04o}",
            "uid": 1000,
            "gid": 1000,
            "owner": "user",
            "group": "user",
            "mtime_ns": mtime,
            "target": content.decode("utf-8", "surrogateescape") if kind == "symlink" else None,
            "error": None,
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if "/files" not in request.url.path:
            return httpx.Response(200, json=SANDBOX)
        query = {k: v[0] for k, v in parse_qs(request.url.query.decode(), errors="surrogateescape").items()}
        body = json.loads(request.content) if request.headers.get("content-type") == "application/json" else {}
        path = query.get("path") or body.get("path") or ""
        if path in self.refused:
            status, code = self.refused[path]
            return httpx.Response(status, json={"status": status, "code": code, "detail": "refused", "retry": "never"})
        action = request.url.path.partition("/files")[2]
        return getattr(self, f"do_{request.method.lower()}{action.replace('/', '_')}")(path, query, body, request)

    def answer(self, value: Any) -> httpx.Response:
        return httpx.Response(200, content=json.dumps(value).encode())

    def missing(self) -> httpx.Response:
        return httpx.Response(404, json={"status": 404, "code": "path_not_found", "detail": "is not there"})

    def do_get_stat(self, path: str, *_: Any) -> httpx.Response:
        return self.answer(self.entry(path)) if path in self.entries else self.missing()

    def do_get(self, path: str, *_: Any) -> httpx.Response:
        return httpx.Response(200, content=self.entries[path][3]) if path in self.entries else self.missing()

    def do_put(self, path: str, query: dict[str, str], _body: Any, request: httpx.Request) -> httpx.Response:
        mode, mtime = int(query.get("mode", "644"), 8), int(query.get("mtime_ns", 1))
        self.entries[path] = ("file", mode, mtime, request.content)
        return self.answer(self.entry(path))

    def do_delete(self, path: str, *_: Any) -> httpx.Response:
        del self.entries[path]
        return httpx.Response(204)

    def do_post_mkdir(self, path: str, _query: Any, body: dict[str, str], *_: Any) -> httpx.Response:
        new = path not in self.entries
        self.entries[path] = ("directory", int(body.get("mode", "755"), 8), 1, b"")
        return self.answer({"created": new, "entry": self.entry(path)})

    def do_post_symlink(self, path: str, _query: Any, body: dict[str, str], *_: Any) -> httpx.Response:
        self.entries[path] = ("symlink", 0o777, 1, body["target"].encode("utf-8", "surrogateescape"))
        return self.answer(self.entry(path))

    def do_get_list(self, path: str, query: dict[str, str], *_: Any) -> httpx.Response:
        base = len(PurePosixPath(path).parts)
        below = [
            self.entry(p)
            for p in sorted(self.entries)
            if p.startswith(path.rstrip("/") + "/")
            and p != path
            and len(PurePosixPath(p).parts) - base <= int(query["depth"])
        ] + self.extra
        lines = [*below, {"type": "end", "count": len(below)}]
        return httpx.Response(200, content=b"".join(json.dumps(line).encode() + b"\n" for line in lines))


@pytest.fixture
def guest() -> Guest:
    return Guest()


@pytest.fixture
def sandbox(guest: Guest) -> Sandbox:
    client = Client("http://guest", "key", transport=httpx.MockTransport(guest))
    return Sandbox.connect(SANDBOX["id"], client=client)


def tree(root: Path) -> dict[str, Any]:
    """What a tree holds: kinds, modes, times, contents."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = stat.S_IMODE(status.st_mode)
        else:
            found[name] = (stat.S_IMODE(status.st_mode), status.st_mtime_ns, path.read_bytes())
    return found


def test_a_tree_comes_back_as_it_went(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "empty-dir").mkdir(mode=0o700)
    (source / "empty").touch()
    (source / "a b.txt").write_bytes(bytes(range(256)))
    (source / "deep/er/big").write_bytes(os.urandom(1_000_000))
    (source / "deep/run.sh").write_text("#!/bin/sh\n")
    (source / "deep/run.sh").chmod(0o755)
    (source / "link").symlink_to("a b.txt")
    (source / "dangling").symlink_to("nowhere")
    (source / "dir-link").symlink_to("deep")
    (source / os.fsdecode(b"odd\xff")).write_text("x")
    os.utime(source / "empty", ns=(5, 1_600_000_000_123_456_789))
    assert sandbox.files.upload(source, "/home/user/tree") == 12
    assert guest.entries["/home/user/tree/dir-link"][0] == "symlink"
    back = tmp_path / "back"
    assert sandbox.files.download("/home/user/tree", back) == 12
    assert tree(back) == tree(source)


def test_a_second_upload_replaces_links_and_files(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/l").symlink_to("one")
    sandbox.files.upload(tmp_path / "s", "/t")
    (tmp_path / "s/l").unlink()
    (tmp_path / "s/l").symlink_to("two")
    sandbox.files.upload(tmp_path / "s", "/t")
    assert guest.entries["/t/l"][3] == b"two"


def test_one_file_and_a_named_link_are_followed(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("content")
    (tmp_path / "l").symlink_to("f")
    assert sandbox.files.upload(tmp_path / "l", "/f") == 1
    assert guest.entries["/f"][0] == "file"
    assert sandbox.files.download("/f", tmp_path / "back") == 1
    assert (tmp_path / "back").read_text() == "content"


def test_each_failure_of_an_upload_is_named_and_the_rest_is_copied(
    sandbox: Sandbox, guest: Guest, tmp_path: Path
) -> None:
    source = tmp_path / "s"
    source.mkdir()
    for name in "abcd":
        (source / name).write_text(name)
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(source / "socket"))
    guest.refused["/t/b"] = (507, "no_space")
    with pytest.raises(TransferIncomplete) as caught:
        sandbox.files.upload(source, "/t")
    failed = {Path(path).name: error for path, error in caught.value.errors}
    assert set(failed) == {"b", "fifo", "socket"}
    assert isinstance(failed["b"], NoSpace)
    assert {p for p in guest.entries if p.startswith("/t/")} == {"/t/a", "/t/c", "/t/d"}


def test_a_local_file_that_cannot_be_read_is_typed(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        sandbox.files.upload(tmp_path / "none", "/t")
    assert caught.value.code == "local_file"
    with pytest.raises(NotFound):
        sandbox.files.download("/none", tmp_path / "x")


def test_a_sandbox_that_ends_ends_the_copy_at_once(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    (source / "a").write_text("a")
    (source / "b").write_text("b")
    guest.refused["/t/a"] = (410, "sandbox_killed")
    with pytest.raises(Gone):
        sandbox.files.upload(source, "/t")
    assert "/t/b" not in guest.entries


def test_write_many(sandbox: Sandbox, guest: Guest) -> None:
    assert [e.path for e in sandbox.files.write_many({"/a": "1", "/b": b"2"})] == ["/a", "/b"]
    guest.refused["/c"] = (400, "is_a_directory")
    with pytest.raises(TransferIncomplete) as caught:
        sandbox.files.write_many([("/c", "x"), ("/d", "y")])
    assert [path for path, _ in caught.value.errors] == ["/c"]
    assert guest.entries["/d"][3] == b"y"


def listed(guest: Guest, path: str, kind: str = "file", target: str | None = None) -> dict[str, Any]:
    guest.entries["/model"] = ("file", 0o644, 1, b"")
    return {**guest.entry("/model"), "path": path, "name": "x", "kind": kind, "target": target}


@pytest.mark.parametrize(
    "path", ["/t/../../escape", "/t/..", "/escape", "/tescape", "/t//escape", "escape", "/t/a\0b", "/t/./x"]
)
def test_a_guest_cannot_name_a_place_outside(sandbox: Sandbox, guest: Guest, tmp_path: Path, path: str) -> None:
    guest.entries["/t"] = ("directory", 0o755, 1, b"")
    guest.entries[path] = ("file", 0o644, 1, b"evil")
    guest.extra = [listed(guest, path)]
    del guest.entries[path]
    guest.entries.pop("/model")
    with pytest.raises(TransferIncomplete):
        sandbox.files.download("/t", tmp_path / "in/t")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_guest_cannot_write_through_a_link_of_its_own(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    guest.entries["/t"] = ("directory", 0o755, 1, b"")
    guest.entries["/t/dir/file"] = ("file", 0o644, 1, b"evil")
    evil = listed(guest, "/t/dir", "symlink", str(outside))
    del guest.entries["/model"]
    guest.extra = [evil, {**evil, "kind": "directory", "target": None}]
    with pytest.raises(TransferIncomplete):
        sandbox.files.download("/t", tmp_path / "t")
    assert list(outside.iterdir()) == []


def test_nothing_is_written_through_a_link_that_was_there(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t/dir").symlink_to(tmp_path / "outside")
    for path, kind in (("/t", "directory"), ("/t/dir", "directory"), ("/t/dir/f", "file")):
        guest.entries[path] = (kind, 0o755, 1, b"x")
    with pytest.raises(TransferIncomplete) as caught:
        sandbox.files.download("/t", tmp_path / "t")
    assert any(isinstance(error, Forbidden) for _, error in caught.value.errors)
    assert list((tmp_path / "outside").iterdir()) == []


def test_set_user_id_bits_stay_in_the_guest(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    guest.entries["/f"] = ("file", 0o6755, 1, b"x")
    sandbox.files.download("/f", tmp_path / "f")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o755


def test_a_tree_deeper_than_one_listing(sandbox: Sandbox, guest: Guest, tmp_path: Path) -> None:
    path = "/t"
    guest.entries[path] = ("directory", 0o755, 1, b"")
    for _ in range(130):
        path += "/d"
        guest.entries[path] = ("directory", 0o755, 1, b"")
    guest.entries[path + "/f"] = ("file", 0o644, 1, b"deep")
    assert sandbox.files.download("/t", tmp_path / "t") == 132
    assert tmp_path.joinpath("t", *["d"] * 130, "f").read_bytes() == b"deep"
