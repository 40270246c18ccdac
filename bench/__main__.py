"""Measure the targets on this machine: `python -m bench [--out FILE]`. Needs root and built images."""

import argparse
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import rows
from bench.measure import Row
from support.server import Server

RESULTS = Path(__file__).resolve().parent / "results"


def show(measured: list[Row]) -> None:
    table = Table("what", "measured", "p95", "against", "target", "", title="targets")
    for column in (1, 2):
        table.columns[column].justify = "right"
    for row in measured:
        against = f"{row.ratio:.2f} x {row.against}" if row.ratio is not None else ""
        met = {True: "met", False: "[bold red]missed[/]", None: ""}[row.met]
        value = f"{row.value:.1f} {row.unit}"
        table.add_row(row.what, value, "" if row.p95 is None else f"{row.p95:.1f}", against, row.target or "", met)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.json")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        server = Server(Path(folder), SKERRY_MEMORY_SHARE="4").start()
        try:
            measured = rows.measure(server)
            facts = rows.facts(server)
        finally:
            server.destroy()
    show(measured)
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"kernel": platform.release(), "python": platform.python_version()},
        **facts,
        "rows": [row.as_dict() for row in measured],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"saved {out}")


if __name__ == "__main__":
    main()
