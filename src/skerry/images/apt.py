"""A private apt: Debian's archive for another suite, without touching the host's apt.

It has its own sources, lists, state and package cache under the cache directory. What it takes from the host: the
mirror (from the host's own sources), the archive's keyring, and proxies and certificates (apt's configuration).
The signed index it fetched is kept: it pins every package's version and hash, so that one index gives one result.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from skerry.core.errors import InternalError
from skerry.images.cache import locked
from skerry.images.process import run

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
UPDATE_SECONDS: Final = 300
DOWNLOAD_SECONDS: Final = 1200
DPKG_STATUS: Final = Path("/var/lib/dpkg/status")


def os_release() -> Mapping[str, str]:
    """The host's /etc/os-release."""
    text = Path("/etc/os-release").read_text(encoding="utf-8")
    return {name: value.strip("\"'") for name, value in re.findall(r"(?m)^([A-Z_]+)=(.*)$", text)}


@dataclass(frozen=True, slots=True)
class Mirrors:
    """Where the host gets Debian from."""

    main: str
    security: str | None


def parse_targets(text: str, codename: str) -> Mirrors | None:
    """Choose from lines "URI SUITE ORIGIN" of `apt-get indextargets`; None where none is Debian's own archive.

    ORIGIN is only known once the host's lists were fetched: before that, "$(ORIGIN)" stands there and the suite's name
    and an address that ends in /debian have to do.
    """
    main = security = None
    for line in text.splitlines():
        uri, suite, origin = [*line.split(), "", "", ""][:3]
        known = origin == "Debian" or (
            origin in ("", "$(ORIGIN)") and re.search(r"/debian(-security)?/?$", uri) is not None
        )
        if not known:
            continue
        if suite in (codename, "stable", "oldstable") and main is None:
            main = uri
        elif suite.endswith("-security") and security is None:
            security = uri
    return Mirrors(main, security) if main else None


def host_mirrors() -> Mirrors:
    """Raises InternalError (`no_mirror`) where the host's apt knows no Debian mirror."""
    text = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages"], timeout=60
    )
    mirrors = parse_targets(text, os_release().get("VERSION_CODENAME", ""))
    if mirrors is None:
        raise InternalError("the host's apt sources name no Debian mirror", code="no_mirror")
    return mirrors


def source_lines(suites: Sequence[str], mirrors: Mirrors, keyring: Path = KEYRING) -> str:
    """A sources.list for these suites; one that ends in -security is left out where the host has no such mirror."""
    lines: list[str] = []
    for suite in suites:
        uri = mirrors.security if suite.endswith("-security") else mirrors.main
        if uri is not None:
            lines.append(f"deb [arch=amd64 signed-by={keyring}] {uri} {suite} main\n")
    return "".join(lines)


def without_credentials(sources: str) -> str:
    """The same sources with any `user:password@` taken out of their addresses, for files that others may read."""

    def clean(match: re.Match[str]) -> str:
        parts = urlsplit(match[0])
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    return re.sub(r"\b[a-z+]+://\S+", clean, sources)


