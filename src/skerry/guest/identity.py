"""Who this sandbox is, as the host has told it, and who may speak to it."""

import _thread
import fcntl
import json
import os
import socket
import struct
import time
from _operator import _compare_digest  # what hmac.compare_digest is, without hashlib
from collections.abc import Callable
from typing import Any

from skerry.guest import args, disk, linux, spawn
from skerry.guest.errors import GuestError
from skerry.guest.users import Account, Users

EFFECTS = frozenset({"hostname", "files", "clock", "entropy", "disk", "told"})
"""What `identify` does to the machine. All of it in a VM; an agent that is only a process does none."""

_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
_MARK = "# skerry"
TOLD = "/run/skerry/sandbox.json"
"""For programs that were running in a memory image: which sandbox they find themselves in, and its variables."""


class Context:
    """The identity and what follows from it. Set by `identify`, read by every operation."""

    def __init__(self, effects: frozenset[str]) -> None:
        self._effects = effects
        self._lock = _thread.allocate_lock()
        self._token = b""
        self._names = ("", "")
        self._told: tuple[str, dict[str, str], str] | None = None
        self._generation = -1
        self._sandbox_env: dict[str, str] = {}
        self._default_user = "root"
        self._default_cwd: str | None = None
        self.users = Users()
        self._image_env = spawn.ImageEnvironment()

    @property
    def identified(self) -> bool:
        return bool(self._token)

    # ------------------------------------------------------------------------------------------------------ identity

    def authorise(self, hello: dict[str, Any]) -> None:
        """Raise Forbidden unless the host shows the token and the generation of now."""
        if not self._token:
            raise GuestError("Unavailable", "not_identified", "the guest has not been told who it is yet")
        token = hello.get("token")
        shown = token.encode("utf-8", "surrogateescape") if isinstance(token, str) else b""
        if not _compare_digest(shown, self._token):
            raise GuestError("Forbidden", "wrong_token", "the token is not this sandbox's")
        if hello.get("generation") != self._generation:
            raise GuestError("Forbidden", "stale_generation", "the host speaks to an earlier life of this sandbox")

    def identify(self, hello: dict[str, Any], request: dict[str, Any]) -> list[str]:
        """Take on an identity; returns what could not be done, one line each.

        The first comes before anything runs in the guest and needs no token; a later one needs the current token and
        a higher generation."""
        with self._lock:
            generation = args.integer(request, "generation")
            if self._token:
                self.authorise(hello)
                if generation <= self._generation:
                    raise GuestError("Forbidden", "stale_generation", "the generation must grow with each identity")
            token = args.text(request, "token").encode("utf-8", "surrogateescape")
            if not 16 <= len(token) <= 1024:
                raise GuestError("InvalidRequest", "invalid_request", "token must be 16 to 1024 bytes", field="token")
            hostname, machine_id = args.text(request, "hostname"), args.text(request, "machine_id")
            if not 0 < len(hostname) <= 64 or not hostname.replace("-", "").isalnum() or not hostname.isascii():
                raise GuestError("InvalidRequest", "invalid_request", "hostname is not one", field="hostname")
            if len(machine_id) != 32 or not all(c in "0123456789abcdef" for c in machine_id):
                raise GuestError("InvalidRequest", "invalid_request", "machine_id must be 32 hex digits")
            wall_clock_ns = args.integer(request, "wall_clock_ns", 1)
            try:
                entropy = bytes.fromhex(args.text(request, "entropy"))
            except ValueError:
                raise GuestError("InvalidRequest", "invalid_request", "entropy must be hex digits") from None
            env, user = args.table(request, "env"), args.text(request, "default_user")
            cwd = args.opt_text(request, "default_cwd")
            problems = self._apply(hostname, machine_id, wall_clock_ns, entropy)
            if "told" in self._effects:
                problems += self._tell(hostname, env, user)
            self._sandbox_env, self._default_user, self._default_cwd = env, user, cwd
            self._token, self._generation = token, generation
        return problems

    def _apply(self, hostname: str, machine_id: str, wall_clock_ns: int, entropy: bytes) -> list[str]:
        acts: list[tuple[str, str, Callable[[], object]]] = [
            ("entropy", "random pool", lambda: add_entropy(entropy)),
            ("clock", "clock", lambda: time.clock_settime_ns(time.CLOCK_REALTIME, wall_clock_ns)),
        ]
        named: list[tuple[str, str, Callable[[], object]]] = [
            ("hostname", "host name", lambda: socket.sethostname(hostname)),
            ("files", "/etc/hostname", lambda: _replace("/etc/hostname", f"{hostname}\n")),
            ("files", "/etc/machine-id", lambda: _replace("/etc/machine-id", f"{machine_id}\n", 0o444)),
            ("files", "/etc/hosts", lambda: _replace("/etc/hosts", hosts_with(_read("/etc/hosts"), hostname))),
            ("disk", "root filesystem's size", disk.grow_root),
        ]
        if (hostname, machine_id) != self._names:  # a machine that goes on with its life has them already
            acts += named
            self._names = (hostname, machine_id)
        problems: list[str] = []
        for effect, what, act in acts:
            if effect in self._effects:
                try:
                    act()
                except OSError as e:
                    problems.append(f"{what}: {e.strerror or e}")
        return problems

    def _tell(self, sandbox: str, env: dict[str, str], user: str) -> list[str]:
        """Write down who this is, where that has changed, for the default user to read."""
        told = (sandbox, env, user)
        if told == self._told:
            return []
        try:
            text = json.dumps({"sandbox_id": sandbox, "env": env})
            _replace(TOLD, text, 0o640, group=self.users.find(user).gid)
        except (OSError, GuestError) as e:
            return [f"{TOLD}: {e}"]
        self._told = told
        return []

    # ------------------------------------------------------------------------------------------------- what follows

    def account(self, wanted: str | None) -> Account:
        return self.users.find(wanted if wanted is not None else self._default_user)

    def hand(self, account: Account, request: dict[str, Any]) -> Account:
        """As whom the kernel is asked to touch files: the user, or root where the request is `privileged`."""
        return self.users.find("0") if args.flag(request, "privileged") else account

    def cwd(self, account: Account, wanted: str | None) -> str:
        """A command's directory: its own, else the sandbox's default for the default user, else the user's home."""
        # By name, not by looking the default user up: that one may be gone while others can still run.
        if wanted is None and self._default_user in (account.name, str(account.uid)):
            wanted = self._default_cwd
        return spawn.default_cwd(account, wanted)

    def environment(self, account: Account, command: dict[str, str], *, terminal: bool) -> dict[str, str]:
        return spawn.environment(account, self._image_env.values(), self._sandbox_env, command, terminal=terminal)


