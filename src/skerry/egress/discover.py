"""Where this machine's package managers get packages from: asked of themselves, so that a company's mirror is found as
well as their built-in defaults. Nothing is fetched, and credentials in addresses are left out.

    pip     its configuration (files and environment); else its built-in index and that index's file host
    npm     its registry, and the registries of scopes
    apt     the repositories of its sources
    cargo   its configuration; else the index its program has built in; and where indices that it has used keep files
    go      GOPROXY and GOSUMDB, as `go env` gives them with its defaults
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from skerry.core.models import CuratedRule
from skerry.core.policy import parse_rule

ANSWER_S: Final = 20.0
PORTS: Final = {"http": 80, "https": 443}
PIP_WHEELS: Final = ("lib/python*/ensurepip/_bundled/pip-*.whl", "share/python-wheels/pip-*.whl")
"""Below a Python's prefix: the pip that comes with Python for new environments."""
_PIP_DEFAULTS: Final = """
from pip._internal.models.index import PyPI
print(PyPI.simple_url)
print("https://" + PyPI.file_storage_domain)
"""
_SPARSE: Final = re.compile(rb"sparse\+(https://[a-z0-9.-]{4,253}/)")
_SETTING: Final = re.compile(r"([\w.:-]+)='(.*)'")

Run = Callable[[Sequence[str]], str]


class Unknown(Exception):
    """A program is not here or does not say. The text is for people."""


@dataclass
class Found:
    rules: list[CuratedRule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be found out, one line each."""


def run(argv: Sequence[str]) -> str:
    """What a program prints. Raises Unknown."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=True, cwd="/")
    except FileNotFoundError:
        raise Unknown(f"there is no {argv[0]} on this machine") from None
    except subprocess.CalledProcessError as error:
        line = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise Unknown(f"{argv[0]} says: {line[:200]}") from None
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise Unknown(f"{argv[0]} could not be asked: {type(error).__name__}") from None
    return done.stdout


def discover(run: Run = run) -> Found:
    """What all of them say. Blocks for as long as the slowest of them takes, at most some twenty seconds each."""
    tools = {"pip": pip, "npm": npm, "apt": apt, "cargo": cargo, "go": go}
    found = Found()
    with ThreadPoolExecutor(len(tools)) as threads:
        asked = {tool: threads.submit(lambda ask=ask: list(ask(run))) for tool, ask in tools.items()}
    for tool, answer in asked.items():
        try:
            said = answer.result()
        except Unknown as error:
            found.notes.append(f"{tool}: {error}")
            continue
        for url, source in said:
            _take(found, tool, url, source)
    return found


async def asked() -> Found:
    """`discover` in a process of its own, which a cancelled caller leaves nothing of."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "skerry.egress.discover",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = await child.communicate()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    try:
        return decode(printed)
    except ValueError:
        return Found(notes=["this machine's package managers could not be asked"])


def encode(found: Found) -> bytes:
    return json.dumps(asdict(found), indent=1).encode()


def decode(data: bytes) -> Found:
    """Raises ValueError."""
    try:
        kept = json.loads(data)
        return Found([CuratedRule(**rule) for rule in kept["rules"]], list(kept["notes"]))
    except (KeyError, TypeError) as error:
        raise ValueError("not what was found") from error


def _take(found: Found, tool: str, url: str, source: str) -> None:
    rule = rule_of(url)
    if rule is None:
        found.notes.append(f"{tool}: {source} names no host: {without_credentials(url)}")
    elif all((known.rule, known.tool) != (rule, tool) for known in found.rules):
        found.rules.append(CuratedRule(rule, tool, source))


def rule_of(url: str) -> str | None:
    """The rule that lets an address be reached, and nothing beside it. None for what is not on the web."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS[parts.scheme]
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        return parse_rule(f"{host}:{port}").text
    except (ValueError, KeyError):
        return None


def without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)[:200]


Said = Iterator[tuple[str, str]]
"""Addresses, each with where it was read."""


# ---------------------------------------------------------------------------------------------------------------- pip


def pip(run: Run) -> Said:
    command, said = _pip_config(run)
    settings = [(m[1], m[2]) for line in said.splitlines() if (m := _SETTING.fullmatch(line)) is not None]
    for name, value in settings:
        if name.endswith(("index-url", "find-links")):
            for url in value.split():
                if not url.startswith(("file:", "/", ".")):
                    yield url, f"pip config: {name}"
    if any(name.endswith(".index-url") for name, _ in settings) or ("no-index", "true") in _short(settings):
        return
    index, files = run([command[0], "-c", _pip_program(command)]).split()
    yield index, "pip's built-in index"
    yield files, "pip's built-in index keeps its files there"


