"""Every attack that the tests know, run one after the other, and a table of how they ended.

python -m support.redteam [PYTEST-ARGUMENTS]
"""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
ATTACKS = (
    "security",
    "component/test_node_net.py",
    "component/test_node_wall_vm.py",
    "component/test_egress_relay.py",
    "component/test_guestlink_hostile.py",
    "component/test_gateway_wire.py",
    "component/test_sdk_transfer.py",
    "unit/test_egress_dns.py",
    "unit/test_egress_http.py",
    "unit/test_egress_sniff.py",
)


class Outcomes:
    """How each test ended: by file, then by the words of its name."""

    def __init__(self) -> None:
        self.by_file: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, name = report.nodeid.partition("::")
            words = name.partition("[")[0].removeprefix("test_").replace("_", " ")
            self.by_file.setdefault(file, {}).setdefault(words, []).append(report.outcome)

    def table(self) -> Table:
        table = Table("claim", "tries", "outcome", title="attacks")
        table.columns[1].justify = "right"
        for file, claims in self.by_file.items():
            table.add_section()
            table.add_row(f"[bold]{file}[/]")
            for words, outcomes in claims.items():
                tries = [outcome for outcome in outcomes if outcome != "skipped"]
                held = "[green]held[/]" if tries and set(tries) == {"passed"} else "[bold red]BROKEN[/]"
                table.add_row(words, str(len(tries)), held if tries else "not tried")
        return table


def main() -> int:
    outcomes = Outcomes()
    code = pytest.main(["-q", *sys.argv[1:], *(str(TESTS / path) for path in ATTACKS)], plugins=[outcomes])
    Console(width=140).print(outcomes.table())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
