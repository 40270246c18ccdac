"""Which QEMU runs the guests: the host's own, or on Debian 12 the one of its backports, unpacked but not installed.

Version 10 is three times faster than 7.2 in emulation; 7.2 is the oldest that works.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError, InvalidRequest, NotFound, SkerryError
from skerry.images.apt import DPKG_STATUS, PrivateApt, os_release
from skerry.images.cache import Cache, hash_files, key_of
from skerry.images.model import Progress, Toolchain
from skerry.images.process import run

HERE: Final = Path(__file__).parent
ENVIRONMENT: Final = "SKERRY_QEMU"
FLOOR: Final = (7, 2, 0)
GOOD: Final = (8, 2, 0)
"""From here on the host's own is taken without looking further."""
SYSTEM: Final = "qemu-system-x86_64"
PACKAGES: Final = ("qemu-system-x86", "qemu-utils")
BACKPORTS: Final = {"bookworm": ("bookworm", "bookworm-security", "bookworm-backports")}
"""Suites by the host's codename, for hosts whose own QEMU is old."""
NOT_BUILT: Final = "images_not_built"


def backports_apt(cache: Cache) -> PrivateApt | None:
    """The private apt for a better QEMU; None on a host that has no need of one."""
    suites = BACKPORTS.get(os_release().get("VERSION_CODENAME", ""))
    return PrivateApt(cache.root / "apt-backports", suites, status=DPKG_STATUS) if suites else None


def parse_version(text: str) -> tuple[int, int, int] | None:
    """From what `qemu-system-x86_64 --version` prints."""
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _probe(qemu: Path, qemu_img: Path, source: str, root: Path | None = None) -> Toolchain:
    """Run it to learn its version. Raises InternalError (`qemu_unusable`)."""
    env = _unpacked_env(root) if root else {}
    try:
        version = parse_version(run([qemu, "--version"], timeout=20, env=env))
        run([qemu_img, "--version"], timeout=20, env=env)
    except SkerryError as error:
        raise InternalError(f"{qemu} does not run: {error.message}", code="qemu_unusable") from error
    if version is None or version < FLOOR:
        said = f"is version {'.'.join(map(str, version))}" if version else "does not say which version it is"
        raise InternalError(f"{qemu} {said}; 7.2 is the oldest that works", code="qemu_unusable")
    args = ("-L", str(root / "usr/share/qemu"), "-L", str(root / "usr/share/seabios")) if root else ()
    return Toolchain(qemu=qemu, qemu_img=qemu_img, version=version, source=source, args=args, env=env, root=root)


def _unpacked_env(root: Path) -> Mapping[str, str]:
    libraries = root / "usr/lib/x86_64-linux-gnu"
    return {"LD_LIBRARY_PATH": str(libraries), "QEMU_MODULE_DIR": str(libraries / "qemu")}


def _host() -> Toolchain | None:
    qemu, image = shutil.which(SYSTEM), shutil.which("qemu-img")
    return _probe(Path(qemu), Path(image), "host") if qemu and image else None


def _named(path: Path) -> Toolchain:
    """A QEMU named by its path; qemu-img is the one beside it, else the host's."""
    beside = path.parent / "qemu-img"
    image = beside if beside.exists() else Path(shutil.which("qemu-img") or "qemu-img")
    return _probe(path, image, "path")


def backports_key(apt: PrivateApt) -> str | None:
    index = apt.index()
    if index is None:
        return None
    return key_of({"kind": "qemu", "index": index, "recipe": hash_files(HERE, [HERE / "qemu.py"])})


def _unpacked(cache: Cache) -> Toolchain | None:
    apt = backports_apt(cache)
    key = backports_key(apt) if apt else None
    root = cache.find("qemu", key) if key else None
    if root is None:
        return None
    return _probe(root / "usr/bin" / SYSTEM, root / "usr/bin/qemu-img", "backports", root)


def toolchain(cache: Cache, prefer: str | None = None) -> Toolchain:
    """The QEMU to use. `prefer`: "host", "backports" or a path; None: $SKERRY_QEMU, else the best there is.

    Raises InternalError (`qemu_missing`, `qemu_unusable`), NotFound (`images_not_built`) where "backports" is wanted
    but was not unpacked, InvalidRequest for any other word.
    """
    prefer = prefer or os.environ.get(ENVIRONMENT) or None
    if prefer is not None and prefer.startswith("/"):
        return _named(Path(prefer))
    if prefer not in (None, "host", "backports"):
        raise InvalidRequest.of(
            ENVIRONMENT, "is not known", given=prefer, allowed="host, backports or an absolute path"
        )
    if prefer == "backports":
        found = _unpacked(cache)
        if found is None:
            raise NotFound("the backports' QEMU is not unpacked: run `python -m skerry.images build`", code=NOT_BUILT)
        return found
    own = _host()
    if prefer is None and (own is None or own.version < GOOD):
        own = _unpacked(cache) or own
    if own is None:
        raise InternalError("QEMU is not installed: qemu-system-x86 and qemu-utils are needed", code="qemu_missing")
    return own


def build_toolchain(cache: Cache, progress: Progress, *, refresh: bool = False) -> Toolchain:
    """The same choice, but a better QEMU is fetched where the host's own is old and there is one to be had."""
    prefer = os.environ.get(ENVIRONMENT) or None
    apt = backports_apt(cache)
    own = _host() if prefer is None else None
    if prefer == "backports" and apt is None:
        raise InternalError("this host's release has no backports to take QEMU from", code="qemu_missing")
    if apt is not None and (prefer == "backports" or (prefer is None and (own is None or own.version < GOOD))):
        try:
            _fetch(cache, apt, progress, refresh=refresh)
        except SkerryError as error:
            if own is None:
                raise
            progress.line("QEMU", f"stays at {own.version_text}, which emulates slowly: {error.message}")
    return toolchain(cache, prefer)


def _fetch(cache: Cache, apt: PrivateApt, progress: Progress, *, refresh: bool) -> None:
    apt.update(force=refresh)
    key = backports_key(apt)
    if key is None:
        raise InternalError("the archive's index was not fetched", code="no_index")
    step = "QEMU from backports"

    def make(work: Path) -> None:
        progress.line(step, "unpacked in the cache for Skerry alone; the host's own QEMU stays as it is")
        wanted = apt.closure(PACKAGES, release=apt.suites[-1])
        apt.unpack(wanted, work, on_line=lambda text: progress.line(step, text))
        _probe(work / "usr/bin" / SYSTEM, work / "usr/bin/qemu-img", "backports", work)

    cache.build("qemu", key, make, progress=progress, step=step)
