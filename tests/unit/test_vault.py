"""Sealed texts and the file of the root key."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.errors import Conflict, Forbidden, InternalError
from skerry.vault import Key, RootKeys, Unreadable, new_key, rootkey, seal, unseal

KEY = new_key()


@given(st.binary(max_size=200), st.lists(st.text(max_size=10), max_size=4))
def test_what_was_sealed_opens_as_what_it_was(data: bytes, bound: list[str]) -> None:
    sealed = seal(KEY, data, *bound)
    assert unseal(KEY, sealed, *bound) == data
    assert sealed != seal(KEY, data, *bound)


@given(st.binary(min_size=1, max_size=60), st.data())
def test_nothing_that_was_changed_opens(data: bytes, draw: st.DataObject) -> None:
    sealed = bytearray(seal(KEY, data, "tn1", "db", "1"))
    sealed[draw.draw(st.integers(0, len(sealed) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(Unreadable):
        unseal(KEY, bytes(sealed), "tn1", "db", "1")


@pytest.mark.parametrize(
    "bound", [(), ("tn1", "db", "2"), ("tn1", "d", "b1"), ("tn2", "db", "1"), ("tn1", "db1"), ("tn1,db,1",)]
)
def test_in_anothers_place_it_does_not_open(bound: tuple[str, ...]) -> None:
    sealed = seal(KEY, b"value", "tn1", "db", "1")
    with pytest.raises(Unreadable):
        unseal(KEY, sealed, *bound)
    with pytest.raises(Unreadable):
        unseal(new_key(), sealed, "tn1", "db", "1")
    with pytest.raises(Unreadable):
        unseal(KEY, sealed[:20], "tn1", "db", "1")


def test_a_key_does_not_show_itself() -> None:
    assert KEY.secret.hex() not in repr(KEY)
    assert repr(KEY.secret) not in repr(KEY)
    with pytest.raises(ValueError, match="32 bytes"):
        Key(b"short")


# ----------------------------------------------------------------------------------------------------------- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys" / "root-key"
    assert rootkey.create(made)
    return made


def test_it_is_made_once_for_its_owner_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = path.read_bytes()
    assert not rootkey.create(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["root-key"]


def test_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="no root key at") as refused:
        RootKeys.open(tmp_path / "none")
    assert refused.value.code == "root_key_missing"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o001])
def test_one_that_others_can_reach_is_refused_and_left_as_it_is(path: Path, mode: int) -> None:
    before = path.read_bytes()
    path.chmod(mode)
    with pytest.raises(Forbidden, match="0600") as refused:
        RootKeys.open(path)
    assert refused.value.code == "root_key_unsafe"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, mode)


def test_what_is_no_file_of_ours_is_refused(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    others = tmp_path / "others"
    others.write_bytes(path.read_bytes())
    others.chmod(0o600)
    os.chown(others, 12345, 12345)
    for wrong in (link, fifo, others, tmp_path):
        with pytest.raises(Forbidden) as refused:
            RootKeys.open(wrong)
        assert refused.value.code == "root_key_unsafe"


@pytest.mark.parametrize("change", ["", "0", "x", "two", "cut"])
def test_a_damaged_one_is_seen_and_its_key_not_told(path: Path, change: str) -> None:
    text = path.read_text()
    line = text.splitlines()[-1]
    flipped = line[:-1] + ("0" if line[-1] != "0" else "1")
    wrong = {"": "", "0": flipped, "x": line + "x", "two": f"{line}\nnonsense", "cut": line[:-2]}[change]
    path.write_text(wrong)
    with pytest.raises(InternalError) as refused:
        RootKeys.open(path)
    assert refused.value.code == "root_key_damaged"
    assert line[-20:] not in str(refused.value) + str(refused.value.context)


def test_a_rotated_file_is_read_again(path: Path) -> None:
    roots = RootKeys.open(path)
    old, new = roots.current(), new_key()
    rootkey.write(path, [new, old])
    assert roots.find(new.id) == new
    assert roots.current() == new
    assert roots.find(old.id) == old
    assert roots.find("0" * 16) is None


def test_only_one_rotates_at_a_time(path: Path) -> None:
    with rootkey.rotating(path), pytest.raises(Conflict) as refused, rootkey.rotating(path):
        pass
    assert refused.value.code == "rotation_under_way"
    with rootkey.rotating(path):
        pass
