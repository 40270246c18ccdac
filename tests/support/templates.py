"""Memory images of the template, built once for all servers of a run of tests.

A server that has none boots a VM, warms it up and saves it: seven seconds of a CPU in emulation, in every data
directory anew. Here a server builds each shape once, on a data directory of its own, and the others are given hard
links. That is safe: a template's image and its disk layer are mapped or opened to be read, and removed by unlinking.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry import Sandbox
from support.server import Server

SHAPES = ({"memory_mb": 512}, {"memory_mb": 256})
"""The default shape, of which servers keep warm clones, and the one that most tests ask for."""


class Templates:
    """`directory` is the same for all workers of a run; whichever comes first builds, the others wait for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def lend(self, data_dir: Path, *shapes: dict[str, int]) -> None:
        """Put the images of these shapes into a data directory on which no server runs."""
        for shape in shapes:
            built = self._built(shape) / "node"
            for file in [*built.glob("images/tm*/*"), *built.glob("layers/*")]:
                target = data_dir / "node" / file.relative_to(built)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.link(file, target)

    def _built(self, shape: dict[str, int]) -> Path:
        name = "-".join(f"{key}-{value}" for key, value in sorted(shape.items()))
        with self._turn():
            ready = self._directory / name
            if not ready.exists():
                server = Server(self._directory / f"{name}.new", SKERRY_POOL_FLOOR="0", SKERRY_POOL_CEILING="0")
                try:
                    server.start()
                    Sandbox.create(**shape, **server.client).kill()
                    server.stop()
                finally:
                    server.destroy()
                server.data_dir.rename(ready)
            return ready

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with (self._directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
