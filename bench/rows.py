"""The rows of the targets' table, each measured through the public SDK against a real server."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from bench import faces, guest, memory, neighbours, redaction
from bench.measure import Row, p50, p95, times_ms
from skerry import Sandbox
from support.server import Server

FILE_MB = 256
RESTART_SANDBOXES = 20


def facts(server: Server) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    answer = httpx.get(f"{server.url}/v1/server", headers=headers).json()
    return {"server": {k: answer[k] for k in ("version", "accelerator", "vmm")}, "cpus": os.cpu_count()}


def measure(server: Server) -> list[Row]:
    client = {"url": server.url, "api_key": server.api_key}
    with Sandbox.create(memory_mb=1024, timeout=3600, idle_timeout=None, **client) as sandbox:
        rows = list(exec_rows(sandbox))
        rows += file_rows(sandbox, server)
        rows += faces.rows(server, sandbox)
    rows += memory.rows(server, client, next(r.value for r in rows if r.what.startswith("guest's own")))
    rows += neighbours.rows(client)
    rows += restart_rows(server, client)
    rows += redaction.rows(server, client)
    return rows


def exec_rows(sandbox: Sandbox) -> Iterator[Row]:
    own = float(sandbox.run(["python3", "-c", guest.FORK_EXEC]).stdout)
    trips = times_ms(lambda: sandbox.run(["/bin/true"]), 60, warm_up=10)
    own_after = float(sandbox.run(["python3", "-c", guest.FORK_EXEC]).stdout)
    own = (own + own_after) / 2
    share = p50(trips) - own
    yield Row("guest's own fork+exec of /bin/true", own, "ms", 80)
    yield Row("command round trip", p50(trips), "ms", 60, ratio=p50(trips) / own, against="fork+exec", p95=p95(trips))
    yield Row("our share of a command's round trip", share, "ms", 60, target="<= 5 ms", met=share <= 5)
    shell = times_ms(lambda: sandbox.run("true"), 30, warm_up=3)
    yield Row("shell command round trip", p50(shell), "ms", 30, ratio=p50(shell) / own, against="fork+exec")


def file_rows(sandbox: Sandbox, server: Server) -> Iterator[Row]:
    assert server.process
    process, vm = psutil.Process(server.process.pid), guest.vmm(server, sandbox.id)
    block, size = os.urandom(1 << 20), FILE_MB << 20
    rss = process.memory_info().rss
    up, down, raw_up, raw_down = [], [], [], []
    receiver = sandbox.commands.start(["python3", "-c", guest.RECEIVE])
    next(iter(receiver))
    sender = None
    for _ in range(3):
        start = time.perf_counter()
        with guest.connect(vm.pid, 9000) as line:
            for _ in range(FILE_MB):
                line.sendall(block)
            line.shutdown(1)
            line.recv(1)
        raw_up.append(FILE_MB / (time.perf_counter() - start))
        start = time.perf_counter()
        sandbox.files.write("/tmp/bench.bin", (block for _ in range(FILE_MB)))
        up.append(FILE_MB / (time.perf_counter() - start))
        if sender is None:
            sender = sandbox.commands.start(["python3", "-c", guest.SEND])
            next(iter(sender))
        start = time.perf_counter()
        with guest.connect(vm.pid, 9001) as line:
            buffer, got = bytearray(262_144), 0
            while n := line.recv_into(buffer):
                got += n
        assert got == size
        raw_down.append(FILE_MB / (time.perf_counter() - start))
        start = time.perf_counter()
        assert sum(len(c) for c in sandbox.files.stream("/tmp/bench.bin")) == size
        down.append(FILE_MB / (time.perf_counter() - start))
    grown = (process.memory_info().rss - rss) / 1e6
    for name, ours, raw in (("upload", up, raw_up), ("download", down, raw_down)):
        ratio = p50(ours) / p50(raw)
        yield Row(
            f"{name} of {FILE_MB} MB", p50(ours), "MB/s", 3, ratio=ratio,
            against=f"raw TCP ({p50(raw):.0f} MB/s)", target=">= 0.8 x", met=ratio >= 0.8,
        )  # fmt: skip
    yield Row("server memory growth over it", grown, "MB", 1, target="< 64 MB", met=grown < 64)
    receiver.kill()
    if sender:
        sender.kill()


def restart_rows(server: Server, client: dict[str, str]) -> Iterator[Row]:
    with ThreadPoolExecutor(4) as pool:
        sandboxes = list(
            pool.map(
                lambda _: Sandbox.create(memory_mb=256, timeout=3600, idle_timeout=None, **client),
                range(RESTART_SANDBOXES),
            )
        )
    processes = [s.commands.start("for i in $(seq 1 200); do echo $i; sleep 0.05; done; exit 9") for s in sandboxes]
    server.kill()
    start = time.perf_counter()
    server.start()
    states = [Sandbox.connect(s.id, **client).info().state for s in sandboxes]
    took = time.perf_counter() - start
    assert states == ["running"] * RESTART_SANDBOXES
    results = [
        Sandbox.connect(s.id, **client).commands.attach(p.process_id).wait()
        for s, p in zip(sandboxes, processes, strict=True)
    ]
    lost = sum(r.exit_code != 9 or r.stdout.split() != [str(n) for n in range(1, 201)] for r in results)
    pss = [guest.pss_mb(guest.vmm(server, s.id).pid) for s in sandboxes]
    for sandbox in sandboxes:
        sandbox.kill()
    yield Row(
        f"server killed and started with {RESTART_SANDBOXES} running sandboxes",
        took,
        "s",
        1,
        target="<= 3 s",
        met=took <= 3,
    )
    yield Row("commands lost over it", lost, "", RESTART_SANDBOXES, target="0", met=lost == 0)
    yield Row(
        f"memory of {RESTART_SANDBOXES} sandboxes that ran something, each", p50(pss), "MB PSS", RESTART_SANDBOXES
    )
