"""Secrets that a sandbox was given, on their way out of it: streams, lists, errors, records."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pytest

from skerry.core.errors import InvalidRequest
from skerry.core.models import Bindings, Exited, NetworkEvent, Output, Sandbox, SandboxSpec, Stream
from skerry.node.contract import ProcessStream
from support.fake_node import FakeGuest
from support.house import House, command, opened, until

VALUE = 'pg://app:Xq7"mark/er@db+1'
RAW = VALUE.encode()
STARS = b"*" * len(RAW)
LATER = "another-Xq7-value"
FROM_NOW_ON = 2**63 - 1


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(f"sqlite:///{tmp_path}/skerry.db") as made:
        await made.services.secrets.put(made.me, "db-prod", VALUE)
        await made.services.secrets.put(made.me, "later", LATER)
        yield made


@pytest.fixture
async def box(house: House) -> Sandbox:
    return await house.create(SandboxSpec(secrets=Bindings({"S": "db-prod"})))


def guest(house: House, box: Sandbox) -> FakeGuest:
    return house.node.vms[box.id]


async def start(house: House, box: Sandbox, secrets: Bindings | None = None, **given: object) -> ProcessStream:
    return await house.services.processes.start(house.me, box.id, command(**given), secrets or Bindings())


async def rest(stream: ProcessStream, at: int = 0) -> bytes:
    """All that comes up to the exit; offsets leave no hole."""
    seen = b""
    async with asyncio.timeout(20):
        async for event in stream:
            if isinstance(event, Output):
                assert event.offset == at + len(seen)
                seen += event.data
            else:
                assert isinstance(event, Exited)
    return seen


FORMS = [
    RAW, base64.b64encode(b"x" + RAW), base64.urlsafe_b64encode(b"ab" + RAW + b"c"), quote(VALUE, safe="").encode(),
    json.dumps(VALUE)[1:-1].encode(),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_a_value_is_masked_however_it_is_written_and_cut(house: House, box: Sandbox, form: bytes) -> None:
    stream = await start(house, box)
    said = b"before " + form + b" after " + form
    for at in range(0, len(said), 5):
        guest(house, box).emit(stream.process.process_id, said[at : at + 5])
    guest(house, box).finish(stream.process.process_id)
    seen = await rest(stream)
    assert len(seen) == len(said)
    assert seen.startswith(b"before ")
    assert b" after " in seen
    shown = max((len(part) for part in seen.replace(b" after ", b"*").split(b"*")), default=0)
    assert shown <= len(b"before ") + 4  # of base64, the letters that are not the value's alone


async def test_what_is_held_back_comes_out_in_time_and_its_rest_stays_masked(house: House, box: Sandbox) -> None:
    stream = await start(house, box)
    process_id = stream.process.process_id
    guest(house, box).emit(process_id, b"user: " + RAW[:12])
    first = await anext(stream)
    assert isinstance(first, Output)
    assert first.data == b"user: "
    began = time.monotonic()
    async with asyncio.timeout(20):
        held = await anext(stream)
    assert time.monotonic() - began < 5  # 0.05 s on a machine that is not busy
    assert isinstance(held, Output)
    assert (held.offset, held.data) == (6, b"*" * 12)
    guest(house, box).emit(process_id, RAW[12:] + b"!")
    guest(house, box).finish(process_id)
    assert await rest(stream, 18) == STARS[12:] + b"!"


async def test_beginnings_that_are_no_value_come_at_the_end_as_they_were(house: House, box: Sandbox) -> None:
    stream = await start(house, box)
    guest(house, box).emit(stream.process.process_id, b"a " + RAW[:12])
    guest(house, box).finish(stream.process.process_id)
    assert await rest(stream) == b"a " + RAW[:12]


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("offset", [0, 2, 5, 2 + len(RAW), FROM_NOW_ON])
async def test_a_reader_that_comes_back_in_the_middle_of_a_value_sees_none_of_it(
    house: House, box: Sandbox, offset: int, follow: bool
) -> None:
    process_id = (await start(house, box)).process.process_id
    said = b"a " + RAW + b" b"
    guest(house, box).emit(process_id, said)
    stream = await house.services.processes.attach(house.me, box.id, process_id, stdout_offset=offset, follow=follow)
    if follow:
        guest(house, box).emit(process_id, RAW + b"\n")
        guest(house, box).finish(process_id)
        said += RAW + b"\n"
    begin = min(offset, len(b"a " + RAW + b" b"))
    assert await rest(stream, begin) == said.replace(RAW, STARS)[begin:]


async def test_a_stream_that_is_open_learns_of_a_secret_that_comes_later(house: House) -> None:
    box = await house.create()
    stream = await start(house, box)
    process_id = stream.process.process_id
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await start(house, box, Bindings({"S": "db-prod"}))
    guest(house, box).emit(process_id, b"a " + RAW[:10])
    first = await reading
    assert isinstance(first, Output)
    assert first.data == b"a "
    await start(house, box, Bindings({"T": "later"}))
    guest(house, box).emit(process_id, RAW[10:] + b" " + LATER.encode())
    guest(house, box).finish(process_id)
    assert await rest(stream, 2) == STARS + b" " + b"*" * len(LATER)


async def test_a_sandbox_without_secrets_pays_nothing(house: House) -> None:
    box = await house.create()
    stream = await start(house, box)
    guest(house, box).emit(stream.process.process_id, RAW)
    event = await anext(stream)
    assert event is guest(house, box).running[stream.process.process_id].events[0]
    assert stream._redaction is None  # type: ignore[attr-defined]


async def test_a_line_that_breaks_gives_first_what_was_held_back(house: House, box: Sandbox) -> None:
    stream = await start(house, box)
    guest(house, box).emit(stream.process.process_id, RAW[:10])
    await house.services.sandboxes.kill(house.me, box.id)
    with pytest.raises(Exception, match=r"killed|broke"):
        await rest(stream)


async def test_who_stops_reading_in_the_middle_of_a_value_has_seen_none_of_it(house: House, box: Sandbox) -> None:
    process_id = (await start(house, box)).process.process_id
    guest(house, box).emit(process_id, b"a " + RAW[:14])
    stream = await house.services.processes.attach(house.me, box.id, process_id, follow=False)
    assert await rest(stream) == b"a " + b"*" * 14
    guest(house, box).emit(process_id, RAW[14:] + b"!")
    guest(house, box).finish(process_id)
    again = await house.services.processes.attach(house.me, box.id, process_id, stdout_offset=16)
    assert await rest(again, 16) == STARS[14:] + b"!"


async def test_what_comes_later_has_its_own_time(house: House, box: Sandbox) -> None:
    """Output that goes on does not run out the time of a beginning that has only just come."""
    stream = await start(house, box)
    process_id = stream.process.process_id
    said = b""
    for _ in range(40):  # each piece ends in what may be a value's beginning, and the next one shows that it is not
        said += b"x" + RAW[:10]
        guest(house, box).emit(process_id, (b"" if said == b"x" + RAW[:10] else b"-") + b"x" + RAW[:10])
    guest(house, box).finish(process_id)
    seen = await rest(stream)
    assert seen == b"-".join([b"x" + RAW[:10]] * 40)


async def test_closing_leaves_no_reader_behind(house: House, box: Sandbox) -> None:
    stream = await start(house, box)
    guest(house, box).emit(stream.process.process_id, RAW[:10])
    assert isinstance(await anext(stream), Output)  # a reader waits for more from here on
    before = len(asyncio.all_tasks())
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait({reading})
    await stream.aclose()
    assert len(asyncio.all_tasks()) == before - 1


async def test_lists_records_and_errors_hold_none(house: House, box: Sandbox) -> None:
    long = "x" * 290 + VALUE  # the record cuts it in the middle of the value
    stream = await start(house, box, argv=("echo", VALUE, long), cwd=f"/{VALUE}", tag=VALUE)
    assert stream.process.argv[1] == "*" * len(VALUE)
    (listed,) = await house.services.processes.list(house.me, box.id)
    assert (listed.tag, listed.cwd) == ("*" * len(VALUE), "/" + "*" * len(VALUE))
    house.node.faults.guest = InvalidRequest.of("cwd", f"there is no {VALUE}", given=f"{'y' * 190}{VALUE}")
    with pytest.raises(InvalidRequest) as wrong:
        await start(house, box, shell=f"echo {VALUE}")
    house.node.faults.guest = None
    said = f"{wrong.value} {wrong.value.args} {[p.as_dict() for p in wrong.value.problems]}"
    page = await house.services.sandboxes.events(house.me, box.id)
    for text in (repr(stream.process), repr(listed), said, repr(page.items)):
        assert "Xq7" not in text
        assert "pg://app" not in text  # nor its beginning
    assert any(event.action == "command.started" and "***" in repr(event.detail) for event in page.items)


async def test_the_reason_of_an_end_and_the_console_hold_none(house: House, box: Sandbox) -> None:
    await start(house, box)

    async def says(_id: str, *, limit: int) -> bytes:
        return b"login: " + RAW + RAW[:10]

    house.node.console = says  # type: ignore[method-assign]
    assert await house.services.sandboxes.console(house.me, box.id) == b"login: " + STARS + b"*" * 10
    house.node.crash(box.id, detail=f"kernel panic: {VALUE}")

    async def over() -> bool:
        return (await house.get(box.id)).error is not None

    await until(over)
    assert (await house.get(box.id)).error == "kernel panic: " + "*" * len(VALUE)
    page = await house.services.sandboxes.events(house.me, box.id)
    assert "Xq7" not in repr(page.items)


async def test_after_a_restart_all_of_it_is_known_again(house: House, box: Sandbox) -> None:
    process_id = (await start(house, box)).process.process_id
    guest(house, box).emit(process_id, RAW)
    await house.services.secrets.delete(house.me, "db-prod")
    await house.restart()
    guest(house, box).finish(process_id)
    stream = await house.services.processes.attach(house.me, box.id, process_id)
    assert await rest(stream) == STARS
    assert Stream.STDOUT in stream.begins


async def test_what_it_looked_up_is_recorded_without(house: House) -> None:
    box = await house.create()
    await start(house, box, Bindings({"T": "later"}))
    name = f"{LATER}.leak.example"
    house.node.tell_traffic(NetworkEvent(box.id, datetime.now(UTC), "look_up", allowed=False, rule="none", name=name))

    async def recorded() -> bool:
        return bool((await house.services.traffic.events(house.me, box.id)).items)

    await until(recorded)
    (event,) = (await house.services.traffic.events(house.me, box.id)).items
    assert event.detail["name"] == "*" * len(LATER) + ".leak.example"
