"""Rest, return, copies: every step's failure and every cut, on a driver that fails when it is told to."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skerry.core.errors import Conflict, Gone, InternalError, NotFound, SkerryError
from skerry.core.models import SandboxSpec
from skerry.node import host
from skerry.node.config import NodeConfig
from skerry.node.engine import Engine
from skerry.node.vmm.fake import FakeDriver, Faults
from support.node import Left, StubAgents, empty_images
from support.waiting import until

SPEC = SandboxSpec(memory_mb=256, disk_mb=2048, env={"A": "1"})


class House:
    """Engines one after the other on one data directory, with a driver that has memory images and no real memory."""

    def __init__(self, root: Path) -> None:
        self.config = NodeConfig(root / "data", root / "cache", slots=0, pool_floor=0, pool_ceiling=0)
        self.images = empty_images(root / "images")
        self.faults = Faults(agent=False)
        self.agents = StubAgents()
        self.machine: dict[str, str] = {}

    def engine(self, **changes: Any) -> Engine:
        house = self

        class Driver(FakeDriver):
            def machine(self, cpu: int, memory_mb: int) -> dict[str, str]:
                return {**super().machine(cpu, memory_mb), **house.machine}

        return Engine(
            replace(self.config, **changes), Driver(self.faults, snapshots=True), self.images, agents=self.agents
        )

    @property
    def left(self) -> Left:
        return Left.of(self.config)

    def entry(self, name: str) -> dict[str, Any]:
        return json.loads((self.config.journal_dir / f"{name}.json").read_text())

    def rewrite(self, name: str, **changes: Any) -> None:
        path = self.config.journal_dir / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def image(self, name: str) -> Path:
        return self.config.state_dir / "images" / self.entry(name)["image"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> None:
        """A stub of an agent runs no programs."""

    monkeypatch.setattr("skerry.node.memory.templates.warm_up", nothing)
    monkeypatch.setattr("skerry.node.pool.warm_up", nothing)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    house.faults.__init__(agent=False)
    house.agents.__init__()
    house.machine.clear()
    async with house.engine() as last:
        for sandbox in [*last.sandboxes(), *last.paused()]:
            await last.kill(sandbox.id)
        for snapshot in last.snapshots():
            await last.delete_snapshot(snapshot)
        for template in last.images():
            assert template.kind == "template"
    assert house.left.nothing, house.left


async def test_a_paused_sandbox_holds_no_process_and_comes_back(house: House) -> None:
    async with house.engine() as engine:
        made = await engine.create("sb1", SPEC)
        assert made.start_kind == "clone"
        first = house.agents.links["sb1"].identity
        paused = await engine.pause("sb1")
        assert (paused.id, paused.memory) == ("sb1", True)
        assert not (house.left.processes or house.left.namespaces or house.left.cgroups)
        assert engine.sandboxes() == []
        assert engine.paused() == [paused]
        assert await engine.pause("sb1") == paused
        with pytest.raises(Conflict) as refused:
            engine.guest("sb1")
        assert refused.value.code == "sandbox_paused"
        back = await engine.resume("sb1")
        assert back.id == "sb1"
        assert await engine.resume("sb1") == back
        second = house.agents.links["sb1"].identity
        assert first and second
        assert second.generation == first.generation + 1
        assert second.token != first.token
        assert (second.machine_id, second.env, second.fresh) == (first.machine_id, first.env, False)
        assert len(house.left.processes) == 1


async def test_many_rests_leave_one_image_and_a_short_chain(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        for _ in range(5):
            await engine.pause("sb1")
            await engine.resume("sb1")
        await engine.pause("sb1")
        assert [i.kind for i in engine.images()] == ["template", "pause"]


@pytest.mark.parametrize("fault", ["freeze", "save", "saved"])
async def test_a_pause_that_fails_leaves_it_running(house: House, fault: Any) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        before = house.left

        async def fail() -> None:
            raise InternalError("the guest does not stop", step="freeze")

        if fault == "freeze":
            house.agents.before_freeze = fail
        else:
            house.faults.fail = {fault}
        with pytest.raises(InternalError):
            await engine.pause("sb1")
        house.faults.fail = set()
        house.agents.before_freeze = StubAgents.before_freeze.__get__(house.agents)
        assert [s.id for s in engine.sandboxes()] == ["sb1"]
        assert engine.paused() == []
        assert house.left == before
        assert house.entry("sb1")["phase"] == "running"
        assert not house.agents.links["sb1"].frozen
        await engine.pause("sb1")
        await engine.resume("sb1")


@pytest.mark.parametrize("method", ["write", "commit"])
@pytest.mark.parametrize("at", [1, 2])
async def test_a_full_disk_during_a_pause_leaves_it_running_or_paused(
    house: House, method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old state or the new one, never half of it, whichever write fails."""
    from skerry.node.journal import Journal
    from skerry.node.memory.images import Images

    owner = Journal if method == "write" else Images
    real, calls = getattr(owner, method), 0

    def failing(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise InternalError("no space left on device", step=method)
        return real(self, *args)

    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        monkeypatch.setattr(owner, method, failing)
        try:
            await engine.pause("sb1")
        except InternalError:
            assert [s.id for s in engine.sandboxes()] == ["sb1"]
            assert house.entry("sb1")["phase"] == "running"
        else:
            assert [p.id for p in engine.paused()] == ["sb1"]
        monkeypatch.undo()
        await engine.resume("sb1")
        await engine.pause("sb1")
        await engine.resume("sb1")


@pytest.mark.parametrize("fault", ["start", "restore", "started", "resume"])
async def test_a_resume_that_fails_leaves_it_paused(house: House, fault: Any) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        before = house.left
        house.faults.fail = {fault}
        with pytest.raises(InternalError):
            await engine.resume("sb1")
        house.faults.fail = set()
        assert [p.id for p in engine.paused()] == ["sb1"]
        assert house.left == before
        assert (await engine.resume("sb1")).id == "sb1"


async def test_an_image_that_is_missing_damaged_or_foreign_is_named_and_it_stays_paused(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        image = house.image("sb1")
        whole = (image / "ram").read_bytes()

        async def refused(kind: type[SkerryError], code: str, said: str) -> None:
            with pytest.raises(kind) as error:
                await engine.resume("sb1")
            assert error.value.code == code
            assert said in error.value.message
            assert [p.id for p in engine.paused()] == ["sb1"]

        (image / "ram").write_bytes(whole[:-1] + b"?")
        await refused(InternalError, "image_damaged", "ram")
        (image / "ram").unlink()
        await refused(InternalError, "image_damaged", "ram")
        (image / "ram").write_bytes(whole)
        house.machine["vmm"] = "fake 2"
        await refused(Conflict, "image_mismatch", "vmm (saved with fake 1, here fake 2)")
        house.machine.clear()
        await engine.resume("sb1")


async def test_a_vanished_image_is_found_out_after_a_restart(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
    image = house.image("sb1")
    image.rename(image.with_name("elsewhere"))
    async with house.engine() as engine:
        assert [p.id for p in engine.paused()] == ["sb1"]
        with pytest.raises(NotFound) as missing:
            await engine.resume("sb1")
        assert missing.value.code == "image_not_found"
        assert [p.id for p in engine.paused()] == ["sb1"]


async def test_a_paused_sandbox_survives_the_server(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
    async with house.engine() as engine:
        assert [p.id for p in engine.paused()] == ["sb1"]
        await engine.resume("sb1")
    async with house.engine() as engine:
        assert [s.id for s in engine.sandboxes()] == ["sb1"]
        await engine.pause("sb1")
        assert await engine.kill("sb1")
        assert engine.paused() == []


@pytest.mark.parametrize("phase", ["pausing", "saving"])
async def test_a_pause_that_a_crash_cut_off_never_was(house: House, phase: str) -> None:
    async with house.engine() as engine:
        made = await engine.create("sb1", SPEC)
    os.kill(made.vmm_pid, signal.SIGSTOP)  # what a driver does to its VM first
    house.rewrite("sb1", phase=phase)
    (house.config.state_dir / "images" / "im1.new").mkdir()
    async with house.engine() as engine:
        assert [s.id for s in engine.sandboxes()] == ["sb1"]
        assert house.entry("sb1")["phase"] == "running"
        assert psutil.Process(made.vmm_pid).status() != psutil.STATUS_STOPPED
        assert not (house.config.state_dir / "images" / "im1.new").exists()


async def test_a_resume_that_a_crash_cut_off_never_was(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        resting = house.entry("sb1")
        await engine.resume("sb1")
    # as it was before the last step: the VM runs, and the journal does not know that it is whole
    running = house.entry("sb1")
    house.rewrite("sb1", phase="resuming", token=resting["token"], generation=resting["generation"])
    async with house.engine() as engine:
        assert [p.id for p in engine.paused()] == ["sb1"]
        assert not (house.left.processes or house.left.namespaces or house.left.cgroups)
        assert house.entry("sb1")["layers"] == running["layers"][:-1]
        await engine.resume("sb1")


@pytest.mark.parametrize("fault", ["", "start", "started"])
async def test_a_boot_in_place_of_a_resume_drops_the_memory_once_it_runs(house: House, fault: Any) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        resting, before = house.entry("sb1"), house.left
        if fault:
            house.faults.fail = {fault}
            with pytest.raises(InternalError):
                await engine.resume("sb1", memory=False)
            house.faults.fail = set()
            assert house.entry("sb1") == resting
            assert house.left == before
            assert (await engine.resume("sb1")).start_kind == "clone"
            return
        assert (await engine.resume("sb1", memory=False)).start_kind == "boot"
        assert [i.kind for i in engine.images()] == ["template"]
        assert house.entry("sb1")["image"] is None
        assert house.entry("sb1")["layers"][:-1] == resting["layers"]
        assert (await engine.pause("sb1")).memory
        await engine.resume("sb1")


async def test_a_boot_that_a_crash_cut_off_keeps_the_memory(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        resting = house.entry("sb1")
        house.faults.hang = {"start"}
        booting = asyncio.ensure_future(engine.resume("sb1", memory=False))
        while house.entry("sb1")["phase"] != "resuming":
            await asyncio.sleep(0.02)
        half = house.entry("sb1")
        booting.cancel()
        house.faults.hang = set()
    (house.config.journal_dir / "sb1.json").write_text(json.dumps(half))
    async with house.engine() as engine:
        assert [(p.id, p.memory) for p in engine.paused()] == [("sb1", True)]
        assert house.entry("sb1") == resting
        assert (await engine.resume("sb1")).id == "sb1"


HANGS: list[tuple[str, str, Callable[[Engine], Awaitable[object]]]] = [
    ("pause", "save", lambda engine: engine.pause("sb1")),
    ("resume", "restore", lambda engine: engine.resume("sb1")),
    ("resume", "resume", lambda engine: engine.resume("sb1")),
    ("snapshot", "save", lambda engine: engine.snapshot("sb1", "snp1")),
    ("fork", "save", lambda engine: engine.fork("sb1", {"sb2": SPEC})),
]


@pytest.mark.parametrize(("act", "fault", "begin"), HANGS, ids=[f"{a}-{f}" for a, f, _ in HANGS])
async def test_a_kill_beats_whatever_is_under_way(
    house: House, act: str, fault: Any, begin: Callable[[Engine], Awaitable[object]]
) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        if act == "resume":
            await engine.pause("sb1")
        house.faults.hang = {fault}
        under_way = asyncio.ensure_future(begin(engine))
        await asyncio.sleep(0.3)
        assert not under_way.done()
        house.faults.hang = set()
        assert await engine.kill("sb1")
        with pytest.raises(Gone):
            await under_way
        assert engine.sandboxes() == []
        assert engine.paused() == []
        assert engine.snapshots() == []
        assert not (house.left.processes or house.left.namespaces or house.left.cgroups)


async def test_a_caller_that_leaves_does_not_stop_a_pause(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        house.faults.delay_s = {"save": 0.3}
        caller = asyncio.ensure_future(engine.pause("sb1"))
        await asyncio.sleep(0.1)
        caller.cancel()
        await until(engine.paused)
        assert [p.id for p in engine.paused()] == ["sb1"]


async def test_twenty_resumes_give_one_vm(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        await engine.pause("sb1")
        back = await asyncio.gather(*(engine.resume("sb1") for _ in range(20)))
        assert len({b.vmm_pid for b in back}) == 1
        await until(lambda: len(house.left.processes) == 1)
        rests = await asyncio.gather(*(engine.pause("sb1") for _ in range(20)))
        assert {r.id for r in rests} == {"sb1"}


async def test_a_snapshot_outlives_its_sandbox_and_is_what_others_are_made_of(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        snapshot = await engine.snapshot("sb1", "snp1")
        assert snapshot.memory
        with pytest.raises(Conflict):
            await engine.snapshot("sb1", "snp1")
        await engine.kill("sb1")
        made = await engine.create("sb2", SandboxSpec(disk_mb=2048, env={"B": "2"}), snapshot_id="snp1")
        assert made.start_kind == "clone"
        identity = house.agents.links["sb2"].identity
        assert identity and identity.env == {"A": "1", "B": "2"}
        assert await engine.delete_snapshot("snp1")
        assert not await engine.delete_snapshot("snp1")
        assert engine.snapshots() == []
        with pytest.raises(NotFound):
            await engine.create("sb3", SPEC, snapshot_id="snp9")
        await engine.pause("sb2")  # what it needs of the snapshot is still there
        await engine.resume("sb2")


async def test_snapshots_of_a_paused_sandbox_and_of_disks(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        assert not (await engine.snapshot("sb1", "disk1", memory=False)).memory
        await engine.pause("sb1")
        assert (await engine.snapshot("sb1", "rest1")).memory
        assert not (await engine.snapshot("sb1", "rest2", memory=False)).memory
        await engine.resume("sb1")
        await engine.pause("sb1", memory=False)
        with pytest.raises(Conflict) as no_memory:
            await engine.snapshot("sb1", "rest3")
        assert no_memory.value.code == "no_memory"
        assert not (await engine.snapshot("sb1", "rest3", memory=False)).memory
        kinds = {n: (await engine.create(f"of{n}", SPEC, snapshot_id=n)).start_kind for n in engine.snapshots()}
        assert kinds == {"disk1": "boot", "rest1": "clone", "rest2": "boot", "rest3": "boot"}


async def test_a_snapshot_that_fails_leaves_nothing_and_the_sandbox_runs(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
        house.faults.fail = {"saved"}
        with pytest.raises(InternalError):
            await engine.snapshot("sb1", "snp1")
        house.faults.fail = set()
        assert engine.snapshots() == []
        assert [s.id for s in engine.sandboxes()] == ["sb1"]
        assert not house.agents.links["sb1"].frozen
        await engine.snapshot("sb1", "snp1")
        await engine.pause("sb1")
        await engine.resume("sb1")


async def test_forks_have_each_their_own_outcome(house: House) -> None:
    async with house.engine(max_sandboxes=3) as engine:
        await engine.create("sb1", SPEC)
        copies = await engine.fork("sb1", {f"sb{n}": SPEC for n in range(2, 6)})
        made = [name for name, outcome in copies.items() if not isinstance(outcome, SkerryError)]
        refused = [o.code for o in copies.values() if isinstance(o, SkerryError)]
        assert len(made) == 2
        assert refused == ["node_full", "node_full"]
        identities = [house.agents.links[name].identity for name in ("sb1", *made)]
        assert len({i.token for i in identities if i}) == 3
        assert len({i.machine_id for i in identities if i}) == 3
        await engine.kill("sb1")
        assert len(engine.sandboxes()) == 2


def shares_of(house: House, pid: int) -> str:
    """Of the CPU, as cgroup v1 counts them: 1024 for a guest with one CPU."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if f"skerry-{house.config.instance}/" in path and "cpu" in controllers.split(","):
            return (Path("/sys/fs/cgroup/cpu") / path[1:] / "cpu.shares").read_text().strip()
        if f"skerry-{house.config.instance}/" in path and not controllers:
            weight = (Path("/sys/fs/cgroup") / path[1:] / "cpu.weight").read_text().strip()
            return str(int(weight) * 1024 // 100)
    return "1024"  # a host without cgroups


async def test_the_pool_hands_out_each_clone_once_and_takes_the_rest_away(house: House) -> None:
    async with house.engine(pool_floor=0, pool_ceiling=3) as engine:
        await engine.create("sb1", SPEC)
        await engine.create("sb2", SPEC)
        await until(lambda: engine.pool() and engine.pool()[0].ready == 2)
        made = await asyncio.gather(*(engine.create(f"p{n}", SPEC) for n in range(3)))
        assert sorted(m.start_kind for m in made) == ["clone", "pool", "pool"]
        assert len({m.vmm_pid for m in made}) == 3
        status = engine.pool()[0]
        assert (status.hits, status.misses) == (2, 3)
        assert {shares_of(house, m.vmm_pid) for m in made} == {"1024"}  # those that waited do not give way any more
        pooled = next(m.id for m in made if m.start_kind == "pool")
        await engine.pause(pooled)
        await engine.resume(pooled)
    assert len(house.left.processes) == 5  # the sandboxes run on; what stood ready is gone
    async with house.engine() as engine:
        assert len(engine.sandboxes()) == 5


async def test_a_host_that_runs_low_on_memory_takes_its_warm_clones_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.engine(pool_floor=0, pool_ceiling=3, memory_floor_mb=512) as engine:
        await engine.create("sb1", SPEC)
        await engine.create("sb2", SPEC)
        await until(lambda: engine.pool() and engine.pool()[0].ready == 2)
        enough = host.memory()
        monkeypatch.setattr("skerry.node.host.memory", lambda: replace(enough, available_mb=511))
        await until(lambda: engine.pool()[0].ready == 0 and len(house.left.processes) == 2)
        assert {s.id for s in engine.sandboxes()} == {"sb1", "sb2"}
        monkeypatch.setattr("skerry.node.host.memory", lambda: enough)
        await until(lambda: engine.pool()[0].ready > 0)


async def test_a_hand_over_that_a_crash_cut_off_is_the_sandboxs(house: House) -> None:
    async with house.engine() as engine:
        await engine.create("sb1", SPEC)
    entry = house.entry("sb1")
    member = {**entry, "sandbox_id": "wm1", "vm_id": "sb1", "phase": "pool"}
    (house.config.journal_dir / "wm1.json").write_text(json.dumps(member))
    async with house.engine() as engine:
        assert [s.id for s in engine.sandboxes()] == ["sb1"]
        assert not (house.config.journal_dir / "wm1.json").exists()


async def test_a_template_whose_image_cannot_be_made_is_booted(house: House) -> None:
    house.faults.fail = {"save"}
    async with house.engine() as engine:
        assert (await engine.create("sb1", SPEC)).start_kind == "boot"
    house.faults.fail = set()


async def test_template_images_are_bounded_and_survive_a_restart(house: House) -> None:
    async with house.engine(template_images=2) as engine:
        for cpu in (1, 2, 3):
            made = await engine.create(f"sb{cpu}", SandboxSpec(cpu=cpu, memory_mb=256, disk_mb=2048))
            assert made.start_kind == "clone"
            await engine.kill(made.id)
        kept = [i.image_id for i in engine.images()]
        assert len(kept) == 2
    async with house.engine(template_images=2) as engine:
        assert [i.image_id for i in engine.images()] == kept
        assert all(i.damage is None for i in await engine.verify_images())
        ram = house.config.state_dir / "images" / kept[0] / "ram"
        ram.write_bytes(ram.read_bytes()[::-1])
        assert [bool(i.damage) for i in await engine.verify_images()].count(True) == 1
