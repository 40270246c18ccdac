"""The descriptors between the agent and one program: pipes, or a terminal."""

import fcntl
import os
from struct import pack

_TIOCSWINSZ = 0x5414
_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430

_null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class Plumbing:
    """Opened by the agent and given to the user: opening /dev/stdout or the terminal again works.

    The reading ends stay blocking: they are read after poll(2) said so, and by one thread. What the agent writes to
    (stdin, the terminal) does not block.

    The agent keeps the outputs' other sides open as long as the program lives: a program that ends closes its outputs
    a moment before it is over, and the agent would be woken for nothing.
    """

    def __init__(self, *, stdin: bool, pty: tuple[int, int] | None) -> None:
        self._want_stdin = stdin
        self._pty = pty
        self.terminal: str | None = None
        """Its path, for the program to open."""
        self.outputs: dict[int, str] = {}
        """The agent's ends, to be read: descriptor -> stream."""
        self.stdin: int | None = None
        """The agent's end, to be written."""
        self.held: list[int] = []
        """The outputs' other sides: the pipes' writing ends, or the terminal's program side."""
        self._child: int | None = None
        """The program's standard input, where that is a pipe."""

    def open(self, uid: int, gid: int) -> tuple[int, int, int]:
        """Make them; returns what becomes the program's 0, 1 and 2 (three times -1: it opens the terminal).

        The agent's own 0, 1 and 2 are always open, so no source is also a target."""
        if self._pty is not None:
            self._open_terminal(*self._pty, uid)
            return -1, -1, -1
        source = _null
        if self._want_stdin:
            source, self.stdin = os.pipe()
            self._child = source
            os.set_blocking(self.stdin, False)
            if uid != 0:
                os.fchown(source, uid, gid)
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            self.outputs[reading] = name
            self.held.append(writing)
            if uid != 0:
                os.fchown(writing, uid, gid)
        return source, self.held[0], self.held[1]

    def _open_terminal(self, cols: int, rows: int, uid: int) -> None:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.outputs[master] = "pty"
        fcntl.ioctl(master, _TIOCSPTLCK, pack("i", 0))
        path = f"/dev/pts/{int.from_bytes(fcntl.ioctl(master, _TIOCGPTN, pack('i', 0)), 'little')}"
        resize(master, cols, rows)
        self.held.append(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        os.fchown(self.held[0], uid, -1)  # the group is the filesystem's for all terminals
        self.stdin = os.dup(master)
        self.terminal = path

    def started(self) -> None:
        """The program has its standard input: nobody else reads it from now on."""
        if self._child is not None:
            os.close(self._child)
            self._child = None

    def let_go(self) -> None:
        """The program is over: from now on the outputs end when its children have closed them."""
        for fd in self.held:
            os.close(fd)
        self.held.clear()

    def ended(self, *, out_left: bool, err_left: bool) -> None:
        """The program was over at once: the outputs' other sides are closed, and so are those that are not left."""
        self.held.clear()
        self.outputs = {fd: name for fd, name in self.outputs.items() if (out_left if name == "stdout" else err_left)}

    def close(self) -> None:
        """All of it, where nobody looks after a program."""
        self.started()
        self.let_go()
        for fd in self.outputs:
            os.close(fd)
        self.outputs.clear()
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None


def resize(master: int, cols: int, rows: int) -> None:
    """The kernel tells the foreground process group with SIGWINCH."""
    fcntl.ioctl(master, _TIOCSWINSZ, pack("HHHH", rows, cols, 0, 0))
