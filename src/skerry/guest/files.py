"""The operations on names: stat, list, make, move, remove, link, chmod. The kernel judges each as the asking user."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from skerry.guest import args, linux, paths, protocol, trees
from skerry.guest.conn import Conn, ItemSender
from skerry.guest.errors import GuestError, from_os
from skerry.guest.identity import Context
from skerry.guest.users import Account, Users

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char_device",
    stat.S_IFBLK: "block_device",
}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_XATTR = "user."
_XATTRS_MAX = 64 * 1024
"""How many bytes of one file's attributes are told."""


def describe(
    path: str, st: os.stat_result, users: Users, error: str | None = None, *, detail: bool = False
) -> dict[str, Any]:
    """A FileInfo as it travels. `detail`: with where a link leads in the end, and the extended attributes."""
    kind = _kind(st)
    target = None
    if kind == "symlink":
        try:
            target = os.readlink(path)
        except OSError:
            target = ""
    return {
        "path": path,
        "name": os.path.basename(path) or "/",
        "kind": kind,
        "size": st.st_size,
        "mode": stat.S_IMODE(st.st_mode),
        "uid": st.st_uid,
        "gid": st.st_gid,
        "owner": users.user_name(st.st_uid),
        "group": users.group_name(st.st_gid),
        "mtime_ns": st.st_mtime_ns,
        "target": target,
        "error": error,
        **(_detail(path, kind) if detail else {}),
    }


def _kind(st: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(st.st_mode), "file")


def _detail(path: str, kind: str) -> dict[str, Any]:
    """`resolved` and `resolved_kind` of a link (the latter None where it leads nowhere), `xattrs` of anything."""
    told: dict[str, Any] = {"xattrs": _xattrs(path)}
    if kind == "symlink":
        told["resolved"] = os.path.realpath(path)
        try:
            told["resolved_kind"] = _kind(os.stat(path))
        except OSError:
            told["resolved_kind"] = None
    return told


def _xattrs(path: str) -> dict[str, str]:
    """Those of the user's namespace; none where the filesystem has no such thing or they may not be read."""
    found: dict[str, str] = {}
    left = _XATTRS_MAX
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith(_XATTR):
                value = os.getxattr(path, name, follow_symlinks=False)
                left -= len(name) + len(value)
                if left < 0:
                    break
                found[name] = value.decode("utf-8", "surrogateescape")
    except OSError:
        return found
    return found


def set_xattrs(fd: int, wanted: dict[str, str]) -> None:
    """Make these an open file's attributes of the user's namespace: others of it go."""
    try:
        for name in os.listxattr(fd):
            if name.startswith(_XATTR) and name not in wanted:
                os.removexattr(fd, name)
    except OSError as e:
        if e.errno != errno.ENOTSUP or wanted:
            raise
    for name, value in wanted.items():
        os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))


def make_dirs(path: str, owner: Account | None = None) -> list[str]:
    """Make a directory and its parents, as the thread's user; new ones are given to `owner`. Gives those that are new,
    parents first; after an error none of them is left."""
    wanted = [path]
    made: list[str] = []
    try:
        while wanted:
            try:
                os.mkdir(wanted[-1])
            except FileNotFoundError:
                parent = os.path.dirname(wanted[-1])
                if made or parent == wanted[-1]:  # the parent was there a moment ago
                    raise
                wanted.append(parent)
                continue
            except FileExistsError:
                if not os.path.isdir(wanted[-1]):
                    raise
            else:
                made.append(wanted[-1])
                if owner is not None:
                    os.chown(wanted[-1], owner.uid, owner.gid)
            wanted.pop()
    except BaseException:
        unmake_dirs(made)
        raise
    return made


def unmake_dirs(made: list[str]) -> None:
    """Take back what `make_dirs` gave, except where somebody else has put something into it."""
    for path in reversed(made):
        try:
            os.rmdir(path)
        except OSError:
            return


