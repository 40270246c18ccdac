"""Where artefacts live: `<cache>/<kind>-<key>/`, complete or absent.

A key is the hash of everything that made the artefact. It is built in a temporary directory beside its place and
renamed when it is complete, under a file lock per artefact: a half-built one is never seen, two builders do not clash.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from skerry.core.errors import InternalError
from skerry.images.model import Progress

KEY_LENGTH: Final = 16
FORMAT: Final = "1"
"""Part of every key: raise it when the layout of the artefacts changes."""


def default_cache_dir() -> Path:
    """$SKERRY_CACHE_DIR, else /var/cache/skerry for root, else ~/.cache/skerry."""
    named = os.environ.get("SKERRY_CACHE_DIR")
    if named:
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path("/var/cache/skerry")
    return Path.home() / ".cache" / "skerry"


def key_of(inputs: Mapping[str, Any]) -> str:
    """The key for these inputs (anything JSON can carry)."""
    text = json.dumps({"format": FORMAT, **inputs}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Content hashes by path relative to `root`, which must hold them all."""
    return {str(path.relative_to(root)): hash_file(path) for path in sorted(paths)}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file (made if missing), waiting for as long as another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Cache:
    """One cache directory. Methods may be called from several threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the directory. Raises InternalError (`cache_unusable`) where that cannot be done."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".probe-"):
                pass
        except OSError as error:
            raise InternalError(
                f"the cache directory {self.root} cannot be used: {error.strerror}; set SKERRY_CACHE_DIR to another",
                code="cache_unusable",
            ) from error

    def place(self, kind: str, key: str) -> Path:
        return self.root / f"{kind}-{key}"

    def find(self, kind: str, key: str) -> Path | None:
        """The directory of a complete artefact, or None."""
        place = self.place(kind, key)
        return place if place.is_dir() else None

    def build(self, kind: str, key: str, make: Callable[[Path], None], *, progress: Progress, step: str) -> Path:
        """The artefact's directory, made by `make(directory)` if it is missing. Failed builds leave nothing."""
        self.prepare()
        place = self.place(kind, key)
        if place.is_dir():
            return place
        with locked(self.root / "locks" / f"{kind}-{key}"):
            if place.is_dir():  # another process made it while this one waited
                return place
            self._sweep(f"{kind}-{key}")
            began = time.monotonic()
            progress.started(step)
            work = Path(tempfile.mkdtemp(dir=self.root, prefix=f".building-{kind}-{key}-"))
            try:
                work.chmod(0o755)
                make(work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            progress.done(step, time.monotonic() - began)
        return place

    def _sweep(self, name: str) -> None:
        """Remove what a builder that was killed left of this artefact; the lock says that none is alive."""
        for left in self.root.glob(f".building-{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
