"""The agent's pure parts: what is kept of a stream, names, users, environment, tables of numbers."""

import errno
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.guest import args, disk, errors, identity, init, metrics, paths, protocol, trees
from skerry.guest.commands import parse_signal
from skerry.guest.conn import Conn
from skerry.guest.errors import GuestError
from skerry.guest.process import shown_argv, signal_name
from skerry.guest.ring import Ring
from skerry.guest.spawn import environment, parse_environment, shell_argv
from skerry.guest.transfer import _send_range
from skerry.guest.users import Account, Users

USER = Account("ada", 1000, 1000, (1000,), "/home/ada", "/bin/bash")


@given(st.lists(st.binary(min_size=1, max_size=40_000), max_size=30), st.integers(1, 60_000), st.data())
def test_a_ring_is_the_end_of_what_was_written(parts: list[bytes], keep: int, data: st.DataObject) -> None:
    ring = Ring()
    everything = b""
    for part in parts:
        ring.append(part)
        everything += part
        before = ring.start
        assert ring.trim(keep, ring.end) == ring.start - before
        assert len(ring) >= min(keep, len(everything))
    assert ring.end == len(everything)
    assert ring.start <= max(0, len(everything) - min(keep, len(everything)))
    offset = data.draw(st.integers(ring.start, ring.end))
    got = b""
    while piece := ring.read(offset + len(got), 1000):
        got += piece
    assert got == everything[offset:]


def test_a_ring_keeps_what_somebody_still_has_to_read() -> None:
    ring = Ring()
    for _ in range(10):
        ring.append(b"x" * 20_000)
    assert ring.trim(0, 45_000) == 40_000
    assert (ring.start, len(ring)) == (40_000, 160_000)
    assert ring.clear() == 160_000
    assert (ring.start, ring.end, len(ring)) == (200_000, 200_000, 0)


@pytest.mark.parametrize(
    ("given_path", "full"),
    [
        ("/a/./b//../c/", "/a/c"),
        ("x", "/home/ada/x"),
        ("~", "/home/ada"),
        ("~/x", "/home/ada/x"),
        ("~other", "/home/ada/~other"),
        ("//a", "/a"),
        ("/../..", "/"),
        ("...", "/home/ada/..."),
        (".", "/home/ada"),
    ],
)
def test_paths(given_path: str, full: str) -> None:
    assert paths.resolve(given_path, USER) == full


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_a_resolved_path_is_absolute_and_normal(path: str) -> None:
    try:
        full = paths.resolve(path, USER)
    except GuestError as e:
        assert e.code in {"invalid_path", "path_too_long"}
        return
    assert full.startswith("/")
    assert not {"", ".", ".."} & set(full[1:].split("/")) or full == "/"


def test_users_come_from_the_files(tmp_path: Path) -> None:
    passwd, group = tmp_path / "passwd", tmp_path / "group"
    passwd.write_text(
        "root:x:0:0:root:/root:/bin/bash\n# comment\nbroken\nada:x:1000:1000::/home/ada:\n"
        "ada2:x:1000:7::/x:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\nminus:x:-1:0::/:/x\n"
    )
    group.write_text("root:x:0:\nada:x:1000:\nwheel:x:10:ada,root\nsudo:x:27:bob,ada\nbad:x:y:ada\n")
    users = Users(str(passwd), str(group))
    ada = users.find("ada")
    assert (ada.uid, ada.gid, ada.groups, ada.home, ada.shell) == (1000, 1000, (1000, 10, 27), "/home/ada", "/bin/sh")
    assert users.find("1000").name == "ada"
    assert users.find("0").groups == (0, 10)
    assert users.find("nobody").home == "/"
    number = users.find("4242")
    assert (number.name, number.uid, number.gid, number.groups, number.home) == ("4242", 4242, 4242, (4242,), "/")
    assert (users.user_name(1000), users.user_name(5), users.group_name(27)) == ("ada", "5", "sudo")
    for unknown in ("bob", "", "-1", "4294967295", "99999999999", "\u0661", "minus"):
        with pytest.raises(GuestError) as e:
            users.find(unknown)
        assert e.value.code == "user_not_found"
    passwd.write_text("bob:x:5:5::/b:/bin/sh\n")
    assert users.find("bob").uid == 5  # the files are read again when they change
    missing = Users(str(tmp_path / "no"), str(tmp_path / "no"))
    assert missing.find("0").uid == 0


