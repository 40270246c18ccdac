"""Makes the chain of a disk's layers shorter."""

import subprocess
from dataclasses import replace
from typing import Final

from skerry.core.errors import InternalError
from skerry.node.aio import in_thread
from skerry.node.journal import Entry
from skerry.node.resources import Resources

COMMIT_DEADLINE_S: Final = 600.0


async def compact(resources: Resources, paused: Entry) -> Entry:
    """Write a paused sandbox's upper layers, those that nobody else needs, into the lowest of them.

    What the disk holds is the same before, after and at any moment in between: as long as the upper layers are there
    they cover what is being written. Returns the entry with the shorter chain, written down. Raises InternalError.
    """
    own = resources.keep.exclusive_layers(paused)
    if len(own) < 2:
        return paused
    await in_thread(_commit, resources, own)
    shorter = replace(paused, layers=paused.layers[: len(paused.layers) - len(own) + 1])
    await in_thread(resources.journal.write, shorter)
    return shorter


def _commit(resources: Resources, own: tuple[str, ...]) -> None:
    toolchain, layers = resources.images.toolchain, resources.keep.layers
    command = [str(toolchain.qemu_img), "commit", "-q", "-d", "-b", str(layers.path(own[0])), str(layers.path(own[-1]))]
    try:
        subprocess.run(command, check=True, capture_output=True, env=dict(toolchain.env), timeout=COMMIT_DEADLINE_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        raise InternalError(f"the disk's layers could not be joined: {error} {detail.decode()}", step="disk") from error
