"""Files, as a user of the sync Python client calls them."""

import io
from datetime import UTC, datetime, timedelta

import httpx
from e2b import (
    AuthenticationException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
)
from shared import raises, sandbox, since


def test_text_and_bytes_round_trip():
    files = sandbox().files
    info = files.write("hello.txt", "Grüße 👩‍👧\n")
    assert (info.name, info.path, info.type) == ("hello.txt", "/home/user/hello.txt", FileType.FILE)
    assert files.read("hello.txt") == "Grüße 👩‍👧\n"
    blob = bytes(range(256)) * 4096
    files.write("blob", blob)
    assert files.read("blob", format="bytes") == blob
    assert b"".join(files.read("blob", format="stream")) == blob
    files.write("empty", "")
    assert files.read("empty") == ""


def test_gzip_both_ways():
    files = sandbox().files
    text = "the same again and again " * 20_000
    files.write("packed.txt", text, gzip=True)
    assert files.get_info("packed.txt").size == len(text)
    assert files.read("packed.txt", gzip=True) == text
    assert b"".join(files.read("packed.txt", format="stream", gzip=True)) == text.encode()


def test_a_file_object_is_streamed():
    files = sandbox().files
    blob = bytes(range(256)) * 20_000
    files.write("from-object", io.BytesIO(blob))
    assert files.read("from-object", format="bytes") == blob
    files.write("as-form", io.BytesIO(blob), use_octet_stream=False)
    assert files.read("as-form", format="bytes") == blob


def test_an_iterable_is_streamed():
    since(2, 63)
    files = sandbox().files
    files.write("from-pieces", (b"piece %d\n" % n for n in range(1000)))
    assert files.read("from-pieces").endswith("piece 999\n")


def test_several_files_in_one_call():
    files = sandbox().files
    names = ["many/a.txt", "many/deep/b.txt", "/tmp/many c.txt", "many/日本.txt"]
    written = files.write_files([{"path": name, "data": f"in {name}"} for name in names])
    assert [info.path for info in written] == [
        "/home/user/many/a.txt", "/home/user/many/deep/b.txt", "/tmp/many c.txt", "/home/user/many/日本.txt",
    ]  # fmt: skip
    assert [files.read(name) for name in names] == [f"in {name}" for name in names]
    assert files.write_files([]) == []


def test_parents_are_made_and_all_is_the_users_even_where_only_root_may_write():
    box = sandbox()
    box.files.write("/srv/app/main.py", "print(1)")
    told = box.commands.run("stat -c '%U:%G %a' /srv/app /srv/app/main.py").stdout
    assert told == "user:user 755\nuser:user 644\n"
    box.files.write("/root/of-root", "x", user="root")
    assert box.files.get_info("/root/of-root", user="root").owner == "root"
    box.files.write("~/relative", "home of root", user="root")
    assert box.files.read("/root/relative") == "home of root"


def test_overwriting_keeps_the_file_and_its_mode():
    box = sandbox()
    box.commands.run("echo old > kept; chmod 750 kept; ln kept other-name")
    box.files.write("kept", "new")
    assert box.commands.run("cat other-name; stat -c %a kept").stdout == "new750\n"


def test_what_cannot_be_read_or_written_is_told():
    files = sandbox().files
    with raises(NotFoundException, "path '/home/user/missing' does not exist"):
        files.read("missing")
    with raises(NotFoundException, "path '/home/user/missing' does not exist"):
        list(files.read("missing", format="stream"))
    files.make_dir("a-directory")
    with raises(InvalidArgumentException, "is a directory"):
        files.read("a-directory")
    with raises(InvalidArgumentException, "is a directory"):
        files.write("a-directory", "x")
    with raises(AuthenticationException, "nobody-here"):
        files.read("hello.txt", user="nobody-here")
    with raises(AuthenticationException, "nobody-here"):
        files.write("hello.txt", "x", user="nobody-here")
    with raises(AuthenticationException, "invalid username: 'nobody-here'"):
        files.list("/", user="nobody-here")


