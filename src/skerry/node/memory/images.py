"""Memory images on disk: each a directory that appears whole, by one rename. Everything here blocks.

images/<id>/manifest.json, ram, devices
images/<id>.new/          being made: of no worth after a crash
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError, NotFound
from skerry.node import host_disk
from skerry.node.memory import manifest as manifests
from skerry.node.memory.digest import digest
from skerry.node.memory.manifest import FileSum, Manifest
from skerry.node.vmm.driver import MemoryImage

MANIFEST: Final = "manifest.json"
STAGING: Final = ".new"


class Images:
    """Raises NotFound `image_not_found`, InternalError `image_damaged` or (`step` image)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stage(self, image_id: str) -> MemoryImage:
        """A fresh directory to save into."""
        staging = self._directory / (image_id + STAGING)
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(mode=0o700)
        except OSError as error:
            raise host_disk.failure(error, f"{staging} cannot be made", "image") from error
        return MemoryImage.below(staging)

    def sums(self, image_id: str) -> dict[str, FileSum]:
        """Of a staged image's files."""
        staged = MemoryImage.below(self._directory / (image_id + STAGING))
        return {f.name: FileSum(f.stat().st_size, digest(f)) for f in (staged.ram, staged.devices)}

    def commit(self, manifest: Manifest) -> None:
        """Make a staged image real. Durable: after a crash it is there whole, or not at all."""
        staging = self._directory / (manifest.image_id + STAGING)
        try:
            staging.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(staging / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(manifests.encode(manifest))
                file.flush()
                os.fsync(fd)
            _sync(staging)
            staging.rename(self._directory / manifest.image_id)
            _sync(self._directory)
        except OSError as error:
            raise host_disk.failure(error, "the image cannot be kept", "image") from error

    def discard(self, image_id: str) -> None:
        """Forget a staged image. Idempotent."""
        shutil.rmtree(self._directory / (image_id + STAGING), ignore_errors=True)

    def memory(self, image_id: str) -> MemoryImage:
        return MemoryImage.below(self._directory / image_id)

    def read(self, image_id: str) -> Manifest:
        try:
            return manifests.decode((self._directory / image_id / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"image {image_id} is not on this node", code="image_not_found", image_id=image_id) from None
        except ValueError as error:
            raise damaged(image_id, f"its manifest is {error}") from error
        except OSError as error:
            raise InternalError(f"image {image_id} cannot be read: {error}", step="image") from error

    def verify(self, manifest: Manifest) -> None:
        """Compare every byte with what was saved."""
        for name, wanted in manifest.files.items():
            file = self._directory / manifest.image_id / name
            try:
                found = FileSum(file.stat().st_size, "")
                if found.size == wanted.size:
                    found = FileSum(found.size, digest(file))
            except OSError as error:
                raise damaged(manifest.image_id, f"its file {name} cannot be read: {error.strerror}") from error
            if found.size != wanted.size:
                raise damaged(manifest.image_id, f"its file {name} has {found.size} bytes instead of {wanted.size}")
            if found.digest != wanted.digest:
                raise damaged(manifest.image_id, f"the content of its file {name} is not what was saved")

    def names(self) -> list[str]:
        return sorted(p.name for p in self._directory.iterdir() if p.suffix != STAGING)

    def sweep(self) -> list[str]:
        """Remove what a crash left half-made. Returns the names."""
        staged = [p for p in self._directory.iterdir() if p.suffix == STAGING]
        for path in staged:
            shutil.rmtree(path, ignore_errors=True)
        return [p.name for p in staged]

    def remove(self, image_id: str) -> None:
        """Idempotent. The manifest goes last but one, so that what is half-removed is still known by name."""
        try:
            shutil.rmtree(self._directory / image_id)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InternalError(f"image {image_id} cannot be removed: {error}", step="image") from error


class Layers:
    """Disk layers, each a qcow2 file named by its id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self._directory / f"{name}.qcow2"

    def names(self) -> list[str]:
        return sorted(p.stem for p in self._directory.glob("*.qcow2"))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(name).unlink()

    def collect(self, used: Callable[[str], bool]) -> list[str]:
        """Remove every layer that nothing uses. Returns their names."""
        unused = [name for name in self.names() if not used(name)]
        for name in unused:
            self.remove(name)
        return unused


def damaged(image_id: str, how: str) -> InternalError:
    return InternalError(f"image {image_id} is damaged: {how}", code="image_damaged", image_id=image_id)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
