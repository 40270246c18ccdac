"""From the path a caller wrote to an absolute, normalised one. Text only; the kernel judges the rest."""

import os.path

from skerry.guest.errors import GuestError, show
from skerry.guest.users import Account

PATH_BYTES_MAX = 4095
NAME_BYTES_MAX = 255


def resolve(path: str, account: Account, what: str = "path") -> str:
    """Absolute as it is, `~` and `~/…` and relative ones from the user's home; `.`, `..` and `//` are worked out.

    Raises InvalidRequest: invalid_path (empty, NUL), path_too_long.
    """
    if not path:
        raise GuestError("InvalidRequest", "invalid_path", f"{what} is empty", field=what)
    if "\0" in path:
        raise GuestError("InvalidRequest", "invalid_path", f"{what} holds a NUL character", field=what)
    if path == "~":
        full = account.home
    elif path.startswith("~/"):
        full = f"{account.home}/{path[2:]}"
    elif path.startswith("/"):
        full = path
    else:
        full = f"{account.home}/{path}"
    full = os.path.normpath(full)
    if full.startswith("//"):
        full = full[1:]
    raw = full.encode("utf-8", "surrogateescape")
    if len(raw) > PATH_BYTES_MAX:
        raise GuestError(
            "InvalidRequest",
            "path_too_long",
            f"{what} is {len(raw)} bytes long; at most {PATH_BYTES_MAX} are allowed",
            field=what,
            given=len(raw),
            allowed=PATH_BYTES_MAX,
        )
    longest = max(len(part) for part in raw.split(b"/"))
    if longest > NAME_BYTES_MAX:
        raise GuestError(
            "InvalidRequest",
            "path_too_long",
            f"{what} {show(full)} has a name of {longest} bytes; at most {NAME_BYTES_MAX} are allowed",
            field=what,
            given=longest,
            allowed=NAME_BYTES_MAX,
        )
    return full