def test_a_full_disk_is_told():
    from e2b import NotEnoughSpaceException

    box = sandbox()
    box.commands.run("mkdir -p small && mount -t tmpfs -o size=1m none small && chmod 777 small", user="root", cwd="/")
    with raises(NotEnoughSpaceException):
        box.files.write("/small/too-much", b"x" * 3_000_000)
    assert not box.files.exists("/small/too-much")


def test_metadata_is_kept_replaced_and_cleared():
    files = sandbox().files
    info = files.write("tagged", "x", metadata={"Author": "me", "k-2": "v v"})
    assert info.metadata == {"author": "me", "k-2": "v v"}
    assert files.get_info("tagged").metadata == {"author": "me", "k-2": "v v"}
    assert sandbox().commands.run("python3 -c \"import os; print(os.getxattr('tagged','user.e2b.author'))\"").stdout
    files.write("tagged", "y", metadata={"other": "1"})
    (entry,) = [entry for entry in files.list(".") if entry.name == "tagged"]
    assert entry.metadata == {"other": "1"}
    files.write("tagged", "z")
    assert files.get_info("tagged").metadata is None
    with raises(InvalidArgumentException):
        files.write("tagged", "x", metadata={"k": "x" * 5000})


def test_entries_say_what_they_are():
    box = sandbox()
    box.commands.run(
        "mkdir -p kinds && cd kinds && echo 12345 > f && chmod 640 f && ln -s f to-f && ln -s . to-d && ln -s no x"
    )
    info = box.files.get_info("kinds/f")
    assert (info.name, info.type, info.path, info.size) == ("f", FileType.FILE, "/home/user/kinds/f", 6)
    assert (info.mode, info.permissions, info.owner, info.group) == (0o640, "-rw-r-----", "user", "user")
    assert abs(datetime.now(UTC) - info.modified_time.astimezone(UTC)) < timedelta(hours=1)
    assert info.symlink_target is None
    assert box.files.get_info("/tmp").permissions == "dtrwxrwxrwx"
    link = box.files.get_info("kinds/to-f")
    assert (link.symlink_target, link.permissions) == ("/home/user/kinds/f", "Lrwxrwxrwx")
    from shared import GENERATION

    assert link.type is (FileType.SYMLINK if GENERATION >= (2, 63) else FileType.FILE)
    assert [entry.name for entry in box.files.list("kinds")] == ["f", "to-d", "to-f"]  # what leads nowhere is dropped


def test_listing_goes_as_deep_as_asked():
    files = sandbox().files
    files.write_files([{"path": f"tree/{name}", "data": ""} for name in ("b/c/d", "b/x", "a", "z")])
    assert [entry.path for entry in files.list("tree", depth=3)] == [
        f"/home/user/tree/{name}" for name in ("a", "b", "b/c", "b/c/d", "b/x", "z")
    ]
    assert [entry.name for entry in files.list("tree")] == ["a", "b", "z"]
    with raises(NotFoundException):
        files.list("no-such-tree")
    with raises(InvalidArgumentException):
        files.list("tree/a")
    with raises(InvalidArgumentException, "depth"):
        files.list("tree", depth=0)


def test_directories_are_made_once():
    files = sandbox().files
    assert files.make_dir("made/with/parents") is True
    assert files.make_dir("made/with/parents") is False
    assert sandbox().commands.run("stat -c '%U %a' made made/with").stdout == "user 755\nuser 755\n"
    files.write("made/file", "")
    with raises(InvalidArgumentException):
        files.make_dir("made/file")


def test_existence():
    files = sandbox().files
    files.write("there", "")
    assert files.exists("there") is True
    assert files.exists("not there") is False


def test_renaming_makes_parents():
    files = sandbox().files
    files.write("old-name", "kept")
    info = files.rename("old-name", "new/place/name")
    assert (info.name, info.path) == ("name", "/home/user/new/place/name")
    assert files.read("new/place/name") == "kept"
    assert not files.exists("old-name")
    with raises(NotFoundException):
        files.rename("old-name", "x")


