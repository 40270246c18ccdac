"""Starting a program as a user, with vfork: nothing of the agent is copied, and every failure has a name.

The program's first thread itself takes the user's ids, enters the directory, opens the terminal as a session's leader
and executes (`birth`). So the kernel judges directory, terminal and program as the user, and it is known which of them
failed.
"""

import errno
import os

from skerry.guest import birth, linux, paths
from skerry.guest.errors import GuestError, from_os, show
from skerry.guest.plumbing import Plumbing
from skerry.guest.users import Account

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELLS = ("/bin/bash", "/bin/sh")
ARGUMENT_BYTES_MAX = 128 * 1024 - 1
TERM = "xterm-256color"


def shell_argv(text: str) -> list[str]:
    """The text as one argument of a shell that is not a login shell; it is not touched."""
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > ARGUMENT_BYTES_MAX:
        raise GuestError(
            "InvalidRequest",
            "command_too_long",
            f"the shell text is {size} bytes long; at most {ARGUMENT_BYTES_MAX} are allowed",
            field="shell",
            given=size,
            allowed=ARGUMENT_BYTES_MAX,
        )
    for shell in SHELLS:
        if os.access(shell, os.X_OK):
            return [shell, "-c", text]
    raise GuestError("InvalidRequest", "command_not_found", "the image has neither /bin/bash nor /bin/sh", argv0="sh")


def environment(
    account: Account, image: dict[str, str], sandbox: dict[str, str], command: dict[str, str], *, terminal: bool
) -> dict[str, str]:
    """Layers, the later ones win: the defaults, the image's, the user's own four, the sandbox's, the command's."""
    env = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}
    if terminal:
        env["TERM"] = TERM
    env.update(image)
    env["HOME"], env["USER"], env["LOGNAME"], env["SHELL"] = account.home, account.name, account.name, account.shell
    env.update(sandbox)
    env.update(command)
    return env


class Born:
    """A program that runs, or that was over within the time that was waited for it."""

    __slots__ = ("err", "out", "pid", "pidfd", "status")

    def __init__(self, job: birth.Job, out: bytes, err: bytes) -> None:
        self.pid = job.pid
        self.pidfd = job.pidfd
        self.status: int | None = job.status if job.ended else None
        """As waitpid gives it; None while it runs."""
        self.out = out
        self.err = err
        """What it has written so far, and what of that has been read."""


def spawn(
    account: Account, argv: list[str], env: dict[str, str], cwd: str, plumbing: Plumbing, cgroup: int | None, *,
    hold_ms: int, reader: int,
) -> Born:  # fmt: skip
    """Start it, and wait for its end for `hold_ms` at most, or until the host leaves the connection `reader`.

    The program gets a session of its own, default signals, none blocked, umask 022, and no descriptor but the three; it
    is born in the cgroup, where the descriptor of one is given. On failure the plumbing is closed.
    """
    bed = birth.bed()
    try:
        job = bed.job
        job.in_, job.out, job.err = plumbing.open(account.uid, account.gid)
        job.from_out, job.from_err = tuple(plumbing.outputs) if plumbing.terminal is None else (-1, -1)
        own = account.uid == linux.OWN_UID and account.gid == linux.OWN_GID and account.groups == linux.OWN_GROUPS
        job.uid, job.gid, job.groups = account.uid, account.gid, -1 if own else len(account.groups)
        job.cgroup = -1 if cgroup is None else cgroup
        job.hold_ms, job.reader = hold_ms, reader
        candidates = _candidates(argv[0], env.get("PATH", DEFAULT_PATH))
        birth.spawn(bed, cwd, plumbing.terminal, candidates, argv, env, account.groups)
        if job.stage == 0:
            born = Born(job, *bed.output())
            if born.status is not None:
                plumbing.ended(out_left=job.from_out >= 0, err_left=job.from_err >= 0)
            return born
        failure = _failure(job.stage, job.error, account, argv, env, cwd)
    except OSError as e:  # no descriptors left
        plumbing.close()
        raise from_os(e, f"process of {account.name}") from None
    except ValueError:
        plumbing.close()
        raise GuestError("InvalidRequest", "invalid_request", "a text holds a NUL character", field="env") from None
    except BaseException:
        plumbing.close()
        raise
    finally:
        birth.make_bed(bed)
    plumbing.close()
    raise failure