class PrivateApt:
    """One set of suites with its own state in `root`. Safe to use from several processes."""

    def __init__(self, root: Path, suites: Sequence[str], *, status: Path | None = None) -> None:
        """`status` is the dpkg status that dependencies are resolved against; None: nothing is installed."""
        self.root = root
        self.suites = tuple(suites)
        self._status = status
        self._index: str | None = None

    @property
    def lists(self) -> Path:
        return self.root / "lists"

    @property
    def sources(self) -> Path:
        return self.root / "sources.list"

    def index(self) -> str | None:
        """The hash of the signed index that is held, which pins every package; None before the first update."""
        if self._index is None:
            found = sorted(self.lists.glob("*_InRelease"))
            if found and (self.root / "complete").exists():
                digest = hashlib.sha256()
                for path in found:
                    digest.update(path.read_bytes())
                self._index = digest.hexdigest()[:16]
        return self._index

    def update(self, *, force: bool = False) -> None:
        """Fetch the index if there is none, or `force`. Raises InternalError."""
        if not force and self.index() is not None:
            return
        if not KEYRING.exists():
            raise InternalError("debian-archive-keyring is not installed", code="tool_missing", tool=str(KEYRING))
        with locked(self.root / "lock"):
            self._index = None
            if not force and self.index() is not None:
                return
            for directory in ("lists/partial", "archives/partial", "parts"):
                (self.root / directory).mkdir(parents=True, exist_ok=True)
            (self.root / "status").touch()
            self.sources.write_text(source_lines(self.suites, host_mirrors()), encoding="utf-8")
            self._apt_get("update", "-q", "-o", "APT::Update::Error-Mode=any", timeout=UPDATE_SECONDS)
            (self.root / "complete").touch()

    def options(self) -> list[str]:
        """Options that turn the host's apt into this one."""
        root = self.root
        settings = {
            "Dir::State": root,
            "Dir::State::lists": self.lists,
            "Dir::State::status": self._status or root / "status",
            "Dir::Cache": root,
            "Dir::Cache::archives": root / "archives",
            "Dir::Cache::pkgcache": root / "pkgcache.bin",
            "Dir::Cache::srcpkgcache": root / "srcpkgcache.bin",
            "Dir::Etc::sourcelist": self.sources,
            "Dir::Etc::sourceparts": root / "parts",
            "Dir::Etc::preferences": root / "parts" / "none",
            "Dir::Etc::preferencesparts": root / "parts",
            "APT::Architecture": "amd64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "true",
        }
        return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def depends(self, package: str, pattern: str) -> str:
        """The one package that `package` depends on and that matches the whole `pattern`."""
        text = self._cache("show", "--no-all-versions", package)
        match = re.search(r"(?m)^Depends: (.*)$", text)
        names = {word.split()[0] for word in match[1].split(",")} if match else set()
        found = sorted(name for name in names if re.fullmatch(pattern, name))
        if len(found) != 1:
            raise InternalError(f"{package} depends on {found or 'nothing'} like {pattern}", code="package_unexpected")
        return found[0]

    def closure(self, packages: Sequence[str], *, release: str | None = None) -> list[str]:
        """What apt would install for these, given the status: "name=version" words, in name order."""
        words = ["-s", "-qq", "install", *packages]
        if release is not None:
            words[:0] = ["-t", release]
        text = self._apt_get(*words, timeout=120)
        return sorted(
            f"{name}={version}" for name, version in re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+)", text)
        )

    def fetch(self, packages: Sequence[str], into: Path) -> list[Path]:
        """Download these packages ("name" or "name=version"), checked against the index. Gives the files by name.

        If the mirror no longer has what the index names, InternalError: `update(force=True)` then brings a new index.
        """
        archives = self.root / "archives"
        into.mkdir(parents=True, exist_ok=True)
        found: list[Path] = []
        with locked(self.root / "lock"), tempfile.TemporaryDirectory(dir=self.root, prefix=".fetch-") as scratch:
            for kept in archives.glob("*.deb"):  # apt takes these over after it has checked their hashes
                os.link(kept, Path(scratch) / kept.name)
            wanted = self._apt_get("--print-uris", "-qq", "download", *packages, timeout=120)
            self._apt_get("-q", "download", *packages, timeout=DOWNLOAD_SECONDS, cwd=Path(scratch))
            for name in re.findall(r"(?m)^'[^']*' (\S+) ", wanted):
                fetched = Path(scratch) / name
                if not (archives / name).exists():
                    os.link(fetched, archives / name)
                found.append(Path(shutil.copy2(fetched, into / name)))
        return sorted(found)

    def unpack(
        self, packages: Sequence[str], into: Path, *, on_line: Callable[[str], None] = lambda _: None
    ) -> dict[str, str]:
        """Fetch and unpack packages; nothing of them is run. Gives versions by name."""
        versions: dict[str, str] = {}
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".unpack-") as scratch:
            for deb in self.fetch(packages, Path(scratch)):
                name, version = run(["dpkg-deb", "-f", deb, "Package", "Version"], timeout=60).splitlines()
                versions[name.partition(": ")[2]] = version.partition(": ")[2]
                on_line(f"{name.partition(': ')[2]} {version.partition(': ')[2]}")
                into.mkdir(parents=True, exist_ok=True)
                run(["dpkg-deb", "-x", deb, into], timeout=300)
        return versions

    def _apt_get(self, *words: str, timeout: float, cwd: Path | None = None) -> str:
        return run(
            ["apt-get", *self.options(), *words], timeout=timeout, cwd=cwd, env={"DEBIAN_FRONTEND": "noninteractive"}
        )

    def _cache(self, *words: str) -> str:
        return run(["apt-cache", *self.options(), *words], timeout=60)
