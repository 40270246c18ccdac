"""The bytes of files: read from, written to."""

import _socket
import ctypes
import errno
import os
import socket
import stat
from typing import Any

from skerry.guest import args, linux, paths, protocol, straight, trees
from skerry.guest.conn import Conn, HostGone
from skerry.guest.errors import GuestError, from_os, show
from skerry.guest.files import describe, make_dirs, set_xattrs, unmake_dirs
from skerry.guest.identity import Context
from skerry.guest.users import Account

_SMALL = 64 * 1024
_SIZELESS_MAX = 4 * 1024 * 1024
"""How much is read of a file that claims to be empty and is not (those of /proc)."""
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
"""What making a file says in a directory that takes none (ENOENT: those of /proc)."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Transfer:
    def __init__(self, context: Context) -> None:
        self._context = context

    # --------------------------------------------------------------------------------------------------------- read

    def read_file(self, conn: Conn, request: dict[str, Any]) -> None:
        account = self._context.account(args.opt_text(request, "user"))
        path = paths.resolve(args.text(request, "path"), account)
        offset = args.integer({"offset": 0, **request}, "offset")
        limit = args.opt_integer(request, "length")
        hand = self._context.hand(account, request)
        with linux.acting_as(hand.uid, hand.gid, hand.groups):
            fd, st = _open_regular(path)
        try:
            info = describe(path, st, self._context.users)
            length = max(0, st.st_size - offset)
            length = length if limit is None else min(limit, length)
            if length <= _SMALL or st.st_size == 0:
                data = _read_whole(fd, offset, min(limit, _SIZELESS_MAX) if limit is not None else _SIZELESS_MAX)
                if limit is None and len(data) == _SIZELESS_MAX and os.pread(fd, 1, offset + len(data)):
                    raise GuestError(
                        "Conflict", "size_unknown",
                        f"{show(path)} does not tell its size and holds more than {_SIZELESS_MAX} bytes: read ranges",
                        path=show(path),
                    )  # fmt: skip
                head = protocol.frame(protocol.OK, protocol.dump({"info": info, "length": len(data)}))
                conn.send(head + b"".join(_data_frames(data)) + protocol.frame(protocol.END, b"{}"))
                return
            conn.ok({"info": info, "length": length})
            _send_range(conn, fd, offset, length, path)
            conn.send_frame(protocol.END, b"{}")
        except OSError as e:
            raise from_os(e, path) from None
        finally:
            os.close(fd)

    # -------------------------------------------------------------------------------------------------------- write

    def write_file(self, conn: Conn, request: dict[str, Any]) -> None:
        account = self._context.account(args.opt_text(request, "user"))
        named = args.text(request, "path")
        path = paths.resolve(named, account)
        if named.endswith(("/", "/.")):
            raise GuestError("Conflict", "is_a_directory", f"{show(named)} names a directory", path=show(named))
        mode = args.opt_integer(request, "mode", 0, 0o7777)
        mtime_ns = args.opt_integer(request, "mtime_ns")
        size = args.opt_integer(request, "size")
        xattrs = None if request.get("xattrs") is None else args.table(request, "xattrs")
        hand = self._context.hand(account, request)
        conn.wait_without_limit()
        with linux.acting_as(hand.uid, hand.gid, hand.groups):
            try:
                target = Target(path, account, mode, in_place=args.flag(request, "in_place"), xattrs=xattrs)
                try:
                    total = target.fill(conn)
                    if size is not None and total != size:
                        raise GuestError(
                            "InvalidRequest", "size_mismatch", f"{total} bytes came, {size} were announced",
                            given=total, allowed=size,
                        )  # fmt: skip
                    target.commit(mtime_ns)
                finally:
                    target.close()
                info = describe(path, os.lstat(path), self._context.users)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok({"info": info})


class Target:
    """A file that is being written: a temporary beside it until `commit`. As the thread's user; raises OSError.

    A link is followed and what it points to is replaced. An existing file keeps owner and mode. Where the directory
    does not let the user put a new file in its place, though the file itself may be written, the bytes are collected
    in a nameless file first and copied into the old one at the end.

    `in_place`: the file is never replaced by another (who holds it open sees the new bytes), and it is `account`'s
    afterwards, whoever writes it. One that is new is seen as it grows, and is gone again if it does not become whole.
    """

    def __init__(
        self, path: str, account: Account, mode: int | None, *, in_place: bool = False,
        xattrs: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        real = os.path.realpath(path)
        self._owner = account if in_place else None
        self._xattrs = xattrs
        self._old = _existing(path, real)
        self._made: list[str] = []
        """Directories that are there for this file only."""
        self._name = os.path.basename(real)
        folder = os.path.dirname(real)
        if self._old is None:
            self._made = make_dirs(folder, self._owner)
        elif not os.access(real, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._mode = mode if mode is not None else stat.S_IMODE(self._old.st_mode) if self._old is not None else 0o644
        self._keep_mode = mode is None
        self._temporary: str | None = None
        """The name that goes unless it is committed: one beside the file's, or its own where that is new and filled in
        place."""
        self._folder = -1
        self._fd = -1
        try:
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._fd = self._create(account)
        except BaseException:
            self.close()
            raise

    def _create(self, account: Account) -> int:
        if self._owner is not None:
            return self._create_in_place(account)
        name = trees.temporary_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._folder)
        except OSError as e:
            if self._old is None or e.errno not in _IN_PLACE:
                raise
            return self._nameless(account)
        self._temporary = name
        if self._old is not None and (self._old.st_uid, self._old.st_gid) != (account.uid, account.gid):
            try:
                os.fchown(fd, self._old.st_uid, self._old.st_gid)
            except PermissionError:  # the file is another's: only writing into it keeps it so
                os.close(fd)
                self._drop()
                return self._nameless(account)
        return fd

    def _create_in_place(self, account: Account) -> int:
        if self._old is not None:
            return self._nameless(account)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self._name, flags, self._mode, dir_fd=self._folder)
        except FileExistsError:  # since a moment ago
            return self._nameless(account)
        self._temporary = self._name
        os.fchown(self._fd, account.uid, account.gid)
        return self._fd

    def _nameless(self, account: Account) -> int:
        problem: OSError | None = None
        for folder in (f"/proc/self/fd/{self._folder}", "/tmp", account.home):  # noqa: S108
            try:
                return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            except OSError as e:
                problem = problem or e
        raise problem or PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def fill(self, conn: Conn) -> int:
        return straight.write(self._fd, conn.body().read_into)

    def commit(self, mtime_ns: int | None) -> None:
        if self._temporary is None:
            self._write_into(mtime_ns)
            self._made.clear()
            return
        if self._owner is None:
            os.fchmod(self._fd, self._mode)
        if self._xattrs is not None:
            set_xattrs(self._fd, self._xattrs)
        if mtime_ns is not None:
            os.utime(self._fd, ns=(mtime_ns, mtime_ns))
        if self._temporary == self._name:
            self._temporary = None
            self._made.clear()
            return
        try:
            os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except PermissionError:
            # A sticky directory lets nobody but the owner replace a file that all may write.
            if self._old is None:
                raise
            self._write_into(mtime_ns)
            return
        self._temporary = None
        self._made.clear()

    def _write_into(self, mtime_ns: int | None) -> None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._name, flags, dir_fd=self._folder)
        try:
            old, owner = os.fstat(fd), self._owner
            if owner is not None and (old.st_uid, old.st_gid) != (owner.uid, owner.gid):
                os.fchown(fd, owner.uid, owner.gid)
            _replace_bytes(self._fd, fd)
            if self._xattrs is not None:
                set_xattrs(fd, self._xattrs)
            if not self._keep_mode:
                os.fchmod(fd, self._mode)
            if mtime_ns is not None:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def _drop(self) -> None:
        if self._temporary is not None:
            name, self._temporary = self._temporary, None
            try:
                os.unlink(name, dir_fd=self._folder)
            except FileNotFoundError:
                return

    def close(self) -> None:
        """Idempotent; what was not committed goes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._folder >= 0:
            try:
                self._drop()
            finally:
                os.close(self._folder)
                self._folder = -1
        unmake_dirs(self._made)
        self._made = []


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _reserve(fd: int, size: int) -> None:
    """Have room for an open file of `size` bytes, as far as its filesystem can promise any. Not `os.posix_fallocate`:
    where the filesystem cannot, that writes zeros, which those of /proc would take for a setting."""
    if _fallocate(fd, 0, 0, size) != 0 and ctypes.get_errno() in _NO_ROOM:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _replace_bytes(source: int, target: int) -> None:
    """Make an open file hold what another holds. Room is made first: without it the old bytes stay."""
    size, old = os.fstat(source).st_size, os.fstat(target).st_size
    if size > old:
        try:
            _reserve(target, size)
        except OSError:
            os.ftruncate(target, old)
            raise
    if size <= _SMALL:
        data = memoryview(os.pread(source, _SMALL, 0))  # in one piece, as settings of the kernel want it
        while data:
            data = data[os.write(target, data) :]
    else:
        trees.copy_bytes(source, target)
    if os.fstat(target).st_size > size:
        os.ftruncate(target, size)


