"""Who is who, from the rootfs's own /etc/passwd and /etc/group; the agent's libc has no say in it."""

import os

from skerry.guest.errors import GuestError, show


class Account:
    """One user: what a program runs as, and where its relative paths start."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, name: str, uid: int, gid: int, groups: tuple[int, ...], home: str, shell: str) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.home = home
        self.shell = shell


class Users:
    """Looks users up; reads the files again when they have changed."""

    def __init__(self, passwd: str = "/etc/passwd", group: str = "/etc/group") -> None:  # noqa: S107
        self._paths = (passwd, group)
        self._stamp: tuple[tuple[int, int, int], ...] = ()
        self._cache: dict[str, Account] = {}
        self._passwd: list[list[str]] = []
        self._group: list[list[str]] = []
        self._user_names: dict[int, str] = {}
        self._group_names: dict[int, str] = {}

    def find(self, wanted: str) -> Account:
        """A user by name or number. A number needs no entry; a name does, else NotFound `user_not_found`."""
        self.refresh()
        account = self._cache.get(wanted)
        if account is None:
            account = self._cache[wanted] = self._find(wanted)
        return account

    def user_name(self, uid: int) -> str:
        """The name, or the number as text."""
        return self._user_names.get(uid) or str(uid)

    def group_name(self, gid: int) -> str:
        return self._group_names.get(gid) or str(gid)

    def refresh(self) -> None:
        stamp = tuple(_stamp(path) for path in self._paths)
        if stamp == self._stamp:
            return
        passwd = [f for f in _read(self._paths[0]) if len(f) >= 7 and _is_id(f[2]) and _is_id(f[3])]
        group = [f for f in _read(self._paths[1]) if len(f) >= 4 and _is_id(f[2])]
        self._passwd, self._group, self._cache = passwd, group, {}
        self._user_names = {int(f[2]): f[0] for f in reversed(passwd)}
        self._group_names = {int(f[2]): f[0] for f in reversed(group)}
        self._stamp = stamp

    def _find(self, wanted: str) -> Account:
        for f in self._passwd:
            if f[0] == wanted:
                return self._account(f)
        if _is_id(wanted):
            uid = str(int(wanted))
            for f in self._passwd:
                if f[2] == uid:
                    return self._account(f)
            if int(wanted) == 0:
                return Account("root", 0, 0, (0,), "/root" if os.path.isdir("/root") else "/", "/bin/sh")
            return Account(wanted, int(wanted), int(wanted), (int(wanted),), "/", "/bin/sh")
        raise GuestError("InvalidRequest", "user_not_found", f"there is no user {show(wanted)!r}", user=show(wanted))

    def _account(self, fields: list[str]) -> Account:
        name, gid = fields[0], int(fields[3])
        more = {int(g[2]) for g in self._group if name in g[3].split(",")}
        groups = (gid, *sorted(more - {gid}))
        home = fields[5] if fields[5].startswith("/") and fields[5] != "/nonexistent" else "/"
        return Account(name, int(fields[2]), gid, groups, home, fields[6] or "/bin/sh")


def _is_id(text: str) -> bool:
    # 2**32 - 1 means "leave it" to the kernel and is nobody's id.
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**32 - 1


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        st = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (st.st_ino, st.st_mtime_ns, st.st_size)


def _read(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as f:
            text = f.read(4 * 1024 * 1024)
    except OSError:
        return []
    return [line.split(":") for line in text.split("\n") if line and not line.startswith(("#", "+", "-"))]