def test_environment_layers() -> None:
    env = environment(
        USER,
        {"A": "image", "PATH": "/image", "HOME": "/image"},
        {"A": "sandbox", "B": "sandbox"},
        {"B": "command"},
        terminal=True,
    )
    assert env == {
        "A": "sandbox",
        "B": "command",
        "PATH": "/image",
        "HOME": "/home/ada",
        "USER": "ada",
        "LOGNAME": "ada",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    text = "A=1\n# x\nexport B='two words'\nC=\"q\"\nBAD NAME=x\nnothing\nD==x\n 9=x\n"
    assert parse_environment(text) == {"A": "1", "B": "two words", "C": "q", "D": "=x"}


def test_shell_text_has_a_limit() -> None:
    assert shell_argv("echo")[1:] == ["-c", "echo"]
    with pytest.raises(GuestError) as e:
        shell_argv("\u2603" * 43_691)  # 131,073 bytes
    assert (e.value.code, e.value.context["given"], e.value.context["allowed"]) == (
        "command_too_long",
        131_073,
        131_071,
    )


def test_signals() -> None:
    assert [parse_signal(s) for s in ("SIGINT", "int", "2", "SIGKILL", "RTMIN")] == [2, 2, 2, 9, 34]
    for bad in ("", "0", "-9", "65", "SIGNONE", "9" * 50, "\u0662"):
        with pytest.raises(GuestError) as e:
            parse_signal(bad)
        assert e.value.code == "unknown_signal"
    assert (signal_name(9), signal_name(40)) == ("SIGKILL", "SIG40")


def test_errors_of_the_kernel_have_names() -> None:
    assert errors.from_os(OSError(28, "x"), "/f").as_dict() == {
        "error": "NoSpace",
        "code": "no_space",
        "message": "/f: no space left on the guest's disk",
        "context": {"path": "/f", "errno": "ENOSPC"},
    }
    assert errors.from_os(OSError(5, "Input/output error"), "/f").code == "guest_io_error"
    assert errors.from_os(OSError("odd")).name == "InternalError"
    assert errors.show("a\nb\udcff\u202e") == "a\\nb\\xff\\u202e"


def test_requests_are_checked() -> None:
    for call, request in (
        (args.text, {"x": 1}),
        (args.text, {}),
        (args.integer, {"x": True}),
        (args.integer, {"x": -1}),
        (args.integer, {"x": 2**63}),
        (args.flag, {"x": 1}),
        (args.texts, {"x": ["a", 1]}),
        (args.texts, {"x": ["a\0"]}),
        (args.table, {"x": []}),
        (args.table, {"x": {"A=B": "1"}}),
        (args.table, {"x": {"A": "secret\0"}}),
    ):
        with pytest.raises(GuestError) as e:
            call(request, "x")
        assert e.value.code == "invalid_request"
        assert "secret" not in e.value.message


def test_long_argv_is_cut_for_lists() -> None:
    shown = shown_argv(["a", "b" * 100_000, "c"])
    assert shown[0] == "a"
    assert len("".join(shown)) < 20_000
    assert shown[-1] == "…"


def test_hosts_keep_what_is_there_and_get_one_own_line() -> None:
    first = identity.hosts_with("127.0.0.1 localhost\n10.0.0.1 db\n", "sb1")
    assert first == "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1\tsb1 # skerry\n"
    assert identity.hosts_with(first, "sb2") == first.replace("sb1", "sb2")
    assert "127.0.0.1\tlocalhost\n" in identity.hosts_with("", "sb1")


def test_metrics_tables() -> None:
    assert metrics.cpu_ticks("cpu  10 1 20 100 5 1 2 3 9 9\ncpu0 1") == (37, 142)
    assert metrics.memory_bytes("MemTotal:  100 kB\nHugePages: 3\nodd\n") == {"MemTotal": 102_400, "HugePages": 3}


def test_the_filesystems_size_is_read_from_its_superblock() -> None:
    block = bytearray(1024)
    struct.pack_into("<I", block, 4, 1000)
    struct.pack_into("<I", block, 0x18, 2)
    struct.pack_into("<H", block, 0x38, 0xEF53)
    assert disk.filesystem_size(bytes(block)) == (1000, 4096)
    struct.pack_into("<I", block, 0x60, 0x80)
    struct.pack_into("<I", block, 0x150, 1)
    assert disk.filesystem_size(bytes(block)) == (2**32 + 1000, 4096)
    assert disk.filesystem_size(bytes(1024)) is None
    assert disk.filesystem_size(b"") is None


def test_the_default_route() -> None:
    entry = init.route("169.254.0.1")
    assert len(entry) == 120
    assert entry[24:32] == struct.pack("HH4s", 2, 0, bytes([169, 254, 0, 1]))
    assert struct.unpack_from("H", entry, 56) == (3,)


def test_temporaries_are_known_by_their_name() -> None:
    assert trees.is_temporary(trees.temporary_name())
    for name in (".skerry-", ".skerry-0123456789abcdeg", "skerry-0123456789abcdef0", ".skerry-0123456789ABCDEF"):
        assert not trees.is_temporary(name)


def test_a_read_error_in_the_middle_of_a_frame_fills_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was announced is sent, so that the error that follows can be read as one."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * 1000)
    ours, theirs = socket.socketpair()
    whole = os.sendfile
    answers = iter(
        [
            lambda out, file, at, _: whole(out, file, at, 100),
            lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad sector")),
        ]
    )
    monkeypatch.setattr(os, "sendfile", lambda *a: next(answers)(*a))
    with ours, theirs, path.open("rb") as file:
        with pytest.raises(GuestError) as told:
            _send_range(Conn(ours), file.fileno(), 0, 1000, str(path))
        assert told.value.code == "guest_io_error"
        size, kind = protocol.HEADER.unpack(theirs.recv(protocol.HEADER.size, socket.MSG_WAITALL))
        assert (size, kind) == (1000, protocol.DATA)
        assert theirs.recv(size, socket.MSG_WAITALL) == b"x" * 100 + bytes(900)
