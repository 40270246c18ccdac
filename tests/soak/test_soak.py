"""Random operations on a real server with real VMs, against a model of what must be true after each.

The short form runs with the other tests. `bin/soak` runs the long one: 300 operations or 15 minutes.
SKERRY_SOAK_OPERATIONS, SKERRY_SOAK_SECONDS and SKERRY_SOAK_SEED change it; the seed is in every failure.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import pytest

from skerry import Client, Sandbox, SkerryError
from support.server import Server

OPERATIONS = int(os.environ.get("SKERRY_SOAK_OPERATIONS", "40"))
SECONDS = float(os.environ.get("SKERRY_SOAK_SECONDS", "240"))
SEED = int(os.environ.get("SKERRY_SOAK_SEED", str(time.time_ns() % 1_000_000)))
SANDBOXES_MAX = 6
SNAPSHOTS_MAX = 3
GROWTH_MB = 64


@dataclass
class Model:
    """What one sandbox must hold."""

    state: str = "running"
    disk: dict[str, str] = field(default_factory=dict)
    memory: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "Model":
        return Model("running", dict(self.disk), dict(self.memory))


class Soak:
    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.sandboxes: dict[str, Model] = {}
        self.snapshots: dict[str, Model] = {}
        self.log: list[str] = []
        self.serial = 0
        self.named = ""

    @property
    def client(self) -> dict[str, str]:
        return self.server.client

    def box(self, sandbox_id: str) -> Sandbox:
        return Sandbox.connect(sandbox_id, **self.client)

    def pick(self, state: str) -> str | None:
        found = [name for name, model in self.sandboxes.items() if model.state == state]
        return self.random.choice(found) if found else None

    # ------------------------------------------------------------------------------------------------------ operations

    def create(self) -> None:
        if len(self.sandboxes) < SANDBOXES_MAX:
            made = Sandbox.create(memory_mb=256, timeout=3600, idle_timeout=None, **self.client)
            self.sandboxes[made.id] = Model()

    def create_from_snapshot(self) -> None:
        if self.snapshots and len(self.sandboxes) < SANDBOXES_MAX:
            name = self.random.choice(sorted(self.snapshots))
            asked = "soak" if name == self.named else name  # the name stands for the newest
            made = Sandbox.create(asked, timeout=3600, idle_timeout=None, **self.client)
            self.sandboxes[made.id] = self.snapshots[name].copy()

    def run(self) -> None:
        if name := self.pick("running"):
            number = self.random.randrange(200)
            result = self.box(name).run(f"echo $((6 * 7)); echo e >&2; exit {number}")
            assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "e\n", number)

    def write(self) -> None:
        if name := self.pick("running"):
            self.serial += 1
            text = f"{self.serial} " + "x" * self.random.randrange(20_000)
            where, path = self.random.choice([("disk", "/home/user"), ("memory", "/dev/shm")])
            file = f"{path}/soak{self.random.randrange(4)}"
            self.box(name).files.write(file, text)
            getattr(self.sandboxes[name], where)[file] = text

    def pause(self) -> None:
        if name := self.pick("running"):
            self.box(name).pause()
            self.sandboxes[name].state = "paused"

    def resume(self) -> None:
        if name := self.pick("paused"):
            Sandbox.resume(name, **self.client)
            self.sandboxes[name].state = "running"

    def pause_disk(self) -> None:
        if name := self.pick("running"):
            self.box(name).pause(memory=False)
            self.sandboxes[name].state = "paused"
            self.sandboxes[name].memory.clear()

    def boot(self) -> None:
        if name := self.pick("paused"):
            Sandbox.resume(name, memory=False, **self.client)
            self.sandboxes[name].state = "running"
            self.sandboxes[name].memory.clear()

    def snapshot(self) -> None:
        if len(self.snapshots) < SNAPSHOTS_MAX and (name := self.pick("running")):
            snapshot = self.box(name).snapshot("soak")
            self.snapshots[snapshot.id] = self.sandboxes[name].copy()
            self.named = snapshot.id

    def delete_snapshot(self) -> None:
        if self.snapshots:
            name = self.random.choice(sorted(self.snapshots))
            Client(**self.client).snapshots.delete(name)
            del self.snapshots[name]

    def fork(self) -> None:
        room = SANDBOXES_MAX - len(self.sandboxes)
        if room and (name := self.pick("running")):
            for copy in self.box(name).fork(self.random.randint(1, min(2, room))):
                self.sandboxes[copy.id] = self.sandboxes[name].copy()

    def kill(self) -> None:
        if self.sandboxes:
            name = self.random.choice(sorted(self.sandboxes))
            self.box(name).kill()
            del self.sandboxes[name]

    def crash_server(self) -> None:
        self.server.kill()
        self.server.start()

    def restart_server(self) -> None:
        self.server.stop()
        self.server.start()

    # ---------------------------------------------------------------------------------------------------------- truths

    def check(self) -> None:
        listed = {s.id: s.state for s in Sandbox.list(state=["creating", "running", "paused"], **self.client)}
        assert listed == {name: model.state for name, model in self.sandboxes.items()}
        if name := self.pick("running"):
            model = self.sandboxes[name]
            for file, text in [*model.disk.items(), *model.memory.items()]:
                assert self.box(name).files.read(file) == text, f"{name} {file}"

    def step(self) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (5, self.create), (3, self.create_from_snapshot), (8, self.run), (8, self.write), (5, self.pause),
            (7, self.resume), (3, self.snapshot), (2, self.delete_snapshot), (3, self.fork), (4, self.kill),
            (2, self.pause_disk), (2, self.boot),
            (1, self.crash_server), (1, self.restart_server),
        ]  # fmt: skip
        act = self.random.choices([a for _, a in acts], weights=[w for w, _ in acts])[0]
        self.log.append(act.__name__)
        act()
        self.check()


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 600)
def test_random_operations_agree_with_the_model(new_server: Callable[..., Server]) -> None:
    server = new_server()
    soak = Soak(server, SEED)
    soak.create()
    soak.check()
    assert server.process
    before = psutil.Process(server.process.pid).memory_info().rss
    deadline = time.monotonic() + SECONDS
    for _ in range(OPERATIONS):
        if time.monotonic() > deadline:
            break
        try:
            soak.step()
        except (AssertionError, SkerryError) as error:
            raise AssertionError(f"seed {SEED}, after {soak.log[-12:]}: {error!r}") from error
    grown = psutil.Process(server.process.pid).memory_info().rss - before
    for name in list(soak.snapshots):
        Client(**soak.client).snapshots.delete(name)
    print(f"seed {SEED}: {len(soak.log)} operations: { {n: soak.log.count(n) for n in sorted(set(soak.log))} }")
    assert grown < GROWTH_MB << 20
