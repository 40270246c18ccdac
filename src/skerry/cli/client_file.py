"""The file in which a server leaves its address and first key for clients on its machine.

It is the only place where that key stands in clear: readable by its owner alone, replaced in one step.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import cast

from skerry.core.errors import Forbidden


def read_key(path: Path) -> str | None:
    """The key that stands there, None where there is none or the file is not one of ours."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    key = cast("dict[str, object]", found).get("api_key") if isinstance(found, dict) else None
    return key if isinstance(key, str) and key else None


def write(path: Path, url: str, api_key: str) -> None:
    """Replace it. Raises Forbidden `permission_denied` where it cannot be written."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".client-", dir=path.parent)  # made with 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"url": url, "api_key": api_key}, file)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Forbidden(f"cannot write {path}: {error.strerror}", code="permission_denied", path=str(path)) from error
