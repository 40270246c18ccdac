"""Files and trees between this machine and a sandbox.

A guest is not trusted: what it lists is written below the directory the caller named or not at all, and links are made
last, so that nothing is written through one of them.
"""

import contextlib
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from skerry.core.errors import (
    Forbidden,
    Gone,
    InternalError,
    InvalidRequest,
    NotFound,
    SkerryError,
    Unauthenticated,
    Unavailable,
)
from skerry.sdk.content import error_text
from skerry.sdk.errors import TransferIncomplete
from skerry.sdk.io import IO
from skerry.sdk.models import Entry

if TYPE_CHECKING:
    from skerry.sdk.files import AsyncFiles, HostPath

LEVELS = 64
"""How deep one listing goes."""


class Transfer:
    """Several copies, each of which may fail by itself. What concerns all of them ends the whole at once."""

    def __init__(self) -> None:
        self.count = 0
        self.errors: list[tuple[str, SkerryError]] = []

    @contextlib.asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[None]:
        """Around one of them: counts it, or keeps its error."""
        try:
            yield
            self.count += 1
        except (Gone, Unauthenticated, Unavailable):
            raise
        except SkerryError as error:
            if error.code == "sandbox_not_found":
                raise
            self.errors.append((name, error))
        except OSError as error:
            self.errors.append((name, local_error(name, error)))

    def finish(self, what: str) -> None:
        """Raises TransferIncomplete if anything failed."""
        if self.errors:
            some = "; ".join(f"{name}: {error.message}" for name, error in self.errors[:5])
            more = f" (and {len(self.errors) - 5} more)" if len(self.errors) > 5 else ""
            raise TransferIncomplete(f"{len(self.errors)} {what}: {some}{more}", errors=self.errors)


def local_error(path: str, error: OSError) -> SkerryError:
    """An error of this machine's files, typed."""
    kinds: dict[type[OSError], type[SkerryError]] = {FileNotFoundError: NotFound, PermissionError: Forbidden}
    cls = kinds.get(type(error), InternalError)
    return cls(f"{path}: {error_text(error)}", code="local_file", path=path)


# ------------------------------------------------------------------------------------------------------------- upload


async def upload(files: "AsyncFiles", io: IO, local: "HostPath", path: str, user: str | None) -> int:
    source = Path(local)
    done = Transfer()
    try:
        top = await io.local(source.lstat)
    except OSError as error:
        raise local_error(str(source), error) from error
    if not stat.S_ISDIR(top.st_mode):
        # A link that is named itself is followed, as cp(1) does; links inside of a tree are kept.
        try:
            await _put_file(files, io, source, path, user)
        except OSError as error:
            raise local_error(str(source), error) from error
        return 1
    for found, relative in _tree(source, done):
        target = path if not relative else f"{path.rstrip('/')}/{relative}"
        async with done.one(str(found)):
            await _put(files, io, found, target, user)
    done.finish("entries were not uploaded")
    return done.count


def _tree(top: Path, done: Transfer) -> Iterator[tuple[Path, str]]:
    """A directory and all below it, parents first, with their paths relative to it. Links are not followed."""

    def unreadable(error: OSError) -> None:
        done.errors.append((str(error.filename), local_error(str(error.filename), error)))

    for directory, below, names in os.walk(top, onerror=unreadable):
        here = Path(directory)
        yield here, os.path.relpath(here, top) if here != top else ""
        links = [name for name in below if (here / name).is_symlink()]
        for name in sorted([*names, *links]):
            yield here / name, os.path.relpath(here / name, top)


async def _put(files: "AsyncFiles", io: IO, found: Path, target: str, user: str | None) -> None:
    kind = (await io.local(found.lstat)).st_mode
    if stat.S_ISDIR(kind):
        await files.mkdir(target, mode=stat.S_IMODE(kind), user=user)
    elif stat.S_ISLNK(kind):
        says = str(await io.local(found.readlink))
        with contextlib.suppress(NotFound):
            if (await files.stat(target, user=user)).kind != "directory":
                await files.remove(target, user=user)
        await files.symlink(says, target, user=user)
    elif stat.S_ISREG(kind):
        await _put_file(files, io, found, target, user)
    else:
        raise InvalidRequest.of("local", "is neither a file, a directory nor a link", given=str(found))