def _candidates(name: str, search: str) -> list[str]:
    """Where the program may be, by the rules of execvp."""
    if "/" in name:
        return [name]
    if len(name) > paths.NAME_BYTES_MAX:
        raise _not_found(name)
    return [f"{folder or '.'}/{name}" for folder in dict.fromkeys(search.split(":"))]


def _failure(stage: int, number: int, account: Account, argv: list[str], env: dict[str, str], cwd: str) -> GuestError:
    """What to say where a program was not started."""
    name = argv[0]
    if stage == birth.DIRECTORY:
        return _no_directory(number, cwd)
    if number in (errno.EAGAIN, errno.ENOMEM):
        what = "the user's process limit is reached" if number == errno.EAGAIN else "the guest is out of memory"
        return GuestError("Unavailable", "process_limit", f"cannot start {show(name)}: {what}", argv0=show(name))
    if stage == birth.INTERPRETER:
        return _not_found(name, "the interpreter that it names does not exist")
    if stage != birth.PROGRAM:
        return from_os(OSError(number, os.strerror(number)), f"process of {account.name}")
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return _not_found(name)
    if number == errno.E2BIG:
        return _too_long(argv, env)
    if number in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOEXEC, errno.ETXTBSY, errno.EINVAL, errno.ELIBBAD):
        return _not_executable(name, os.strerror(number).lower())
    return from_os(OSError(number, os.strerror(number)), name)


def _no_directory(number: int, cwd: str) -> GuestError:
    if number == errno.ENOENT:
        text = f"the working directory {show(cwd)} does not exist"
        return GuestError("InvalidRequest", "cwd_not_found", text, cwd=show(cwd))
    if number == errno.ENOTDIR:
        text = f"the working directory {show(cwd)} is not one"
        return GuestError("InvalidRequest", "cwd_not_a_directory", text, cwd=show(cwd))
    return from_os(OSError(number, os.strerror(number)), cwd)


def _too_long(argv: list[str], env: dict[str, str]) -> GuestError:
    size = sum(len(os.fsencode(a)) + 1 for a in argv)
    env_size = sum(len(os.fsencode(k)) + len(os.fsencode(v)) + 2 for k, v in env.items())
    return GuestError(
        "InvalidRequest",
        "command_too_long",
        f"arguments ({size} bytes) and environment ({env_size} bytes) are more than the guest's kernel takes",
        field="argv",
        given=size + env_size,
        allowed=f"{ARGUMENT_BYTES_MAX} for one argument, about 2 MiB in total",
    )


def _not_found(name: str, why: str = "no such program") -> GuestError:
    return GuestError("InvalidRequest", "command_not_found", f"cannot start {show(name)}: {why}", argv0=show(name))


def _not_executable(name: str, why: str = "permission denied") -> GuestError:
    return GuestError("InvalidRequest", "command_not_executable", f"cannot start {show(name)}: {why}", argv0=show(name))


class ImageEnvironment:
    """The image's own variables: `/etc/environment`, lines of KEY=value, the value possibly in quotes."""

    def __init__(self, path: str = "/etc/environment") -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._values: dict[str, str] = {}

    def values(self) -> dict[str, str]:
        try:
            st = os.stat(self._path)
            stamp = (st.st_ino, st.st_mtime_ns, st.st_size)
            if stamp != self._stamp:
                with open(self._path, encoding="utf-8", errors="surrogateescape") as f:
                    self._values = parse_environment(f.read(1024 * 1024))
                self._stamp = stamp
        except OSError:
            self._values, self._stamp = {}, None
        return self._values


def parse_environment(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for raw in text.split("\n"):
        line = raw.strip()
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or line.startswith("#") or not name.isidentifier() or "\0" in value:
            continue
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        values[name] = value
    return values


def default_cwd(account: Account, wanted: str | None) -> str:
    return paths.resolve(wanted, account, "cwd") if wanted is not None else account.home
