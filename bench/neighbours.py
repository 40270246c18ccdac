"""What a sandbox that misbehaves costs the one beside it: p99 of a command, ratios within one run."""

from collections.abc import Iterator
from typing import Any, Final

from bench.measure import Row, percentile, times_ms
from skerry import Sandbox
from support.misbehaviour import ATTACKS

COMMANDS: Final = 100


def rows(client: dict[str, Any]) -> Iterator[Row]:
    with Sandbox.create(memory_mb=512, timeout=3600, idle_timeout=None, **client) as victim:

        def p99() -> float:
            return percentile(times_ms(lambda: victim.run(["/bin/true"]), COMMANDS, warm_up=10), 99)

        for what, attack in ATTACKS.items():
            with Sandbox.create(memory_mb=256, timeout=3600, idle_timeout=None, **client) as attacker:
                alone = p99()
                attacker.commands.start(attack, timeout=None)
                beside = p99()
            ratio = beside / alone
            yield Row(f"p99 of a command beside {what}", beside, "ms", COMMANDS, "<= 2 x", ratio <= 2, ratio,
                      f"alone ({alone:.1f} ms)")  # fmt: skip
