"""All images and disk layers of a node, and who needs them. What nobody needs is removed, and nothing else ever is.

A sandbox needs the image that its RAM goes back to and the layers of its disk; an image needs its own layers; templates
and snapshots are kept for their own sake. Everything here blocks and may be called from any thread.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skerry.core.errors import SkerryError
from skerry.node.contract import ImageInfo
from skerry.node.journal import Entry
from skerry.node.memory.images import Images, Layers, damaged
from skerry.node.memory.manifest import KEPT, Manifest

FORGOTTEN: Final = "forgotten"
"""A file beside the manifest of a snapshot that was deleted while sandboxes needed it."""


@dataclass(frozen=True, slots=True)
class _Use:
    images: frozenset[str]
    layers: frozenset[str]


class Keep:
    def __init__(self, state_dir: Path) -> None:
        self.images: Final = Images(state_dir / "images")
        self.layers: Final = Layers(state_dir / "layers")
        self._lock = threading.RLock()
        self._uses: dict[str, _Use] = {}
        self._manifests: dict[str, Manifest] = {}
        self._damage: dict[str, str] = {}
        self._pins: Counter[str] = Counter()

    def open(self, entries: Iterable[Entry]) -> list[str]:
        """Learn what is there and what these sandboxes need; remove the rest. Returns the names of what was removed."""
        with self._lock:
            removed = self.images.sweep()
            for entry in entries:
                self.hold(entry)
            for image_id in self.images.names():
                try:
                    self._manifests[image_id] = self.images.read(image_id)
                except SkerryError as error:
                    self._damage[image_id] = error.message
            return removed + self.collect()

    # ----------------------------------------------------------------------------------------------------------- users

    def hold(self, entry: Entry, *, images: Iterable[str] = (), layers: Iterable[str] = ()) -> None:
        """From now on the sandbox needs what its entry names and these, and nothing else. Before any of it is made."""
        own = [entry.image] if entry.image else []
        with self._lock:
            self._uses[entry.sandbox_id] = _Use(frozenset([*own, *images]), frozenset([*entry.layers, *layers]))

    def drop(self, sandbox_id: str) -> list[str]:
        """The sandbox is over."""
        with self._lock:
            self._uses.pop(sandbox_id, None)
            return self.collect()

    def pin(self, image_id: str) -> None:
        """Keep an image, which need not be there yet, until `unpin` was called as often."""
        with self._lock:
            self._pins[image_id] += 1

    def unpin(self, image_id: str) -> None:
        with self._lock:
            self._pins[image_id] -= 1
            if self._pins[image_id] <= 0:
                del self._pins[image_id]
            self.collect()

    def exclusive_layers(self, paused: Entry) -> tuple[str, ...]:
        """The uppermost layers of a paused sandbox's disk that only it and its own image need, the lowest first."""
        with self._lock:
            others = {layer for name, u in self._uses.items() if name != paused.sandbox_id for layer in u.layers}
            images = [m for i, m in self._manifests.items() if i != paused.image]
            others |= {layer for manifest in images for layer in manifest.layers}
        shared = max((n for n, layer in enumerate(paused.layers) if layer in others), default=-1)
        return paused.layers[shared + 1 :]

    def check_layers(self, manifest: Manifest) -> None:
        """Raises InternalError `image_damaged` where a layer is not there."""
        for layer in manifest.layers:
            if not self.layers.path(layer).exists():
                raise damaged(manifest.image_id, f"its disk layer {layer} is missing")

    def used_by(self, image_id: str) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(name for name, use in self._uses.items() if image_id in use.images))

    # ---------------------------------------------------------------------------------------------------------- images

    def add(self, manifest: Manifest) -> None:
        """Make a staged image real."""
        with self._lock:
            self.images.commit(manifest)
            self._manifests[manifest.image_id] = manifest

    def find(self, image_id: str) -> Manifest:
        """Raises NotFound `image_not_found`, InternalError `image_damaged`."""
        with self._lock:
            known = self._manifests.get(image_id)
        return known or self.images.read(image_id)

    def known(self, image_id: str) -> bool:
        with self._lock:
            return image_id in self._manifests

    def snapshots(self) -> list[str]:
        with self._lock:
            return sorted(i for i, m in self._manifests.items() if m.kind == "snapshot" and not self._forgotten(i))

    def templates(self) -> list[Manifest]:
        with self._lock:
            return [m for i, m in self._manifests.items() if m.kind == "template" and not self._forgotten(i)]

    def forget(self, image_id: str) -> bool:
        """Keep it only as long as a sandbox needs it. False if there is none."""
        with self._lock:
            if not self.known(image_id) or self._forgotten(image_id):
                return False
            (self.images.memory(image_id).ram.parent / FORGOTTEN).touch(mode=0o600)
            self.collect()
            return True

    def _forgotten(self, image_id: str) -> bool:
        return (self.images.memory(image_id).ram.parent / FORGOTTEN).exists()

    # ---------------------------------------------------------------------------------------------------- what is kept

    def collect(self) -> list[str]:
        """Remove what nobody needs. Returns the names of it."""
        with self._lock:
            needed = {image for use in self._uses.values() for image in use.images}
            needed |= self._pins.keys()
            needed |= {i for i in self._damage if i not in self._manifests}  # unreadable: not known what it is
            needed |= {i for i, m in self._manifests.items() if m.kind in KEPT and not self._forgotten(i)}
            removed = []
            for image_id in self.images.names():
                if image_id not in needed:
                    self.images.remove(image_id)
                    self._manifests.pop(image_id, None)
                    self._damage.pop(image_id, None)
                    removed.append(image_id)
            layers = {layer for use in self._uses.values() for layer in use.layers}
            layers |= {layer for m in self._manifests.values() for layer in m.layers}
            if self._damage:  # what a manifest that cannot be read names is not known
                return removed
            return removed + self.layers.collect(lambda name: name in layers)

    def verify(self) -> None:
        """Compare every byte of every image with what was saved; `infos` then tells."""
        with self._lock:
            manifests = list(self._manifests.values())
        for manifest in manifests:
            try:
                self.images.verify(manifest)
            except SkerryError as error:
                self._damage[manifest.image_id] = error.message

    def infos(self) -> list[ImageInfo]:
        with self._lock:
            found = [
                ImageInfo(
                    image_id=m.image_id,
                    kind=m.kind,
                    template=m.template,
                    memory=m.memory,
                    size_bytes=self.size(m),
                    created_at=m.created_at,
                    used_by=self.used_by(m.image_id),
                    damage=self._damage.get(m.image_id),
                )
                for m in self._manifests.values()
            ]
            found += [
                ImageInfo(
                    i, "unknown", "", memory=False, size_bytes=0, created_at="", used_by=self.used_by(i), damage=d
                )
                for i, d in self._damage.items()
                if i not in self._manifests
            ]
            return sorted(found, key=lambda info: (info.created_at, info.image_id))

    def size(self, manifest: Manifest) -> int:
        """Bytes on the disk, its layers included."""
        memory = self.images.memory(manifest.image_id)
        files = [memory.ram, memory.devices, *map(self.layers.path, manifest.layers)]
        return sum(file.stat().st_blocks * 512 for file in files if file.exists())
