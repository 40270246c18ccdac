"""The guest agent's image: a Python of its own and the package `skerry.guest`, for any root filesystem.

Nothing in it depends on where it is mounted into: it is started by its own dynamic loader with its own libraries.

    lib/        ld-linux-x86-64.so.2 and the C libraries
    bin/        python3.13, and `agent`, the script that calls `skerry.guest.agent.main`
    lib/python3.13/   the standard library (compiled, sources left out) and skerry.core, skerry.guest

ext4, because the kernel has it built in: no module to load, and nothing to decompress in an emulated guest.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images import compiled, ext4
from skerry.images.apt import PrivateApt
from skerry.images.cache import Cache, hash_file, hash_files, key_of
from skerry.images.model import AgentImage, Progress
from skerry.images.process import run

HERE: Final = Path(__file__).parent
SOURCE: Final = HERE.parent
"""The directory of the package `skerry`."""

MOUNTPOINT: Final = "/run/skerry/agent"
PYTHON: Final = "python3.13"
LOADER: Final = "ld-linux-x86-64.so.2"
ENTRY: Final = (
    f"{MOUNTPOINT}/lib/{LOADER}", "--inhibit-cache", "--library-path", f"{MOUNTPOINT}/lib",
    "--argv0", f"{MOUNTPOINT}/bin/{PYTHON}", f"{MOUNTPOINT}/bin/{PYTHON}",
    "-I", "-S", "-B", "-X", "utf8", f"{MOUNTPOINT}/bin/agent",
)  # fmt: skip
"""What the guest runs as PID 1. `-I -S -B`: nothing of the guest's environment or files reaches the interpreter."""

SCRIPT: Final = "import sys\n\nfrom skerry.guest.agent import main\n\nsys.exit(main())\n"
PACKAGES: Final = (
    "libc6", "libexpat1", "libffi8", "libpython3.13-minimal", "libpython3.13-stdlib", "python3.13-minimal", "zlib1g",
)  # fmt: skip
UUID: Final = "5b6f1d1e-7d0a-4e4b-9c0c-5ce44a9e0001"
UNUSED: Final = frozenset({
    "__phello__", "_pyrepl", "config-3.13-x86_64-linux-gnu", "curses", "dbm", "dist-packages", "ensurepip", "idlelib",
    "lib2to3", "pydoc_data", "site-packages", "sqlite3", "test", "tkinter", "turtledemo", "unittest", "venv",
    "wsgiref", "xmlrpc", "antigravity.py", "doctest.py", "pdb.py", "pydoc.py", "this.py", "turtle.py",
    "sitecustomize.py",
})  # fmt: skip
"""Of the standard library: what no agent has a use for."""
UNUSED_EXTENSIONS: Final = re.compile(r"_(codecs_(cn|hk|iso2022|jp|kr|tw)|test\w*|xxtestfuzz|ctypes_test)\.|xx\w+\.")


def agent_key(apt: PrivateApt, guest_source: Path | None = None) -> str | None:
    """None before the archive's index was fetched."""
    index = apt.index()
    if index is None:
        return None
    code: dict[str, str] = {}
    for name, directory in sorted(_packages(guest_source).items()):
        code |= {f"{name}/{path.relative_to(directory)}": hash_file(path) for path in _sources(directory)}
        code |= {f"{name}/{path.name}": hash_file(path) for path in directory.glob("*.c")}
    recipe = hash_files(HERE, [HERE / "agent.py", HERE / "compiled.py", HERE / "ext4.py"])
    return key_of({"kind": "agent", "index": index, "recipe": recipe, "code": code})


def find_agent(cache: Cache, apt: PrivateApt, guest_source: Path | None = None) -> AgentImage | None:
    key = agent_key(apt, guest_source)
    place = cache.find("agent", key) if key else None
    return AgentImage(key=key, image=place / "agent.ext4") if key and place else None


def build_agent(cache: Cache, apt: PrivateApt, progress: Progress, guest_source: Path | None = None) -> AgentImage:
    """The agent's image. `guest_source`: a directory to take for the package skerry.guest (ours if None)."""
    key = agent_key(apt, guest_source)
    if key is None:
        raise InternalError("the archive's index was not fetched", code="no_index")
    runtime = _build_runtime(cache, apt, progress)
    packages = _packages(guest_source)
    birth = compiled.birth(packages["guest"] / "birth.c").build(cache, apt, progress)
    step = "guest agent"

    def make(work: Path) -> None:
        tree = work / "tree"
        shutil.copytree(runtime, tree, symlinks=True)
        library = tree / "lib" / PYTHON / "skerry"
        library.mkdir()
        (library / "__init__.py").touch()
        for name, directory in packages.items():
            for path in _sources(directory):
                target = library / name / path.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        shutil.copyfile(birth, library / "guest" / birth.name)
        _compile(tree, library)
        script = tree / "bin" / "agent"
        script.write_text(SCRIPT, encoding="utf-8")
        script.chmod(0o755)
        _make_image(work / "agent.ext4", tree)
        progress.line(step, f"{(work / 'agent.ext4').stat().st_size // 1024} KiB")
        shutil.rmtree(tree)

    place = cache.build("agent", key, make, progress=progress, step=step)
    return AgentImage(key=key, image=place / "agent.ext4")


