"""Watches without readers: how long they wait, what they keep, which of them goes first."""

import threading
import time

import pytest

from skerry.guest import watches
from skerry.guest.errors import GuestError
from skerry.guest.identity import Context
from skerry.guest.watches import Ended, Watch, Watches

EVENT = {"kind": "create", "path": "p" * 900, "is_dir": False, "cookie": 0}


def watch(keep: int = 10_000) -> Watch:
    return Watch("wt1", lambda: keep)


def reader(of: Watch, offset: int = 0) -> watches.Reader:
    import os

    return of.attach(offset, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def test_one_that_nobody_reads_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one = watch()
    assert one.patience() == watches.UNATTENDED_S
    held = reader(one)
    now += 10 * watches.UNATTENDED_S
    assert one.patience() is None
    one.detach(held)
    now += watches.UNATTENDED_S - 1
    assert one.patience() == pytest.approx(1)
    now += 1
    with pytest.raises(Ended):
        one.patience()


def test_too_much_unread_waits_for_the_reader() -> None:
    one = watch()
    held = reader(one)
    added: list[int] = []

    def add() -> None:
        with pytest.raises(Ended):
            for n in range(1000):
                one.add(EVENT)
                added.append(n)

    thread = threading.Thread(target=add)
    thread.start()
    told = 0
    try:
        while told < 500:
            events = one.next(held)
            told += len(events)
            one.sent(held, events)
            assert len(added) - told <= watches.UNREAD_MAX // 900 + 1
    finally:
        one.end()
        thread.join(10)
    assert not thread.is_alive()


def test_what_was_read_is_kept_up_to_a_bound_and_what_was_not_is_kept_whole() -> None:
    one = watch(keep=5000)
    held = reader(one)
    for n in range(20):
        one.add(EVENT)
        if n < 10:
            one.sent(held, one.next(held))
    one.detach(held)
    with pytest.raises(GuestError, match="keeps what came from 10 on"):
        reader(one, 9)
    assert len(one.next(reader(one, 10))) == 10


def test_where_there_is_no_room_the_one_left_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "WATCHES_MAX", 3)
    all_of_them = Watches(Context(frozenset()))
    first, second, third = [all_of_them._reserve(f"wt{n}") for n in range(3)]
    held = [reader(w) for w in (first, second, third)]
    with pytest.raises(GuestError) as full:
        all_of_them._reserve("wt3")
    assert full.value.code == "watch_limit"
    second.detach(held[1])
    first.detach(held[0])
    all_of_them._reserve("wt3")
    with pytest.raises(GuestError) as gone:
        all_of_them._find("wt1")
    assert gone.value.code == "watch_not_found"
    assert all_of_them._find("wt0") is first
    with pytest.raises(GuestError) as twice:
        all_of_them._reserve("wt0")
    assert twice.value.code == "watch_exists"
