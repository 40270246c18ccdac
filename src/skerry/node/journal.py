"""What the node is about to hold and what it holds, written down before it acts: one JSON file per sandbox.

A file is there from before the first step of a creation until after the last step of a removal. What a VM holds is
named after its id, except its network slot and its disk layers, which is why those names are in here. Files are 0600:
they hold the token that opens the guest, and its environment.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from skerry.core.errors import Conflict, InternalError
from skerry.core.models import EgressLayer
from skerry.node import host_disk
from skerry.node.vmm.driver import VmHandle

VERSION: Final = 2


Phase = Literal["creating", "running", "saving", "pausing", "paused", "resuming", "pool"]
"""`saving`: it runs, and stands still for a moment while it is copied."""


@dataclass(frozen=True, slots=True)
class Entry:
    sandbox_id: str
    phase: Phase
    template: str
    cpu: int
    memory_mb: int
    disk_mb: int
    base: str
    """Path of the template's disk, under the lowest layer."""
    layers: tuple[str, ...]
    """Its disk's layers, from the lowest to the one it writes."""
    artefacts: Mapping[str, str]
    """Paths of what it was booted with: "kernel", "initramfs", "agent"."""
    env: Mapping[str, str]
    """Environment of its commands: what a boot after a pause without memory needs again."""
    machine_id: str
    default_user: str
    default_cwd: str | None
    vm_id: str
    """What its VM and all that belongs to it is named after: the sandbox's id, or that of the warm clone it was."""
    netns: str | None = None
    """None while it is paused."""
    image: str | None = None
    """The memory image that its RAM goes back to; while it is paused, the one that holds its RAM."""
    start_kind: str = "boot"
    bounded: bool = True
    """False: this host has no usable cgroups, and the VM runs without that bound."""
    token: str | None = None
    """None where no guest knows one: never booted, or paused without memory."""
    generation: int = 0
    handle: VmHandle | None = None
    egress: tuple[EgressLayer, ...] = ()
    """What may leave it."""
    names: tuple[str, ...] = ()
    """What it had looked up when it was last saved: its programs may remember their addresses."""

    def paused(self, image: str | None, *, memory: bool) -> "Entry":
        token = self.token if memory else None
        return replace(self, phase="paused", handle=None, netns=None, image=image, token=token)


def encode(entry: Entry) -> bytes:
    return json.dumps({"version": VERSION, **asdict(entry)}, indent=1).encode()


def decode(data: bytes) -> Entry:
    """Raises ValueError for what is not an entry of this version."""
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields.pop("version") != VERSION:
            raise ValueError("of another version")
        fields["layers"] = tuple(fields["layers"])
        fields["egress"] = layers_of(fields.get("egress", ()))
        fields["names"] = tuple(fields.get("names", ()))
        if fields["handle"] is not None:
            fields["handle"] = VmHandle(**fields["handle"])
        return Entry(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a journal entry: {error}") from error


def layers_of(told: Iterable[Mapping[str, Any]]) -> tuple[EgressLayer, ...]:
    """From JSON. Raises TypeError, KeyError."""
    return tuple(
        EgressLayer(layer["origin"], layer["mode"], tuple(layer["allow"]), tuple(layer["deny"])) for layer in told
    )


class Journal:
    """Files on disk; every method blocks for as long as an fsync takes.

    Raises InternalError (`step` journal), and NoSpace `host_disk_full` from a write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"

    def write(self, entry: Entry) -> None:
        """Atomic and durable: after a crash the old or the new entry is there, whole."""
        path = self._path(entry.sandbox_id)
        temporary = path.with_suffix(".new")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(encode(entry))
                file.flush()
                os.fsync(fd)
            temporary.replace(path)
            self._sync_directory()
        except OSError as error:
            raise host_disk.failure(error, "the journal cannot be written", "journal") from error

    def remove(self, sandbox_id: str) -> None:
        """Idempotent."""
        try:
            for path in (self._path(sandbox_id), self._path(sandbox_id).with_suffix(".new")):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InternalError(f"the journal cannot be changed: {error}", step="journal") from error

    def read(self, sandbox_id: str) -> Entry | None:
        """None if there is none, or it cannot be read (it is then only good for its name)."""
        try:
            return decode(self._path(sandbox_id).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise InternalError(f"the journal cannot be read: {error}", step="journal") from error

    def names(self) -> list[str]:
        """Ids of all sandboxes with a file, whole or not."""
        try:
            return sorted({p.stem for p in self._directory.iterdir() if p.suffix in {".json", ".new"}})
        except OSError as error:
            raise InternalError(f"the journal cannot be read: {error}", step="journal") from error

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DataLock:
    """One server per data directory, for as long as its process lives."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InternalError(f"{path}: {error.strerror}", step="lock") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 20, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise Conflict(
                f"another server (pid {owner or 'unknown'}) already uses the data directory {path.parent.parent}",
                code="data_dir_in_use",
            ) from None
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
