"""A Python kernel as the code interpreter wants it, on IPython's own. Runs in a process that the zygote has forked.

- Standard output and error are the process's own descriptors, so that whoever writes faster than it is read waits.
- Whoever displays something waits until the service has taken it, so that outputs keep their order.
- Variables for one execution, and what is to be done in a new life, come in a request's metadata.
- pandas' tables are told as data and matplotlib's figures as charts, beside their usual forms.
"""

import contextlib
import io
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Type, Unicode


class Acknowledgements:
    """A byte for everything displayed, once the service has taken it."""

    def __init__(self) -> None:
        self.fd = -1
        self._pid = 0
        self._lock = threading.Lock()

    def open(self, fd: int) -> None:
        self.fd, self._pid = fd, os.getpid()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # a child of the user's, whose displays go nowhere
            yield
            return
        with self._lock:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            yield
            os.read(self.fd, 1)


acknowledgements = Acknowledgements()


class DisplayPublisher(ZMQDisplayPublisher):
    def publish(self, *args: Any, **kwargs: Any) -> None:
        with acknowledgements.awaited():
            super().publish(*args, **kwargs)


class DisplayHook(ZMQShellDisplayHook):
    def finish_displayhook(self) -> None:
        if self.msg is None or not self.msg["content"]["data"]:
            super().finish_displayhook()
            return
        with acknowledgements.awaited():
            super().finish_displayhook()


class Shell(ZMQInteractiveShell):
    displayhook_class = Type(DisplayHook)
    display_pub_class = Type(DisplayPublisher)


class Kernel(IPythonKernel):
    shell_class = Type(Shell)

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        wanted = parent.get("metadata", {}).get("skerry", {})
        os.environ.update(wanted.get("sandbox_env", {}))
        if wanted.get("reseed"):
            reseed()
        with variables(wanted.get("env", {})):
            await super().execute_request(stream, ident, parent)


@contextlib.contextmanager
def variables(env: Mapping[str, str]) -> Iterator[None]:
    """They are as they were afterwards."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def reseed() -> None:
    """New seeds for the generators of a process that has become another: of those that belong to a module.
    `os.urandom` and all that asks it (`secrets`, `uuid4`) need none."""
    random.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (ssl := sys.modules.get("ssl")) is not None:
        ssl.RAND_add(os.urandom(48), 0.0)


class DataFormatter(BaseFormatter):
    """A table's columns, each a list of what JSON can hold."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

    def __call__(self, obj: Any) -> Any:
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(obj, pandas.DataFrame):
            return super().__call__(obj)
        columns = obj.to_dict(orient="list")
        return {str(name): [_plain(value) for value in values] for name, values in columns.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value != value:  # NaN, which JSON cannot hold
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "isoformat"):
        return None if str(value) == "NaT" else value.isoformat()
    return value.item() if hasattr(value, "item") else str(value)


class ChartFormatter(BaseFormatter):
    """A figure's chart as e2b-charts tells it."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, obj: Any) -> Any:
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(obj, figure.Figure):
            return super().__call__(obj)
        try:
            from e2b_charts import chart_figure_to_dict  # pyright: ignore[reportMissingImports]

            return chart_figure_to_dict(obj) or None
        except Exception:  # noqa: BLE001 - of a figure that it cannot read there is still the picture
            return None


def run(connection_file: str, acknowledged: int) -> None:
    """Be the kernel, to the end of the process."""
    acknowledgements.open(acknowledged)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    reseed()  # forked from one that others are forked from, too
    app: Any = IPKernelApp.instance(kernel_class=Kernel, connection_file=connection_file)
    app.outstream_class = None
    app.initialize(["-f", connection_file, "--HistoryManager.enabled=False", "--InteractiveShell.colors=nocolor"])
    formatters = app.shell.display_formatter.formatters
    for formatter in (DataFormatter, ChartFormatter):
        made = formatter(parent=app.shell.display_formatter)
        formatters[made.format_type] = made
    with contextlib.suppress(ImportError):
        app.shell.enable_matplotlib("inline")
    app.start()
