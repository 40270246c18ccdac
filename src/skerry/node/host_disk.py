"""What is raised where the host's disk does not take something."""

import errno

from skerry.core.errors import InternalError, NoSpace, SkerryError


def failure(error: OSError | ValueError, what: str, step: str) -> SkerryError:
    """To be raised: NoSpace `host_disk_full` where the disk is full, InternalError for anything else."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(f"the host's disk is full: {what}", code="host_disk_full", step=step)
    return InternalError(f"{what}: {error}", step=step)