async def _put_file(files: "AsyncFiles", io: IO, source: Path, target: str, user: str | None) -> None:
    # Not blocking: opening a FIFO by name must fail below, not wait for a writer.
    descriptor = await io.local(lambda: os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest.of("local", "is not a file", given=str(source))
        mode, mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns
        small = status.st_size <= 256 * 1024
        data: Any = await io.local(file.read) if small else file
        await files.write(target, data, mode=mode, mtime_ns=max(0, mtime), user=user)


# ----------------------------------------------------------------------------------------------------------- download


async def download(files: "AsyncFiles", io: IO, path: str, local: "HostPath", user: str | None) -> int:
    target = Path(local)
    top = await files.stat(path, user=user)
    if not top.is_dir:
        try:
            await _get_file(files, io, path, target, user, None if top.kind == "symlink" else top)
        except OSError as error:
            raise local_error(str(target), error) from error
        return 1
    done = Transfer()
    directories: list[tuple[Path, Entry]] = []
    links: list[tuple[Path, Entry]] = []
    async with done.one(path):
        await io.local(lambda: target.mkdir(parents=True, exist_ok=True))
        directories.append((target, top))
    if not done.errors:
        async for entry in _entries(files, top.path, user):
            async with done.one(entry.path):
                here = _below(target, top.path, entry.path)
                await _get(files, io, entry, here, user, directories, links)
    done.count -= len(links)  # were only noted
    for here, entry in links:
        async with done.one(entry.path):
            _make_link(here, entry)
    for here, entry in reversed(directories):  # last, and the deepest first: a directory may forbid writing into it
        with contextlib.suppress(OSError):
            here.chmod(entry.mode & 0o777)
            os.utime(here, ns=(entry.mtime_ns, entry.mtime_ns))
    done.finish("entries were not downloaded")
    return done.count


async def _entries(files: "AsyncFiles", top: str, user: str | None) -> AsyncIterator[Entry]:
    """All below a directory, parents first, however deep."""
    waiting = [top]
    while waiting:
        root = waiting.pop()
        base = len(PurePosixPath(root).parts)
        async with files.walk(root, depth=LEVELS, user=user) as entries:
            async for entry in entries:
                yield entry
                if entry.is_dir and len(PurePosixPath(entry.path).parts) - base == LEVELS:
                    waiting.append(entry.path)


def _below(target: Path, top: str, path: str) -> Path:
    """Where an entry goes. Raises InternalError `bad_answer` for one that is not below the directory asked for."""
    prefix = top.rstrip("/") + "/"
    parts = path[len(prefix) :].split("/") if path.startswith(prefix) else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InternalError("the sandbox listed an entry outside of the directory", code="bad_answer", path=path)
    here = target
    for part in parts[:-1]:
        here = here / part
        if here.is_symlink():
            raise Forbidden(f"{here} is a link on this machine; nothing is written through it", code="local_file")
    return here / parts[-1]


async def _get(
    files: "AsyncFiles",
    io: IO,
    entry: Entry,
    here: Path,
    user: str | None,
    directories: list[tuple[Path, Entry]],
    links: list[tuple[Path, Entry]],
) -> None:
    if entry.error:
        raise Forbidden(f"the sandbox could not read it: {entry.error}", code="not_readable", path=entry.path)
    if entry.is_dir:
        await io.local(lambda: here.mkdir(exist_ok=True))
        directories.append((here, entry))
    elif entry.kind == "symlink":
        links.append((here, entry))
    elif entry.is_file:
        await _get_file(files, io, entry.path, here, user, entry)
    else:
        raise InvalidRequest.of("path", "is neither a file, a directory nor a link", given=entry.kind)


async def _get_file(files: "AsyncFiles", io: IO, path: str, here: Path, user: str | None, entry: Entry | None) -> None:
    """One file, written beside its place and then put there: a broken line leaves what was there before."""
    part = here.with_name(f".{here.name[:200]}.{os.urandom(6).hex()}.part")
    descriptor = await io.local(lambda: os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with os.fdopen(descriptor, "wb") as file:
            async with files.stream(path, user=user) as chunks:
                async for chunk in chunks:
                    await io.local(lambda chunk=chunk: file.write(chunk))
            if entry is not None:
                os.fchmod(file.fileno(), entry.mode & 0o777)  # never set-user-id on this machine
                file.flush()
                os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
            else:
                os.fchmod(file.fileno(), 0o644)
        await io.local(lambda: part.replace(here))
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _make_link(here: Path, entry: Entry) -> None:
    if here.is_symlink() or here.is_file():
        here.unlink()
    here.symlink_to(entry.target or "")
