"""Which QEMU, CPU model, translation buffer and kernel arguments are fastest without KVM. Needs root.

    python -m bench.emulation [--rounds N] [--lock FILE] [--out FILE]

Each sample boots a guest of its own, and the variants take turns, so that a machine whose speed drifts is fair to all.
A sample takes well under a minute, is saved as soon as it is taken, and is not taken again: the measurement can be
stopped at any moment and goes on where it was. With `--lock` each sample waits until it holds that file alone (as
flock(1) does), so that it can share a machine with other work.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.guest import FORK_EXEC, private_mb
from skerry import images
from skerry.core import ids
from skerry.core.models import Exited, Output, ProcessSpec, SandboxSpec
from skerry.node.config import NodeConfig
from skerry.node.contract import Guest
from skerry.node.engine import Engine
from skerry.node.vmm.qemu import argv
from skerry.node.vmm.qemu.driver import QemuDriver

RESULTS = Path(__file__).resolve().parent / "results" / "emulation.json"
ROUNDS = 3
TIMES = 5
COMMANDS = {
    "fork+exec": ["python3", "-c", FORK_EXEC],
    "bash -l": ["bash", "-l", "-c", "true"],
    "python3": ["python3", "-c", "1"],
    "sha256, 8 MB": ["sh", "-c", "head -c 8000000 /dev/zero | sha256sum"],
}

Sample = dict[str, float]


@dataclass(frozen=True)
class Variant:
    qemu: str = "backports"
    """What `skerry.images.toolchain` is asked for."""
    cpu: str = argv.CPU["tcg"]
    translation_mb: int = argv.TRANSLATION_MB
    kernel: tuple[str, ...] = argv.UNGUARDED

    @property
    def name(self) -> str:
        return f"{self.qemu} {self.cpu} {self.translation_mb} MB {' '.join(self.kernel)}".strip()


CHOSEN = Variant()
VARIANTS = (
    CHOSEN,
    Variant(qemu="host"),
    Variant(cpu="max"),
    Variant(qemu="host", cpu="max"),
    Variant(cpu="Haswell-v4,la57=off"),
    Variant(translation_mb=32),
    Variant(translation_mb=256),
    Variant(kernel=()),
    Variant(kernel=("mitigations=off",)),
)


@contextmanager
def shaped(variant: Variant) -> Iterator[None]:
    """The command line as a variant has it."""
    kept = argv.CPU["tcg"], argv.TRANSLATION_MB, argv.UNGUARDED
    argv.CPU["tcg"] = variant.cpu  # type: ignore[index]
    argv.TRANSLATION_MB, argv.UNGUARDED = variant.translation_mb, variant.kernel  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        argv.CPU["tcg"], argv.TRANSLATION_MB, argv.UNGUARDED = kept  # type: ignore[index,misc]


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the machine for ourselves, where there is an agreed way to."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            file = stack.enter_context(lock.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def run(guest: Guest, command: list[str]) -> tuple[float, str]:
    """Milliseconds, and what it printed."""
    began, out = time.perf_counter(), b""
    stream = await guest.start(ProcessSpec(ids.new_id(ids.PROCESS), argv=tuple(command)))
    async for event in stream:
        if isinstance(event, Output):
            out += event.data
        elif isinstance(event, Exited) and event.status.exit_code != 0:
            raise RuntimeError(f"{command[0]} failed in the guest: {event.status}")
    return (time.perf_counter() - began) * 1000, out.decode()


async def measure(variant: Variant, cache: Path, folder: Path) -> Sample:
    config = NodeConfig(folder, cache, slots=0, pool_floor=0, pool_ceiling=0)
    found: Sample = {}
    found_images = images.load(cache)
    driver = QemuDriver(images.toolchain(cache, variant.qemu), "tcg", found_images.jail)
    with shaped(variant):
        async with Engine(config, driver, found_images) as engine:
            began = time.perf_counter()
            await engine.create("sb1", SandboxSpec(memory_mb=512))  # boots the template's image, and clones it
            found["boot s"] = time.perf_counter() - began
            made = await engine.create("sb2", SandboxSpec(memory_mb=512))
            found["clone"] = made.timings_ms["total"]
            guest = engine.guest("sb2")
            for name, command in COMMANDS.items():
                await run(guest, command)
                times = [await run(guest, command) for _ in range(TIMES)]
                own = name == "fork+exec"
                found[name] = statistics.median(float(out) if own else ms for ms, out in times)
            found["private MB"] = private_mb(made.vmm_pid)
            await engine.kill("sb1")
            await engine.kill("sb2")
    return found


def table(samples: dict[str, list[Sample]], cache: Path) -> Table:
    columns = list(next(s[0] for s in samples.values() if s))
    made = Table("QEMU", "CPU model", "buffer MB", "kernel", *columns, "n", title="medians, ms")
    for variant in VARIANTS:
        if found := samples.get(variant.name):
            version = images.toolchain(cache, variant.qemu).version_text
            figures = [f"{statistics.median(s[c] for s in found):.1f}" for c in columns]
            kernel = " ".join(variant.kernel)
            made.add_row(version, variant.cpu, str(variant.translation_mb), kernel, *figures, str(len(found)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    cache = images.default_cache_dir()
    samples: dict[str, list[Sample]] = json.loads(asked.out.read_text())["samples"] if asked.out.exists() else {}
    for number in range(asked.rounds):
        for variant in VARIANTS:
            taken = samples.setdefault(variant.name, [])
            if len(taken) > number:
                continue
            with alone(asked.lock), tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
                taken.append(asyncio.run(measure(variant, cache, Path(folder))))
            shape = {v.name: dataclasses.asdict(v) for v in VARIANTS}
            asked.out.write_text(json.dumps({"variants": shape, "samples": samples}, indent=1) + "\n")
            print(f"round {number + 1}: {variant.name}", flush=True)
    Console(width=170).print(table(samples, cache))


if __name__ == "__main__":
    main()
