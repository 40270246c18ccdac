"""Rows about creating, resuming, keeping and copying."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import guest
from bench.measure import Row, p50, p95
from skerry import Client, Sandbox, images
from skerry.core.models import SandboxSpec
from skerry.node.config import NodeConfig
from skerry.node.engine import Engine
from skerry.node.vmm.qemu.driver import QemuDriver
from support.server import Server

FORKS = 20
BURST = 100
POOL = 10


def rows(server: Server, client: dict[str, str], own_ms: float) -> Iterator[Row]:
    yield from warm_rows(server, client, own_ms)
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        yield from asyncio.run(engine_rows(Path(folder)))
    yield from snapshot_rows(server, client)
    yield from burst_rows(server, client)


def timed_create(client: dict[str, str]) -> tuple[float, float, Sandbox]:
    """Milliseconds to the handle and to the first command's output."""
    start = time.perf_counter()
    sandbox = Sandbox.create(**client)
    handle = (time.perf_counter() - start) * 1000
    sandbox.run(["/bin/true"])
    return handle, (time.perf_counter() - start) * 1000, sandbox


def fill_pool(client: dict[str, str], wanted: int, seconds: float = 120) -> None:
    """Ask for sandboxes until the pool has seen enough demand, and wait until it is full."""
    deadline = time.monotonic() + seconds
    with Client(**client) as api:
        while time.monotonic() < deadline:
            shelf = next((p for p in api.pool() if (p.cpu, p.memory_mb) == (1, 512)), None)
            if shelf and shelf.ready >= max(wanted, shelf.wanted):  # and so nothing is being made meanwhile
                return
            if shelf is None or shelf.wanted < wanted:
                Sandbox.create(**client).kill()
            time.sleep(0.5)
    raise TimeoutError(f"the pool did not fill to {wanted}")


def warm_rows(server: Server, client: dict[str, str], own_ms: float) -> Iterator[Row]:
    handles, outputs, pss = [], [], []
    for _ in range(12):
        fill_pool(client, 1)
        handle, output, sandbox = timed_create(client)
        if sandbox.info().start_kind == "pool":
            handles.append(handle)
            outputs.append(output)
        sandbox.kill()
    yield Row("create from the pool -> handle", p50(handles), "ms", len(handles), "<= 30 ms", p50(handles) <= 30,
              p95=p95(handles))  # fmt: skip
    ratio = p50(outputs) / own_ms
    met = p50(outputs) <= 60 and ratio <= 3
    yield Row("create from the pool -> first output", p50(outputs), "ms", len(outputs), "<= 60 ms, <= 3 x", met, ratio,
              "fork+exec", p95(outputs))  # fmt: skip
    cold = []
    for cpu in (2, 2, 2, 2, 2, 2):  # a shape of its own: its image is built by the first, its pool stays behind
        start = time.perf_counter()
        with Sandbox.create(cpu=cpu, memory_mb=256, **client) as sandbox:
            sandbox.run(["/bin/true"])
            took = (time.perf_counter() - start) * 1000
            if sandbox.info().start_kind == "clone":
                cold.append(took)
            time.sleep(1)
            pss.append(guest.pss_mb(guest.vmm(server, sandbox.id).pid))
    cold = cold[1:] or cold
    yield Row("create, pool empty -> first output", p50(cold), "ms", len(cold), "<= 600 ms", p50(cold) <= 600,
              p95=p95(cold))  # fmt: skip
    yield Row("private memory of an idle clone, 256 MB", p50(pss), "MB PSS", len(pss), "<= 65 MB", p50(pss) <= 65)


async def engine_rows(folder: Path) -> list[Row]:
    """What the engine itself needs, without a server: until the VM runs, and until its guest has answered."""
    cache = images.default_cache_dir()
    found = images.load(cache)
    config = NodeConfig(folder, cache, slots=2, pool_floor=0, pool_ceiling=0)
    runs, answers, boots, forks, pauses = [], [], [], [], []
    async with Engine(config, QemuDriver(found.toolchain, "tcg", found.jail), found) as engine:
        await engine.create("sb1", SandboxSpec(memory_mb=256))
        for n in range(8):
            start = time.perf_counter()
            await engine.pause("sb1")
            pauses.append((time.perf_counter() - start) * 1000)
            back = (await engine.resume("sb1")).timings_ms
            runs.append(back["total"] - back["identify"] - back["record"])
            answers.append(back["total"])
            copies = await engine.fork("sb1", {f"f{n}": SandboxSpec()})
            one = copies[f"f{n}"]
            timings = one.timings_ms  # type: ignore[union-attr]
            forks.append(timings["total"] - timings["identify"] - timings["record"])
            await engine.kill(f"f{n}")
        for _ in range(2):
            await engine.pause("sb1", memory=False)
            boot = await engine.resume("sb1")
            boots.append(boot.timings_ms["total"])
        await engine.kill("sb1")
    return [
        Row("resume -> the VM runs", p50(runs), "ms", len(runs), "<= 100 ms", p50(runs) <= 100, p95=p95(runs)),
        Row("fork, from its image -> the VM runs", p50(forks), "ms", len(forks), "<= 100 ms", p50(forks) <= 100,
            p95=p95(forks)),
        Row("resume -> its guest has its identity", p50(answers), "ms", len(answers), p95=p95(answers)),
        Row("pause", p50(pauses), "ms", len(pauses), p95=p95(pauses)),
        Row("cold boot -> its guest has its identity", p50(boots), "ms", len(boots)),
    ]  # fmt: skip


def snapshot_rows(server: Server, client: dict[str, str]) -> Iterator[Row]:
    still = []
    with Sandbox.create(memory_mb=256, **client) as sandbox, Client(**client) as api:
        for _ in range(8):
            sandbox.files.write("/dev/shm/written", os.urandom(8 << 20))
            snapshot = sandbox.snapshot()
            still.append(snapshot.stood_still_ms or 0.0)
            api.snapshots.delete(snapshot)
        yield Row("stand-still of a snapshot, 8 MB and more written", p50(still), "ms", len(still), "<= 40 ms",
                  p50(still) <= 40, p95=p95(still))  # fmt: skip
        start = time.perf_counter()
        copies = sandbox.fork(FORKS)
        with ThreadPoolExecutor(FORKS) as pool:
            answers = list(pool.map(lambda c: c.run(["/bin/echo", "here"]).stdout, copies))
        took = time.perf_counter() - start
        assert answers == ["here\n"] * FORKS
        pss = [guest.pss_mb(guest.vmm(server, c.id).pid) for c in copies]
        for copy in copies:
            copy.kill()
    yield Row(f"{FORKS} forks, all answering", took, "s", 1, "<= 6 s", took <= 6)
    yield Row(f"memory of {FORKS} forks, each", p50(pss), "MB PSS", FORKS)


def burst_rows(_server: Server, client: dict[str, str]) -> Iterator[Row]:
    fill_pool(client, POOL)
    start = time.perf_counter()
    with ThreadPoolExecutor(BURST) as pool:
        made = list(pool.map(lambda _: timed_create(client), range(BURST)))
        took = time.perf_counter() - start
        kinds = [s.created.start_kind for _, _, s in made]
        list(pool.map(lambda m: m[2].kill(), made))
    yield Row(f"{BURST} creates at once, pool of {kinds.count('pool')}, first output of each", took, "s", 1, "<= 30 s",
              took <= 30)  # fmt: skip