def _short(settings: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(name.rpartition(".")[2], value.lower()) for name, value in settings}


def _pip_config(run: Run) -> tuple[Sequence[str], str]:
    """A Python and how it runs pip, an installed one or the one that comes with it for new environments; and what that
    pip says of its configuration."""
    commands = [[python, "-m", "pip"] for python in ("python3", sys.executable)]
    for prefix in (sys.base_prefix, "/usr"):
        for pattern in PIP_WHEELS:
            commands += [[sys.executable, str(wheel / "pip")] for wheel in sorted(Path(prefix).glob(pattern))]
    for command in commands:
        try:
            return command, run([*command, "config", "list"])
        except Unknown:
            continue
    raise Unknown("there is no pip on this machine")


def _pip_program(command: Sequence[str]) -> str:
    wheel = Path(command[-1]).parent
    return _PIP_DEFAULTS if command[-1] == "pip" else f"import sys\nsys.path.insert(0, {str(wheel)!r})\n{_PIP_DEFAULTS}"


# --------------------------------------------------------------------------------------------------------- npm, apt, go


def npm(run: Run) -> Said:
    yield run(["npm", "config", "get", "registry"]).strip(), "npm config: registry"
    try:
        settings: dict[str, Any] = json.loads(run(["npm", "config", "list", "--json"]))
    except ValueError:
        return
    for name, value in settings.items():
        if name.startswith("@") and name.endswith(":registry") and isinstance(value, str):
            yield value, f"npm config: {name}"


def apt(run: Run) -> Said:
    for url in dict.fromkeys(run(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).split()):
        if not url.startswith(("file:", "cdrom:", "copy:")):
            yield url, "apt's sources"


def go(run: Run) -> Said:
    proxies, sums = run(["go", "env", "GOPROXY", "GOSUMDB"]).splitlines()[:2]
    for url in re.split(r"[,|]", proxies):
        if url not in {"direct", "off", ""}:
            yield url, "go env: GOPROXY"
    if sums and sums != "off":
        words = sums.split()
        yield words[1] if len(words) > 1 else f"https://{words[0].partition('+')[0]}", "go env: GOSUMDB"


# -------------------------------------------------------------------------------------------------------------- cargo


def cargo(run: Run) -> Said:
    run(["cargo", "--version"])
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    sources = _cargo_sources(home)
    yield from sources
    if not any(source.endswith("in place of its own") for _, source in sources):
        yield _cargo_default(run), "cargo's built-in index"
    for file in sorted(home.glob("registry/index/*/config.json")):
        try:
            url = json.loads(file.read_text("utf-8"))["dl"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield str(url), f"cargo: {file.parent.name.rpartition('-')[0]} keeps its files there"


def _cargo_sources(home: Path) -> list[tuple[str, str]]:
    for name in ("config.toml", "config"):
        try:
            settings = tomllib.loads((home / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise Unknown(f"{home / name} cannot be read: {error}") from None
        break
    else:
        return []
    found: list[tuple[str, str]] = []
    instead = settings.get("source", {}).get("crates-io", {}).get("replace-with")
    for kind in ("source", "registries"):
        for label, entry in settings.get(kind, {}).items():
            url = entry.get("registry") or entry.get("index") if isinstance(entry, dict) else None
            if url:
                what = f"cargo config: {kind}.{label}" + (", in place of its own" if label == instead else "")
                found.append((str(url).removeprefix("sparse+"), what))
    return found


def _cargo_default(run: Run) -> str:
    """It tells it nowhere, but has it in its program."""
    path = shutil.which("cargo") or "cargo"
    try:
        real = run(["rustup", "which", "cargo"]).strip()
    except Unknown:
        real = path
    try:
        match = _SPARSE.search(Path(real).read_bytes())
    except OSError as error:
        raise Unknown(f"{real} cannot be read: {error}") from None
    if match is None:
        raise Unknown(f"{real} does not say which index it has built in")
    return match[1].decode("ascii")


if __name__ == "__main__":
    sys.stdout.buffer.write(encode(discover()))
