"""What a template is made of: a JSON file per recipe in `files/`.

extends       another recipe's name, whose fields hold where this one has none; lists of packages are joined
packages      Debian packages
wheels        Python packages: [{"lock": FILE, "site": DIRECTORY, "prefix": DIRECTORY}]
sources       our own code for the guest: [{"package": NAME BELOW skerry, "into": DIRECTORY}]
compile       directories whose Python is byte-compiled, beside Debian's own
default_user, default_cwd, env, disks_mb
cpu, memory_mb    for sandboxes whose creator names none
start         {"command", "ready", "user", "ready_timeout_s"}: see `skerry.images.model.Start`
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skerry.core.errors import NotFound
from skerry.images.cache import hash_file
from skerry.images.model import Start

HERE: Final = Path(__file__).parent
SKERRY: Final = HERE.parent
FILES: Final = HERE / "files"
NAMES: Final = ("base", "code-interpreter-v1")
NODE_LOCK: Final = FILES / "nodejs.lock"


@dataclass(frozen=True, slots=True)
class Wheels:
    lock: Path
    site: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Source:
    package: Path
    into: str

    def files(self) -> list[Path]:
        return sorted(p for p in self.package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    packages: tuple[str, ...]
    wheels: tuple[Wheels, ...]
    sources: tuple[Source, ...]
    compile: tuple[str, ...]
    default_user: str
    default_cwd: str
    env: Mapping[str, str]
    disks_mb: tuple[int, ...]
    cpu: int | None
    memory_mb: int | None
    start: Start | None

    def inputs(self) -> dict[str, str]:
        """Hashes by name of every file that decides what comes out."""
        files = [*_chain(self.name), NODE_LOCK, *(wheels.lock for wheels in self.wheels)]
        files += [path for source in self.sources for path in source.files()]
        return {str(path.relative_to(SKERRY)): hash_file(path) for path in files}


def load_recipe(name: str) -> Recipe:
    """Raises NotFound (`template_not_found`)."""
    if name not in NAMES:
        raise NotFound(
            f"there is no recipe for a template {name!r}; there is: {', '.join(NAMES)}",
            code="template_not_found",
            template=name,
            known=", ".join(NAMES),
        )
    fields: dict[str, Any] = {}
    packages: list[str] = []
    for path in reversed(_chain(name)):
        own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        packages += own.pop("packages", [])
        fields |= own
    return Recipe(
        name=name,
        packages=tuple(sorted(set(packages))),
        wheels=tuple(Wheels(FILES / w["lock"], w["site"], w["prefix"]) for w in fields.get("wheels", ())),
        sources=tuple(Source(SKERRY / s["package"], s["into"]) for s in fields.get("sources", ())),
        compile=tuple(fields.get("compile", ())),
        default_user=fields["default_user"],
        default_cwd=fields["default_cwd"],
        env=fields["env"],
        disks_mb=tuple(fields["disks_mb"]),
        cpu=fields.get("cpu"),
        memory_mb=fields.get("memory_mb"),
        start=Start(**fields["start"]) if "start" in fields else None,
    )


def _chain(name: str) -> list[Path]:
    """A recipe's file, and those that it extends."""
    path = FILES / f"{name}.json"
    parent = json.loads(path.read_text(encoding="utf-8")).get("extends")
    return [path, *(_chain(parent) if parent else ())]