def _packages(guest_source: Path | None) -> dict[str, Path]:
    """The packages below `skerry` that go on the image."""
    return {"core": SOURCE / "core", "guest": guest_source or SOURCE / "guest"}


def _sources(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.py") if "__pycache__" not in path.parts)


# ------------------------------------------------------------------------------------------------------ the interpreter


def _build_runtime(cache: Cache, apt: PrivateApt, progress: Progress) -> Path:
    """The tree without our code, kept apart because it changes seldom."""
    recipe = hash_files(HERE, [HERE / "agent.py"])
    key = key_of({"kind": "runtime", "index": apt.index(), "recipe": recipe})
    step = "the agent's interpreter"

    def make(work: Path) -> None:
        unpacked = work / "unpacked"
        apt.unpack(PACKAGES, unpacked, on_line=lambda text: progress.line(step, text))
        _arrange(unpacked, work)
        shutil.rmtree(unpacked)
        _compile(work, work / "lib" / PYTHON)

    return cache.build("runtime", key, make, progress=progress, step=step)


def _arrange(unpacked: Path, tree: Path) -> None:
    """Pick from unpacked packages what the interpreter needs."""
    (tree / "bin").mkdir()
    shutil.copy2(unpacked / "usr" / "bin" / PYTHON, tree / "bin" / PYTHON)
    library = tree / "lib" / PYTHON

    def unused(directory: str, names: Iterable[str]) -> set[str]:
        dropped = {name for name in names if name in UNUSED or UNUSED_EXTENSIONS.match(name)}
        return dropped | {n for n in names if Path(directory, n).is_symlink() and not Path(directory, n).exists()}

    shutil.copytree(unpacked / "usr" / "lib" / PYTHON, library, ignore=unused)
    folders = [unpacked / "usr/lib/x86_64-linux-gnu", unpacked / "lib/x86_64-linux-gnu"]
    available = {path.name: path for folder in folders if folder.is_dir() for path in folder.glob("*.so*")}
    shutil.copy2(available[LOADER].resolve(), tree / "lib" / LOADER)
    wanted = _libraries(tree, tree / "bin" / PYTHON, available)
    if wanted is None:
        raise InternalError("the interpreter needs a library that its packages lack", code="package_unexpected")
    for extension in sorted((library / "lib-dynload").glob("*.so")):
        needed = _libraries(tree, extension, available)
        if needed is None:  # it is for a library that we do not carry (OpenSSL, SQLite, readline …)
            extension.unlink()
        else:
            wanted |= needed
    for name in sorted(wanted):
        shutil.copy2(available[name].resolve(), tree / "lib" / name)


def _libraries(tree: Path, binary: Path, available: dict[str, Path]) -> set[str] | None:
    """Names of the libraries that a binary needs, itself and through others; None if one of them is not available."""
    where = ":".join(sorted({str(path.parent) for path in available.values()}))
    text = run([tree / "lib" / LOADER, "--inhibit-cache", "--library-path", where, "--list", binary], timeout=60)
    names: set[str] = set()
    for line in text.splitlines():
        name, _, target = line.strip().partition(" => ")
        if not target or name.startswith("/"):
            continue  # the loader itself, or the kernel's vdso
        if name not in available or not target.startswith(str(available[name].parent)):
            return None
        names.add(name)
    return names


def _compile(tree: Path, directory: Path) -> None:
    """Replace sources by byte code that is never checked against them: nothing is written and little is looked up."""
    python = [tree / "lib" / LOADER, "--inhibit-cache", "--library-path", _library_path(tree)]
    python += ["--argv0", str(tree / "bin" / PYTHON), tree / "bin" / PYTHON, "-S", "-B", "-X", "utf8"]
    words = ["-m", "compileall", "-q", "-b", "--invalidation-mode", "unchecked-hash"]
    words += ["-s", str(tree), "-p", MOUNTPOINT, str(directory)]
    clean = {"PYTHONHASHSEED": "0", "PYTHONPATH": "", "PYTHONHOME": ""}
    run([*python, *words], timeout=600, env=clean)
    for source in directory.rglob("*.py"):
        source.unlink()


def _library_path(tree: Path) -> str:
    return str(tree / "lib")


def _make_image(image: Path, tree: Path) -> None:
    ext4.require_root()
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            os.lchown(Path(directory, name), 0, 0)
    ext4.set_times(tree)
    options = ["-O", "^has_journal,^resize_inode,^metadata_csum,^huge_file,^dir_nlink", "-i", "8192"]
    ext4.make(image, tree, label="skerry-agent", uuid=UUID, size_kb=ext4.needed_kb(tree), options=options)