def add_entropy(entropy: bytes) -> None:
    """Credit it to the kernel's pool and reseed, so that two copies of one machine part at once."""
    fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for at in range(0, len(entropy), 64):
            part = entropy[at : at + 64]
            fcntl.ioctl(fd, _RNDADDENTROPY, struct.pack("ii", len(part) * 8, len(part)) + part)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    finally:
        os.close(fd)


def hosts_with(text: str, hostname: str) -> str:
    """/etc/hosts with this host's own name; lines that an earlier identity wrote go."""
    lines = [line for line in text.split("\n") if line and not line.endswith(_MARK)]
    if not any("localhost" in line.split("#")[0].split()[1:] for line in lines):
        lines.append("127.0.0.1\tlocalhost")
        lines.append("::1\tlocalhost ip6-localhost")
    lines.append(f"127.0.1.1\t{hostname} {_MARK}")
    return "\n".join(lines) + "\n"


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(fd, 1024 * 1024).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _replace(path: str, text: str, mode: int = 0o644, group: int = 0) -> None:
    """By rename: whatever the image or its root has put there is replaced, never followed or waited for."""
    beside = f"{path}.skerry-new"
    if os.path.lexists(beside):
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        data = memoryview(text.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(fd, data) :]
        if group:
            os.fchown(fd, -1, group)
    finally:
        os.close(fd)
    os.rename(beside, path)


def power_off() -> None:
    linux.power_off()
