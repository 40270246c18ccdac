"""What a kept machine is made of, and whether this node can restore it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from skerry.core.errors import Conflict
from skerry.node.journal import Entry

VERSION: Final = 1
Kind = Literal["template", "pause", "snapshot", "fork"]
KEPT: Final = frozenset({"template", "snapshot"})
"""Kinds that are kept although no sandbox uses them."""


@dataclass(frozen=True, slots=True)
class FileSum:
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image. Its files lie beside the manifest, its disk layers in the node's layer directory."""

    image_id: str
    kind: Kind
    template: str
    """The template that the disk goes back to."""
    base: str
    """Path of the template's disk, under the lowest layer."""
    layers: tuple[str, ...]
    """Disk layers from the lowest to the highest, by name."""
    disk_mb: int
    created_at: str
    """ISO 8601, UTC."""
    machine: Mapping[str, str]
    """What has to be the same where it is restored; empty for a disk alone."""
    files: Mapping[str, FileSum]
    """"ram" and "devices"; empty for a disk alone."""
    artefacts: Mapping[str, str]
    """Paths of what its VM was booted with: "kernel", "initramfs", "agent"."""
    cpu: int
    memory_mb: int
    env: Mapping[str, str]
    """Environment of the sandbox it was made of, for those that are made of it."""
    default_user: str
    default_cwd: str | None
    token: str | None = None
    """What the guest's agent wants to hear first; None for a disk alone."""
    generation: int = 0
    names: tuple[str, ...] = ()
    """What its sandbox had looked up: the programs in its memory remember the addresses."""

    @classmethod
    def of(cls, entry: Entry, image_id: str, kind: Kind, *, machine: Mapping[str, str]) -> "Manifest":
        """Of a sandbox as it is now; `machine` empty: of its disk alone. The files' sums are still to be filled in."""
        return cls(
            image_id=image_id,
            kind=kind,
            template=entry.template,
            base=entry.base,
            layers=entry.layers,
            disk_mb=entry.disk_mb,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            machine=machine,
            files={},
            artefacts=entry.artefacts,
            cpu=entry.cpu,
            memory_mb=entry.memory_mb,
            env=entry.env,
            default_user=entry.default_user,
            default_cwd=entry.default_cwd,
            token=entry.token if machine else None,
            generation=entry.generation if machine else 0,
            names=entry.names if machine else (),
        )

    @property
    def memory(self) -> bool:
        return bool(self.files)


def encode(manifest: Manifest) -> bytes:
    return json.dumps({"version": VERSION, **asdict(manifest)}, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Raises ValueError for what is no manifest of this version."""
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields.pop("version") != VERSION:
            raise ValueError("of another version")
        fields["layers"] = tuple(fields["layers"])
        fields["names"] = tuple(fields.get("names", ()))
        fields["files"] = {name: FileSum(**value) for name, value in fields["files"].items()}
        return Manifest(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a manifest: {error}") from error


def missing_artefacts(manifest: Manifest) -> list[str]:
    """Parts that an image needs besides its own files and that are not there any more, by name."""
    needed = {"base": manifest.base, **(manifest.artefacts if manifest.memory else {})}
    return sorted(part for part, path in needed.items() if not Path(path).exists())


def check_machine(manifest: Manifest, present: Mapping[str, str]) -> None:
    """Raises Conflict `image_mismatch`, naming each part that differs."""
    differ = [f"{part} (it is gone)" for part in missing_artefacts(manifest)]
    differ += [
        f"{part} (saved with {manifest.machine.get(part, 'none')}, here {present.get(part, 'none')})"
        for part in sorted(manifest.machine.keys() | present.keys())
        if manifest.memory and manifest.machine.get(part) != present.get(part)
    ]
    if differ:
        raise Conflict(
            f"the memory image {manifest.image_id} does not fit this machine: {', '.join(differ)}",
            code="image_mismatch",
            image_id=manifest.image_id,
        )
