"""Where Python kernels come from: a process that has everything imported and forks. A kernel is there at once, even
under emulation, and shares the memory of what was imported.

Started with a socket as file descriptor 0 (SOCK_SEQPACKET, JSON objects), it says {"ready": true}. A request

    {"id": 1, "order": PATH}   with three descriptors: stdout, stderr, acknowledgements

(the file: {"connection_file": PATH, "cwd": PATH, "env": {…}}) is answered {"id": 1, "pid": PID}, and then, once that
kernel has ended, {"id": 1, "status": STATUS} (of wait). When its socket is closed it ends, and its kernels with it.
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

PACKET = 65_536
USUAL = (
    "ipykernel.ipkernel", "ipykernel.kernelapp", "IPython.core.pylabtools", "matplotlib.backends.backend_agg",
    "matplotlib.pyplot", "numpy", "pandas", "e2b_charts",
)  # fmt: skip
"""What most code imports. What is not installed is passed over."""


@dataclass(frozen=True)
class Request:
    """What one kernel is to be, in the process that is to be it."""

    connection_file: str
    acknowledgements: int


def preload() -> None:
    for name in USUAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        _draw()
    gc.collect()
    gc.freeze()  # so that no collection writes to what is shared


def _draw() -> None:
    """Once, for what matplotlib looks up at its first figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure()
    figure.add_subplot().plot([1, 2])
    FigureCanvasAgg(figure).print_png(io.BytesIO())


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._kernels: dict[int, tuple[int, int]] = {}
        """Pid and id of each kernel, by its pidfd."""

    def serve(self) -> Request | None:
        """Returns in each kernel, and once in the zygote: None, when nobody wants kernels any more."""
        self._say({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._ended(key.fd)
                    continue
                packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 3)
                if not packet:
                    self._end_all()
                    return None
                request = self._fork(json.loads(packet), descriptors)
                if request is not None:
                    return request

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _fork(self, wanted: dict[str, Any], descriptors: list[int]) -> Request | None:
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for pidfd in self._kernels:
                os.close(pidfd)
            return _become(wanted, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._kernels[pidfd] = (pid, wanted["id"])
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._say({"id": wanted["id"], "pid": pid})
        return None

    def _ended(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid, kernel_id = self._kernels.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._say({"id": kernel_id, "status": status})

    def _end_all(self) -> None:
        for pid, _ in self._kernels.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _become(wanted: dict[str, Any], descriptors: list[int]) -> Request:
    """In the new process: a session, descriptors, directory and environment of its own."""
    os.setsid()
    stdout, stderr, acknowledgements = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (stdout, 1), (stderr, 2)):  # 0 was the zygote's socket
        os.dup2(descriptor, place)
        os.close(descriptor)
    with open(wanted["order"], encoding="utf-8", errors="surrogateescape") as file:
        order = json.load(file)
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")  # short of memory, the code of users goes before what serves it
    return Request(order["connection_file"], acknowledgements)


def main() -> None:
    sys.path.pop(0)  # this script's own directory
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from_this = os.path.dirname(os.path.abspath(__file__))
    kernel = _module("skerry_kernel", os.path.join(from_this, "kernel.py"))
    preload()
    request = Zygote(socket.socket(fileno=os.dup(0))).serve()
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kernel.run(request.connection_file, request.acknowledgements)


def _module(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: S101 - it lies beside this file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