class Files:
    def __init__(self, context: Context) -> None:
        self._context = context

    def _who_and_where(self, request: dict[str, Any], field: str = "path") -> tuple[Account, str]:
        account = self._context.account(args.opt_text(request, "user"))
        return account, paths.resolve(args.text(request, field), account, field)

    def _acting(self, account: Account, request: dict[str, Any]) -> AbstractContextManager[None]:
        hand = self._context.hand(account, request)
        return linux.acting_as(hand.uid, hand.gid, hand.groups)

    def _info(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        return describe(path, os.lstat(path), self._context.users, detail=args.flag(request, "detail"))

    def stat(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        with self._acting(account, request):
            try:
                info = self._info(path, request)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok({"info": info})

    def list_dir(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        depth = args.integer({"depth": 1, **request}, "depth", 1)
        detail = args.flag(request, "detail")
        with self._acting(account, request):
            try:
                top = _names(path)
            except OSError as e:
                raise from_os(e, path) from None
            conn.ok()
            items = ItemSender(conn)
            for info in self._walk(path, top, depth, detail=detail):
                items.add(info)
            items.flush()
        conn.send_frame(protocol.END, b"{}")

    def _walk(self, path: str, top: list[str], depth: int, *, detail: bool) -> Iterator[dict[str, Any]]:
        """Parents before children, names in byte order; links are not entered, so loops end by themselves."""
        users = self._context.users
        stack = [(path, iter(top))]
        while stack:
            folder, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                continue
            full = f"{folder.rstrip('/')}/{name}"
            try:
                st = os.lstat(full)
            except FileNotFoundError:
                continue  # gone since the directory was read
            except OSError as e:
                yield _unknown(full, e)
                continue
            error, inner = None, None
            if stat.S_ISDIR(st.st_mode) and len(stack) < depth:
                try:
                    inner = _names(full)
                except FileNotFoundError:
                    continue
                except OSError as e:
                    error = from_os(e, full).message
            yield describe(full, st, users, error, detail=detail)
            if inner:
                stack.append((full, iter(inner)))

    def make_dir(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        mode = args.opt_integer(request, "mode", 0, 0o7777)
        owner = account if args.flag(request, "privileged") else None
        with self._acting(account, request):
            try:
                new = path in make_dirs(path, owner)
                if new and mode is not None:
                    os.chmod(path, mode)
                info = self._info(path, request)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok({"info": info, "new": new})

    def move(self, conn: Conn, request: dict[str, Any]) -> None:
        account, source = self._who_and_where(request, "source")
        target = paths.resolve(args.text(request, "target"), account, "target")
        with self._acting(account, request):
            try:
                try:
                    os.rename(source, target)
                except OSError as e:
                    if e.errno != errno.EXDEV:
                        raise
                    trees.move_across(source, target)
                info = self._info(target, request)
            except OSError as e:
                raise from_os(e, target if os.path.lexists(source) else source) from None
        conn.ok({"info": info})

    def remove(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        if path == "/":
            raise GuestError("InvalidRequest", "invalid_path", "the root directory cannot be removed", field="path")
        with self._acting(account, request):
            try:
                trees.remove_tree(path)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok()

    def symlink(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        target = args.text(request, "target")
        if not target or "\0" in target:
            raise GuestError("InvalidRequest", "invalid_path", "a link must say something", field="target")
        with self._acting(account, request):
            try:
                os.symlink(target, path)
                info = self._info(path, request)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok({"info": info})

    def chmod(self, conn: Conn, request: dict[str, Any]) -> None:
        account, path = self._who_and_where(request)
        mode = args.integer(request, "mode", 0, 0o7777)
        with self._acting(account, request):
            try:
                os.chmod(path, mode)
                info = self._info(path, request)
            except OSError as e:
                raise from_os(e, path) from None
        conn.ok({"info": info})


def _names(path: str) -> list[str]:
    fd = os.open(path, _DIRECTORY)
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    names.sort(key=os.fsencode)
    return names


def _unknown(path: str, e: OSError) -> dict[str, Any]:
    """An entry of which only the name could be learnt (its directory may be read but not searched)."""
    return {
        "path": path,
        "name": os.path.basename(path),
        "kind": "file",
        **dict.fromkeys(("size", "mode", "uid", "gid", "mtime_ns"), 0),
        "owner": "",
        "group": "",
        "target": None,
        "error": from_os(e, path).message,
    }