def test_removing_is_for_trees_and_for_what_is_not_there():
    files = sandbox().files
    files.write("gone/deep/file", "")
    files.remove("gone")
    assert not files.exists("gone")
    files.remove("gone")


# -------------------------------------------------------------------------------------------------------------- URLs


def test_signed_urls_download_and_upload():
    box = sandbox()
    box.files.write("signed.txt", "from the inside")
    assert httpx.get(box.download_url("signed.txt", use_signature_expiration=60)).text == "from the inside"
    url = box.upload_url("put.txt", use_signature_expiration=60)
    assert httpx.post(url, files={"file": ("put.txt", b"from the outside")}).status_code == 200
    assert box.files.read("put.txt") == "from the outside"
    url = box.download_url("~/put.txt", user="root", use_signature_expiration=60)
    assert httpx.get(url).status_code == 404


def test_signed_urls_are_refused_when_over_or_changed():
    box = sandbox()
    url = box.download_url("signed.txt", use_signature_expiration=-10)
    answer = httpx.get(url)
    assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "signature is already expired"})
    url = box.download_url("signed.txt", use_signature_expiration=60)
    for wrong in (url.replace("signed.txt", "other.txt"), url.replace("signature=v1_", "signature=v1_x")):
        answer = httpx.get(wrong)
        assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "invalid signature"})
    answer = httpx.post(url, files={"file": ("x", b"")})
    assert (answer.status_code, answer.json()["message"]) == (401, "invalid signature")
    answer = httpx.get(url.partition("&signature")[0].partition("?signature")[0])
    assert (answer.status_code, answer.json()["message"]) == (401, "missing signature query parameter")


# ------------------------------------------------------------------------------------------------------------ watches


def test_a_watch_tells_what_changes():
    from e2b import FilesystemEventType as Kind

    files = sandbox().files
    files.make_dir("watched")
    handle = files.watch_dir("watched")
    files.write("watched/new", "1")
    events = handle.get_new_events()
    assert [(e.type, e.name) for e in events] == [(Kind.CREATE, "new"), (Kind.CHMOD, "new"), (Kind.WRITE, "new")]
    files.write("watched/new", "2")
    assert {(e.type, e.name) for e in handle.get_new_events()} == {(Kind.WRITE, "new")}
    files.rename("watched/new", "watched/renamed")
    assert [(e.type, e.name) for e in handle.get_new_events()] == [(Kind.RENAME, "new"), (Kind.CREATE, "renamed")]
    files.remove("watched/renamed")
    assert [(e.type, e.name) for e in handle.get_new_events()] == [(Kind.REMOVE, "renamed")]
    assert handle.get_new_events() == []
    handle.stop()
    with raises(SandboxException):
        handle.get_new_events()


def test_a_recursive_watch_tells_what_changes_below():
    files = sandbox().files
    files.make_dir("watched-deep")
    handle = files.watch_dir("watched-deep", recursive=True)
    files.make_dir("watched-deep/inner")
    handle.get_new_events()
    files.write("watched-deep/inner/file", "1")
    names = [event.name for event in handle.get_new_events()]
    assert set(names) == {"inner/file"}
    handle.stop()


def test_a_watch_can_tell_of_the_entry():
    since(2, 63)
    files = sandbox().files
    files.make_dir("watched-entry")
    handle = files.watch_dir("watched-entry", include_entry=True, allow_network_mounts=True)
    files.write("watched-entry/file", "12345")
    assert handle.get_new_events()[-1].entry.size == 5
    files.remove("watched-entry/file")
    assert handle.get_new_events()[-1].entry is None
    handle.stop()


def test_what_cannot_be_watched_is_told():
    files = sandbox().files
    with raises(NotFoundException):
        files.watch_dir("no-such-directory")
    files.write("a-file", "")
    with raises(SandboxException):
        files.watch_dir("a-file")
