"""Files that hold secrets: in memory only, their user's alone, gone when the process ends that they were lent to."""

import os
from typing import Any

from skerry.guest import args
from skerry.guest.errors import GuestError, from_os
from skerry.guest.users import Account


class SecretFiles:
    """`root` is a directory on a tmpfs, root's own; None: this machine has none, and such files are refused."""

    def __init__(self, root: str | None) -> None:
        self._root = root

    def write(self, process_id: str, account: Account, request: dict[str, Any]) -> dict[str, str]:
        """The files that a start asks for, each under the name of the variable that tells where it is; those variables.

        The values are taken out of the request, which lives as long as the process does."""
        files = args.table(request, "secret_files")
        request["secret_files"] = {}
        if not files:
            return {}
        if self._root is None:
            raise GuestError("Unavailable", "no_secret_files", "this machine has no place in memory for secret files")
        if not process_id.isalnum() or any("/" in name for name in files):
            raise GuestError("InvalidRequest", "invalid_request", "secret_files: not names of files")
        directory = f"{self._root}/{process_id}"
        try:
            os.mkdir(directory, 0o711)
            for name, content in files.items():
                _write(f"{directory}/{name}", content, account)
        except OSError as e:
            self.remove(process_id)
            raise from_os(e, "secret files") from None
        return {name: f"{directory}/{name}" for name in files}

    def remove(self, process_id: str) -> None:
        """Whether or not there are any."""
        directory = f"{self._root}/{process_id}"
        try:
            for name in os.listdir(directory):
                os.unlink(f"{directory}/{name}")
            os.rmdir(directory)
        except OSError:  # the guest's root was there before
            return


def _write(path: str, content: str, account: Account) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
    try:
        data = memoryview(content.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(fd, data) :]
        os.fchown(fd, account.uid, account.gid)
    finally:
        os.close(fd)
