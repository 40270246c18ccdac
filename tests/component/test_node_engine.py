"""The engine's life cycles and failures on the fake driver: real namespaces, disks, cgroups and processes."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skerry.core.errors import (
    Conflict,
    Forbidden,
    Gone,
    InternalError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from skerry.core.lifecycle import EndReason
from skerry.core.models import Exited, Output, ProcessSpec, SandboxSpec
from skerry.node import cgroup
from skerry.node.agents import Agents, GuestAgents
from skerry.node.config import NodeConfig
from skerry.node.engine import Engine
from skerry.node.net import namespace
from skerry.node.vmm.fake import FakeDriver, Faults
from support.guest_agent import compiled_half
from support.node import Left, StubAgents, empty_images, open_descriptors
from support.waiting import until

SPEC = SandboxSpec(memory_mb=256, disk_mb=2048)


class House:
    """Engines one after the other on one data directory."""

    def __init__(self, root: Path) -> None:
        self.config = NodeConfig(root / "data", root / "cache", slots=0)
        self.images = empty_images(root / "images")
        self.faults = Faults(agent=False)
        self.agents = StubAgents()

    def engine(self, config: NodeConfig | None = None, agents: Agents | None = None) -> Engine:
        return Engine(config or self.config, FakeDriver(self.faults), self.images, agents=agents or self.agents)

    @property
    def left(self) -> Left:
        return Left.of(self.config)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    before = open_descriptors()
    house = House(tmp_path)
    yield house
    house.faults.__init__(agent=False)
    house.agents.__init__()
    async with house.engine() as last:
        for sandbox in last.sandboxes():
            await last.kill(sandbox.id)
    assert house.left.nothing, house.left
    assert open_descriptors() <= before + 2  # the loop's own


async def test_create_use_and_kill(house: House) -> None:
    async with house.engine() as engine:
        made = await engine.create("sb1", SPEC)
        assert (made.id, made.start_kind) == ("sb1", "boot")
        assert set(made.timings_ms) >= {"network", "disk", "cgroup", "vmm", "boot", "identify", "total"}
        assert engine.sandboxes() == [made]
        assert len(house.left.processes) == 1
        assert os.path.samefile(f"/proc/{made.vmm_pid}/cwd", house.config.vms_dir / "sb1")
        link = house.agents.links["sb1"]
        assert engine.guest("sb1") is link
        assert link.identity is not None
        assert (link.identity.hostname, link.identity.generation, len(link.identity.entropy)) == ("sb1", 1, 64)
        assert await engine.console("sb1") == b"the fake console\n"
        assert await engine.console("sb1", limit=8) == b"console\n"
        assert engine.info().sandboxes == 1
        assert await engine.kill("sb1") is True
        assert house.left.nothing
        assert isinstance(link.ended, Gone)
        assert await engine.kill("sb1") is False
        with pytest.raises(NotFound) as missing:
            engine.guest("sb1")
        assert missing.value.code == "sandbox_not_found"


async def test_create_is_idempotent(house: House) -> None:
    async with house.engine() as engine:
        made = await asyncio.gather(*(engine.create("sb1", SPEC) for _ in range(5)))
        assert len({one.vmm_pid for one in made}) == 1
        assert (await engine.create("sb1", SPEC)).vmm_pid == made[0].vmm_pid
        assert len(house.left.processes) == 1
        await engine.kill("sb1")


@pytest.mark.parametrize("name", ["", "SB1", "a/b", "../x", "a-b", "x" * 41])
async def test_an_id_that_could_be_a_path_is_refused(house: House, name: str) -> None:
    async with house.engine() as engine:
        with pytest.raises(InvalidRequest):
            await engine.create(name, SPEC)
        assert await engine.kill(name) is False


async def test_an_unknown_template_is_not_found(house: House) -> None:
    async with house.engine() as engine:
        with pytest.raises(NotFound) as missing:
            await engine.create("sb1", replace(SPEC, template="nope"))
        assert missing.value.code == "template_not_found"
    assert house.left.nothing


async def test_a_disk_that_is_too_small_is_refused_and_leaves_nothing(house: House) -> None:
    async with house.engine() as engine:
        with pytest.raises(InvalidRequest):
            await engine.create("sb1", replace(SPEC, disk_mb=100))
        assert house.left.nothing


async def test_a_full_node_says_so(house: House) -> None:
    async with house.engine(replace(house.config, max_sandboxes=1)) as engine:
        await engine.create("sb1", SPEC)
        with pytest.raises(Unavailable) as full:
            await engine.create("sb2", SPEC)
        assert full.value.code == "node_full"
        assert full.value.retry_after is not None
        await engine.kill("sb1")
        await engine.create("sb2", SPEC)
        await engine.kill("sb2")
    async with house.engine(replace(house.config, memory_share=0.0)) as engine:
        with pytest.raises(Unavailable, match="memory"):
            await engine.create("sb1", SPEC)
    async with house.engine(replace(house.config, memory_floor_mb=1 << 30)) as engine:
        with pytest.raises(Unavailable, match="left"):
            await engine.create("sb1", SPEC)
    async with house.engine(replace(house.config, disk_floor_mb=1 << 40)) as engine:
        with pytest.raises(Unavailable, match=r"disk has .* MB left") as full:
            await engine.create("sb1", SPEC)
        assert full.value.code == "node_full"
    assert house.left.nothing


def _break_disk(house: House) -> None:
    shutil.rmtree(house.config.vms_dir)
    house.config.vms_dir.write_text("in the way")


def _mend_disk(house: House) -> None:
    house.config.vms_dir.unlink()
    house.config.vms_dir.mkdir()


@pytest.mark.parametrize("method", ["start", "started"])
async def test_a_driver_that_fails_leaves_nothing(house: House, method: str) -> None:
    house.faults.fail.add(method)  # type: ignore[arg-type]
    async with house.engine() as engine:
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert (failure.value.code, failure.value.context["step"]) == ("vm_start_failed", "vmm")
        assert house.left.nothing
        house.faults.fail.clear()
        await engine.create("sb1", SPEC)
        await engine.kill("sb1")


async def test_a_disk_that_cannot_be_made_leaves_nothing(house: House) -> None:
    async with house.engine() as engine:
        _break_disk(house)
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "disk"
        _mend_disk(house)
        await engine.kill("sb1")
        assert house.left.nothing


async def test_a_journal_that_cannot_be_written_leaves_nothing(house: House) -> None:
    async with house.engine() as engine:
        house.config.journal_dir.rmdir()
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "journal"
        house.config.journal_dir.mkdir()
        assert house.left.nothing


async def test_a_network_that_cannot_be_made_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house.engine() as engine:
        monkeypatch.setenv("PATH", "/nonexistent")  # no nft
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "network"
        assert house.left.nothing


async def test_a_guest_that_never_answers_is_given_up_in_time(house: House) -> None:
    house.agents.up = False
    async with house.engine(replace(house.config, boot_deadline_s=0.2)) as engine:
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "boot"
        assert failure.value.context["console"] == "the fake console"
        assert house.left.nothing


async def test_a_vm_that_dies_while_it_boots_fails_at_once(house: House) -> None:
    house.agents.up = False
    house.faults.die_after_s = 0.1
    async with house.engine() as engine:
        with pytest.raises(InternalError, match="the fake VM ended"):
            await engine.create("sb1", SPEC)
        assert house.left.nothing


async def test_an_identity_whose_answer_was_lost_is_not_told_twice(house: House) -> None:
    calls = 0

    async def lost() -> None:
        nonlocal calls
        calls += 1
        raise OutcomeUnknown("the line broke")

    house.agents.before_identify = lost  # type: ignore[method-assign]
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        assert calls == 1
        await engine.kill("sb1")


@pytest.mark.parametrize("after_ms", [0, 1, 3, 5, 8, 12, 20, 30, 50])
@pytest.mark.parametrize("how", ["cancel", "kill"])
async def test_a_creation_that_is_stopped_anywhere_leaves_nothing(house: House, after_ms: int, how: str) -> None:
    house.agents.up = False
    async with house.engine() as engine:
        creating = asyncio.create_task(engine.create("sb1", SPEC))
        await asyncio.sleep(after_ms / 1000)
        if how == "cancel":
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        else:
            while not await engine.kill("sb1"):
                await asyncio.sleep(0)
            with pytest.raises(Gone) as over:
                await creating
            assert over.value.code == "sandbox_killed"
        assert house.left.nothing
        assert engine.sandboxes() == []


async def test_one_of_two_callers_may_leave(house: House) -> None:
    house.faults.delay_s["started"] = 0.1
    async with house.engine() as engine:
        first, second = (asyncio.create_task(engine.create("sb1", SPEC)) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).id == "sb1"
        await engine.kill("sb1")


async def test_kills_at_once_all_wait_for_the_end(house: House) -> None:
    house.faults.delay_s["stop"] = 0.1
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        assert await asyncio.gather(*(engine.kill("sb1") for _ in range(3))) == [True] * 3
        assert house.left.nothing


async def test_a_create_during_a_kill_makes_a_new_one(house: House) -> None:
    house.faults.delay_s["stop"] = 0.1
    async with house.engine() as engine:
        old = await engine.create("sb1", SPEC)
        killing = asyncio.create_task(engine.kill("sb1"))
        await asyncio.sleep(0.01)
        new = await engine.create("sb1", SPEC)
        assert await killing
        assert new.vmm_pid != old.vmm_pid
        await engine.kill("sb1")


async def test_a_removal_that_fails_is_told_and_tried_again(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        house.faults.fail.add("stop")
        with pytest.raises(InternalError, match="not removed whole"):
            await engine.kill("sb1")
        house.faults.fail.clear()
        assert await engine.kill("sb1") is True
        assert house.left.nothing


async def test_a_vm_that_dies_is_cleaned_up_and_published(house: House) -> None:
    async with house.engine() as engine, engine.ended() as events:
        made = await engine.create("sb1", SPEC)
        os.kill(made.vmm_pid, 9)
        async with asyncio.timeout(60):
            event = await anext(events)
        assert (event.sandbox_id, event.reason, event.detail) == ("sb1", EndReason.CRASHED, "the fake VM ended")
        assert house.left.nothing
        ended = house.agents.links["sb1"].ended
        assert ended is not None
        assert ended.code == "sandbox_failed"


async def test_what_ends_before_anybody_listens_is_kept(house: House) -> None:
    async with house.engine() as engine:
        made = await engine.create("sb1", SPEC)
        os.kill(made.vmm_pid, 9)
        async with asyncio.timeout(60):
            while engine.info().sandboxes:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60), engine.ended() as events:
            assert (await anext(events)).sandbox_id == "sb1"


async def test_stop_lets_sandboxes_run_and_start_takes_them_up(house: House) -> None:
    async with house.engine() as engine:
        made = await engine.create("sb1", SPEC)
    assert house.left.processes == (made.vmm_pid,)
    async with house.engine() as engine:
        assert [(s.id, s.vmm_pid, s.timings_ms) for s in engine.sandboxes()] == [("sb1", made.vmm_pid, {})]
        async with engine.ended() as events:
            os.kill(made.vmm_pid, 9)
            async with asyncio.timeout(60):
                assert (await anext(events)).reason is EndReason.CRASHED
    assert house.left.nothing


async def test_stop_gives_up_creations_and_finishes_kills(house: House) -> None:
    house.agents.up = False
    async with house.engine() as engine:
        creating = asyncio.create_task(engine.create("sb1", SPEC))
        await asyncio.sleep(0.1)
    with pytest.raises(Gone):
        await creating
    assert house.left.nothing


async def test_a_second_engine_is_refused(house: House) -> None:
    async with house.engine():
        with pytest.raises(Conflict) as refusal:
            await house.engine().start()
        assert refusal.value.code == "data_dir_in_use"


async def test_recovery_removes_what_cannot_be_taken_up(house: House) -> None:
    async with house.engine() as engine:
        for name in ("lost", "refused", "half", "torn"):
            await engine.create(name, SPEC)
        pids = {s.id: s.vmm_pid for s in engine.sandboxes()}
    os.kill(pids["lost"], 9)
    await until(lambda: psutil.Process(pids["lost"]).status() == psutil.STATUS_ZOMBIE)
    entry = house.config.journal_dir / "half.json"
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "phase": "creating", "handle": None}))
    (house.config.journal_dir / "torn.json").write_text('{"version": 1, "sand')
    async with house.engine() as engine:
        assert [s.id for s in engine.sandboxes()] == ["refused"]
    house.agents.processes_error = Forbidden("the token is not this sandbox's")
    async with house.engine() as engine:
        assert engine.sandboxes() == []
    assert house.left.nothing


async def test_a_busy_guest_is_taken_up_all_the_same(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
    house.agents.processes_error = Unavailable("too many connections")
    async with house.engine() as engine:
        assert [s.id for s in engine.sandboxes()] == ["sb1"]


async def test_recovery_removes_planted_orphans_and_touches_nothing_else(house: House) -> None:
    config = house.config
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
    namespace.create(f"sk-{config.instance}-dead")
    foreign = "sk-000000-alive"
    namespace.create(foreign)
    orphan_dir = config.vms_dir / "orphan"
    orphan_dir.mkdir()
    (orphan_dir / "disk.qcow2").write_bytes(b"x")
    orphan = subprocess.Popen(["sleep", "600"], cwd=orphan_dir, env={**os.environ, "SKERRY_FAKE_VM": "orphan"})
    bystander = subprocess.Popen(["sleep", "600"], cwd=config.vms_dir / "sb1")
    group = next(p for p in map(Path, ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")) if (p / "cgroup.procs").exists())
    (group / f"skerry-{config.instance}" / "orphan").mkdir(parents=True, exist_ok=True)
    try:
        async with house.engine() as engine:
            assert [s.id for s in engine.sandboxes()] == ["sb1"]
            assert not Path(f"/proc/{orphan.pid}").exists()
            assert bystander.poll() is None
            left = house.left
            assert {name for name in left.files if not name.startswith("ly")} == {"sb1", "sb1.json"}
            assert len(left.namespaces) == 1
            assert all(name.rstrip("/").endswith("sb1") for name in left.cgroups)
            assert foreign in namespace.names("sk-")
    finally:
        namespace.delete(foreign)
        for process in (orphan, bystander):
            process.kill()
            process.wait()


async def test_the_fake_vm_is_a_real_guest(house: House) -> None:
    house.faults.agent, house.faults.birth = True, await asyncio.to_thread(compiled_half)
    async with house.engine(agents=GuestAgents()) as engine:
        await engine.create("sb1", replace(SPEC, env={"A": "1"}))
        stream = await engine.guest("sb1").start(ProcessSpec("pr1", shell='echo "$A"; exit 3'))
        events = [event async for event in stream]
        assert b"".join(e.data for e in events if isinstance(e, Output)) == b"1\n"
        assert isinstance(events[-1], Exited)
        assert events[-1].status.exit_code == 3
        stream = await engine.guest("sb1").start(ProcessSpec("pr2", shell="sleep 600"))
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        await engine.kill("sb1")
        with pytest.raises(Gone):
            async with asyncio.timeout(60):
                await reading
    async with house.engine(agents=GuestAgents()) as engine:
        await engine.create("sb2", SPEC)
    async with house.engine(agents=GuestAgents()) as engine:
        assert [s.id for s in engine.sandboxes()] == ["sb2"]
        assert await engine.guest("sb2").processes() == []


async def test_a_cgroup_that_cannot_be_made_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "settings", lambda *_: {"memory.no_such_file": "1"})
    async with house.engine() as engine:
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "cgroup"
        assert house.left.nothing


async def test_an_agent_that_refuses_its_identity_leaves_nothing(house: House) -> None:
    async def refuse() -> None:
        raise Forbidden("no")

    house.agents.before_identify = refuse  # type: ignore[method-assign]
    async with house.engine() as engine:
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert (failure.value.code, failure.value.context["step"]) == ("vm_start_failed", "identify")
        assert house.left.nothing


async def test_a_sandbox_that_cannot_be_recorded_does_not_stay(house: House) -> None:
    async def break_journal() -> None:
        shutil.rmtree(house.config.journal_dir)

    house.agents.before_identify = break_journal  # type: ignore[method-assign]
    async with house.engine() as engine:
        with pytest.raises(InternalError) as failure:
            await engine.create("sb1", SPEC)
        assert failure.value.context["step"] == "record"
        house.config.journal_dir.mkdir()
        assert house.left.nothing


async def test_a_host_without_cgroups_runs_sandboxes_and_notes_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "detect", lambda: cgroup.Hierarchies(0, {}, "none here"))
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        entry = json.loads((house.config.journal_dir / "sb1.json").read_text())
        assert entry["bounded"] is False
        await engine.kill("sb1")


async def test_twenty_sandboxes_are_taken_up_together(house: House) -> None:
    names = {f"sb{n}" for n in range(20)}
    async with house.engine() as engine:
        await asyncio.gather(*(engine.create(name, SPEC) for name in names))
    async with house.engine() as engine:
        assert {s.id for s in engine.sandboxes()} == names
        assert all(await asyncio.gather(*(engine.kill(name) for name in names)))
        assert house.left.nothing
