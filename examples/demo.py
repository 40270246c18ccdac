"""What bin/demo shows: one sandbox, a script written into it, its output as it comes, and what everything took."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from skerry import Sandbox
from skerry.cli.settings import SYSTEM_CLIENT_FILE, load_settings

T = TypeVar("T")

SCRIPT = """\
import os, platform, time
print("hello from", platform.node(), "as", os.environ["USER"], flush=True)
for n in range(1, 6):
    print(f"  {n} squared is {n * n}", flush=True)
    time.sleep(0.2)
"""


def main() -> None:
    os.environ["SKERRY_CLIENT_FILE"] = str(load_settings().client_path)  # where this machine's server leaves its key
    console = Console(highlight=False)
    timings: list[tuple[str, float]] = []

    def timed(what: str, act: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = act()
        timings.append((what, (time.perf_counter() - start) * 1000))
        return result

    console.rule("a sandbox")
    sandbox = timed("create", lambda: Sandbox.create("base", timeout=300, metadata={"made-by": "bin/demo"}))
    with sandbox:
        timed("first command (true)", lambda: sandbox.run(["true"]))
        timed("second command (true)", lambda: sandbox.run(["true"]))
        timed("write a file", lambda: sandbox.files.write("/home/user/task.py", SCRIPT))
        console.print("$ python3 task.py", style="bold")
        timed(
            "python3 task.py (sleeps 1 s)",
            lambda: sandbox.run("python3 task.py", on_stdout=lambda text: console.print(text, end="")),
        )
        kernel = sandbox.run("uname -sr").stdout.strip()
        boot = sandbox.run("cat /proc/sys/kernel/random/boot_id").stdout.strip()
        show_kernels(console, sandbox.id, kernel, boot)
        timed("kill", sandbox.kill)
    show_timings(console, timings)
    show_next(console)


def show_kernels(console: Console, sandbox_id: str, kernel: str, boot: str) -> None:
    table = Table("", "the sandbox", "this host", title="two machines")
    table.add_row("id", sandbox_id, platform.node())
    table.add_row("kernel", kernel, f"{platform.system()} {platform.release()}")
    table.add_row("boot id", boot, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    console.print(table)


def show_timings(console: Console, timings: list[tuple[str, float]]) -> None:
    table = Table("step", "ms", title="timings")
    table.columns[1].justify = "right"
    for what, ms in timings:
        table.add_row(what, f"{ms:.1f}")
    console.print(table)


def show_next(console: Console) -> None:
    """Lines to copy: never wrapped."""
    path = load_settings().client_path
    client = json.loads(path.read_text())
    # Only root may read the key that the server left; whoever came by sudo goes on with it.
    elsewhere = f"SKERRY_CLIENT_FILE={path} " if path != SYSTEM_CLIENT_FILE else ""
    skerry = f"{'sudo ' if 'SUDO_UID' in os.environ else ''}{elsewhere}.venv/bin/skerry"
    commands = {
        f"{skerry} run -- python3 -c 'print(6 * 7)'": "a sandbox for one command",
        f"{skerry} shell": "a terminal in a new sandbox",
        f"{skerry} doctor": "what this machine can do",
        "bin/demo --stop": "stop the server",
    }
    width = max(map(len, commands))
    for line in (
        f"address: {client['url']}",
        f"key:     {client['api_key']}   (in {path})",
        "next:",
        *(f"  {command:<{width}}   # {what}" for command, what in commands.items()),
    ):
        console.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
