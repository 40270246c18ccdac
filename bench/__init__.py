"""What the performance targets are measured with. `bin/bench` runs it."""

import sys
from pathlib import Path

# The benchmark starts the same real server as the tests do.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
