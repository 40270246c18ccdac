"""The generated code is what the generator makes of the .proto files."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "src" / "skerry" / "api" / "e2b" / "gen"


def test_generated_code_agrees_with_the_proto_files(tmp_path: Path) -> None:
    template = (ROOT / "buf.gen.yaml").read_text()
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [
            str(tools / "buf"),
            "generate",
            "--template",
            template.replace("out: src/skerry/api/e2b/gen", f"out: {tmp_path}"),
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "BUF_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    fresh = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    kept = {path.name: path.read_text() for path in GENERATED.glob("*.py") if path.name != "__init__.py"}
    assert fresh.keys() == {"process_pb.py", "process_connect.py", "filesystem_pb.py", "filesystem_connect.py"}
    assert kept == fresh, "run: .venv/bin/buf generate (with .venv/bin in PATH)"