def _existing(path: str, real: str) -> os.stat_result | None:
    """The regular file that is there, None if nothing is. What cannot be replaced by bytes is a Conflict."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(st.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(st.st_mode):
        raise _not_regular(real)
    return st


def _not_regular(path: str) -> GuestError:
    return GuestError("Conflict", "not_a_regular_file", f"{path} is not a regular file", path=path)


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open to read, never waiting and never touching a device: what it is is looked at before and after."""
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(kind):
            raise _not_regular(path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        raise from_os(e, path) from None
    st = os.fstat(fd)
    if not stat.S_ISREG(st.st_mode):
        os.close(fd)
        raise _not_regular(path)
    return fd, st


def _read_whole(fd: int, offset: int, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < limit:
        data = os.pread(fd, min(protocol.MAX_PAYLOAD, limit - size), offset + size)
        if not data:
            break
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _data_frames(data: bytes) -> list[bytes]:
    step = protocol.MAX_PAYLOAD
    return [protocol.frame(protocol.DATA, data[at : at + step]) for at in range(0, len(data), step)]


def _send_range(conn: Conn, fd: int, offset: int, length: int, path: str) -> None:
    """`length` bytes in DATA frames. A file that becomes shorter meanwhile ends the transfer with Conflict
    `file_changed`, and a read error as what it is; a frame that was announced is filled up before."""
    end = offset + length
    try:
        if length > straight.CACHED_BYTES:
            for piece in straight.pieces(fd, offset, length):
                _send_frames(conn.sock, piece)
                offset += len(piece)
        while offset < end:
            size = min(protocol.MAX_PAYLOAD, end - offset)
            if os.fstat(fd).st_size < offset + size:
                raise _changed(path)
            _send_frame_of(conn.sock, fd, offset, size, path)
            offset += size
    except (BrokenPipeError, ConnectionError) as e:
        raise HostGone(str(e)) from None


def _send_frames(sock: _socket.socket, data: memoryview) -> None:
    for at in range(0, len(data), protocol.MAX_PAYLOAD):
        part = data[at : at + protocol.MAX_PAYLOAD]
        sock.sendall(protocol.HEADER.pack(len(part), protocol.DATA), socket.MSG_MORE)
        sock.sendall(part)


def _send_frame_of(sock: _socket.socket, fd: int, offset: int, size: int, path: str) -> None:
    """One frame out of the page cache, without taking its bytes through this process."""
    sock.sendall(protocol.HEADER.pack(size, protocol.DATA), socket.MSG_MORE)
    while size > 0:
        try:
            sent = os.sendfile(sock.fileno(), fd, offset, size)
        except (BrokenPipeError, ConnectionError):
            raise
        except OSError as e:
            sock.sendall(bytes(size))
            raise from_os(e, path) from None
        if sent == 0:
            sock.sendall(bytes(size))
            raise _changed(path)
        offset += sent
        size -= sent


def _changed(path: str) -> GuestError:
    return GuestError("Conflict", "file_changed", f"{path} became shorter while it was read", path=path)
