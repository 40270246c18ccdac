"""The sampler: asks while there is something to see, keeps nobody awake, and forgets what is over."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from skerry.control import sampler
from skerry.core.errors import GuestUnreachable, NotFound
from skerry.core.models import GuestMetrics, SandboxSpec
from support.fake_node import FakeGuest
from support.house import House, command, opened


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(f"sqlite:///{tmp_path}/skerry.db") as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the guests that were asked, in order."""
    found: list[str] = []

    async def metrics(self: FakeGuest) -> GuestMetrics:
        found.append(next(name for name, guest in self._node.vms.items() if guest is self))
        self._check()
        return GuestMetrics(0, 1.0, 1, 12.5, 0.0, 2, 1, 0, 4, 3, 1)

    monkeypatch.setattr(FakeGuest, "metrics", metrics)
    return found


async def rounds(house: House, count: int) -> None:
    for _ in range(count):
        house.clock.skip(5)
        await house.services.sampler.round()


async def test_an_idle_guest_is_asked_once_and_then_left_alone(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    await house.services.sampler.round()
    assert asked == []  # it has only just begun
    await rounds(house, 10)
    assert asked == [box.id]


async def test_one_that_is_used_is_asked_in_every_round(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    await rounds(house, 1)
    held = await house.services.processes.start(house.me, box.id, command())  # a stream that stays open
    await rounds(house, 3)
    assert asked == [box.id] * 4
    await held.aclose()
    await rounds(house, 3)  # nobody watches the command, which may run on
    assert asked == [box.id] * 7
    points = await house.services.sampler.history(house.me, box.id)
    assert [p.at_ms for p in points] == sorted(p.at_ms for p in points)
    assert len(points) == 7  # the last one is fresh: it was not asked again


async def test_who_is_looked_at_is_followed_for_a_while(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    (point,) = await house.services.sampler.history(house.me, box.id)
    assert point.cpu_used_pct == 12.5
    await rounds(house, 30)
    assert len(asked) == 1 + sampler.WATCHED_S / 5 - 1
    now = house.clock()
    recent = await house.services.sampler.history(house.me, box.id, since=now - timedelta(seconds=30))
    assert len(recent) == 1
    assert await house.services.sampler.history(house.me, box.id, until=now - timedelta(hours=1)) == []


async def test_looking_is_no_use_and_a_paused_one_keeps_its_points(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=10_000, auto_pause=True))
    for _ in range(3):
        house.clock.skip(6)
        assert len(await house.services.sampler.history(house.me, box.id)) > 0
        await asyncio.gather(*house.services.timers.start_due())
    assert (await house.get(box.id)).state == "paused"
    before = len(asked)
    house.clock.skip(6)
    assert len(await house.services.sampler.history(house.me, box.id)) == before == len(asked)
    await rounds(house, 1)
    assert len(asked) == before


async def test_all_that_is_kept_is_bounded(house: House, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "POINTS_MAX", 3)
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    for _ in range(6):
        house.clock.skip(5)
        points = await house.services.sampler.history(house.me, box.id)
    assert len(points) == 3
    assert len(asked) == 6
    await house.services.sandboxes.kill(house.me, box.id)
    await rounds(house, 1)
    assert house.services.sampler._histories == {}


async def test_a_guest_that_does_not_answer_is_no_error(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    house.node.faults.guest = GuestUnreachable("not now")
    assert await house.services.sampler.history(house.me, box.id) == []
    assert await house.services.sampler.latest(house.me, [box.id]) == {}
    house.node.faults.guest = None
    house.clock.skip(5)
    assert set(await house.services.sampler.latest(house.me, [box.id, "nobody"])) == {box.id}


async def test_many_who_look_at_once_ask_once(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    found = await asyncio.gather(*(house.services.sampler.history(house.me, box.id) for _ in range(20)))
    assert asked == [box.id]
    assert {len(points) for points in found} == {1}


async def test_anothers_is_not_there(house: House, asked: list[str]) -> None:
    box = await house.create(SandboxSpec(idle_timeout_ms=None))
    other = await house.other_tenant()
    with pytest.raises(NotFound):
        await house.services.sampler.history(other, box.id)
    assert await house.services.sampler.latest(other, [box.id]) == {}
    assert asked == []


async def test_templates_say_how_often_they_were_used(house: House) -> None:
    (base,) = await house.services.templates.list(house.me)
    assert (base.name, base.used, base.last_used_at) == ("base", 0, None)
    box = await house.create()
    base = await house.services.templates.get(house.me, "base")
    assert (base.used, base.last_used_at) == (1, box.created_at)
    other = await house.other_tenant()
    assert (await house.services.templates.get(other, "base")).used == 0
    with pytest.raises(NotFound) as refused:
        await house.services.templates.get(house.me, "nope")
    assert refused.value.code == "template_not_found"
