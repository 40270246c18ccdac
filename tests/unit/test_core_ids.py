"""Ids can stand in a host name, and are told apart by kind."""

import re

from hypothesis import given
from hypothesis import strategies as st

from skerry.core import ids

KINDS = [ids.SANDBOX, ids.TENANT, ids.PROJECT, ids.API_KEY, ids.PROCESS, ids.EVENT, ids.TEMPLATE, ids.BUILD]
KINDS += [ids.SNAPSHOT, ids.NODE]


@given(st.sampled_from(KINDS))
def test_a_new_id_is_a_host_name_label_of_its_kind(kind: str) -> None:
    made = ids.new_id(kind)
    assert re.fullmatch(r"[a-z0-9]{1,63}", made)
    assert ids.is_id(made, kind)
    assert [other for other in KINDS if ids.is_id(made, other)] == [kind]


def test_ids_do_not_repeat() -> None:
    assert len({ids.new_id(ids.SANDBOX) for _ in range(10_000)}) == 10_000


@given(st.text())
def test_any_text_is_judged(value: str) -> None:
    assert ids.is_id(value, ids.SANDBOX) in {True, False}


def test_what_is_no_id() -> None:
    good = ids.new_id(ids.SANDBOX)
    for bad in ("", "sb", good[:-1], good + "0", good.upper(), good + "\n", " " + good[1:], good[:-1] + "\u0661"):
        assert not ids.is_id(bad, ids.SANDBOX)
