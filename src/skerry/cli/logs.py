"""How the server writes its log: structured, to standard error, tracebacks without the values of variables."""

import contextlib
import logging
import sys
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import Processor

SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
)


class Unfailing:
    """A stream that never fails whoever logs: a line that a full disk or a closed pipe does not take is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(level: str, how: Literal["auto", "json", "console"]) -> None:
    """Send structlog's and the standard library's records one way."""
    console = how == "console" or (how == "auto" and sys.stderr.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    stream = cast("TextIO", Unfailing(sys.stderr))
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*SHARED, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
