"""The operator's root key, in a file of its own that only its owner can read.

A line for each key, `skerry-root-key:v1:ID:KEY` in hex digits. The first closes what is closed from now on; further
ones are there while a rotation is under way. The id is made of the key, so that a damaged file is seen when it is read.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from skerry.core.errors import Conflict, Forbidden, InternalError, SkerryError
from skerry.vault.envelope import KEY_BYTES, Key, new_key

_LINE: Final = re.compile(rf"skerry-root-key:v1:([0-9a-f]{{16}}):([0-9a-f]{{{2 * KEY_BYTES}}})")
_BYTES_MAX: Final = 16_384
_HEAD: Final = (
    "# The root key of Skerry's vault. Without it no secret of this installation opens again: keep a copy elsewhere,\n"
    "# never beside the database.\n"
)


class RootKeys:
    """The keys of a file, read again where one is asked for that was not there before."""

    def __init__(self, path: Path | None, keys: Sequence[Key]) -> None:
        self._path = path
        self._keys = tuple(keys)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises what `read` does."""
        return cls(path, read(path))

    @classmethod
    def fresh(cls) -> Self:
        """One that is in no file: what it closes opens no more once it is gone."""
        return cls(None, [new_key()])

    def current(self) -> Key:
        """What closes from now on. Always as the file has it: another process may have rotated it."""
        self._look()
        return self._keys[0]

    def find(self, key_id: str) -> Key | None:
        """Raises what `read` does where the key is not known yet."""
        found = self._known(key_id)
        if found is None:
            self._look()
            found = self._known(key_id)
        return found

    def _known(self, key_id: str) -> Key | None:
        return next((key for key in self._keys if key.id == key_id), None)

    def _look(self) -> None:
        if self._path is not None:
            self._keys = read(self._path)


@contextlib.contextmanager
def rotating(path: Path) -> Iterator[None]:
    """Held by the one process that rotates the key. Raises Conflict `rotation_under_way`, Forbidden."""
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unsafe(path, f"cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(f"the root key {path} is being rotated already", code="rotation_under_way") from None
    else:
        yield
    finally:
        os.close(fd)


def read(path: Path) -> tuple[Key, ...]:
    """The keys in the file, the current one first.

    Raises InternalError `root_key_missing` or `root_key_damaged`, Forbidden `root_key_unsafe` where others than its
    owner could read or replace it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise InternalError(f"there is no root key at {path}", code="root_key_missing", path=str(path)) from None
    except OSError as error:
        raise _unsafe(path, f"cannot be opened: {error.strerror}") from error
    try:
        _check(path, os.fstat(fd))
        text = os.read(fd, _BYTES_MAX + 1)
    finally:
        os.close(fd)
    return _parsed(path, text)


def _check(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise _unsafe(path, "is not a regular file")
    if found.st_uid != os.geteuid():
        raise _unsafe(path, f"belongs to the user {found.st_uid}")
    if mode & 0o077:
        raise _unsafe(path, f"can be reached by others (its mode is {mode:04o}); chmod it 0600")


def _parsed(path: Path, text: bytes) -> tuple[Key, ...]:
    keys: list[Key] = []
    for number, line in enumerate(text[:_BYTES_MAX].decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        key = Key(bytes.fromhex(found[2])) if found else None
        if found is None or key is None or key.id != found[1]:
            raise _damaged(path, f"line {number} is no root key")
        keys.append(key)
    if not keys or len(text) > _BYTES_MAX:
        raise _damaged(path, "it holds no root key" if not keys else "it is too long")
    return tuple(keys)


def there(path: Path) -> bool:
    """Whether something stands there, whatever it is."""
    return os.path.lexists(path)


def create(path: Path) -> bool:
    """A new key in a new file; its directory is made if it is missing (0700). False where another process was first.

    Raises Forbidden `permission_denied`.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = _beside(path, [new_key()])
        try:
            os.link(made, path)  # never over another one
        finally:
            made.unlink()
        _sync_directory(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise Forbidden(f"cannot make {path}: {error.strerror}", code="permission_denied") from error
    return True


def write(path: Path, keys: Sequence[Key]) -> None:
    """Put these in the file's place, all at once. Raises Forbidden `permission_denied`."""
    try:
        _beside(path, keys).replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise Forbidden(f"cannot write {path}: {error.strerror}", code="permission_denied") from error


def _beside(path: Path, keys: Sequence[Key]) -> Path:
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(_HEAD + "".join(f"skerry-root-key:v1:{key.id}:{key.secret.hex()}\n" for key in keys))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise
    return made


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unsafe(path: Path, why: str) -> SkerryError:
    return Forbidden(f"the root key {path} {why}", code="root_key_unsafe", path=str(path))


def _damaged(path: Path, why: str) -> SkerryError:
    return InternalError(f"the root key {path} is damaged: {why}", code="root_key_damaged", path=str(path))
