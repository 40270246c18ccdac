"""Running the host's tools: argv in, text out, failures as our errors."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skerry.core.errors import InternalError

TAIL_LINES = 12


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run a tool to its end and give its standard output (with standard error mixed in where `on_line` is given).

    `timeout` is in seconds; `env` comes on top of ours, with C.UTF-8 as the locale. Raises InternalError
    (`tool_missing`, `tool_failed`, `tool_timeout`) that holds the last lines the tool said.
    """
    words = [os.fspath(word) for word in argv]
    try:
        with subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if on_line else subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, errors = _collect(process, timeout, on_line)
            except BaseException:
                _kill_group(process)
                raise
    except FileNotFoundError as error:
        raise InternalError(f"{words[0]} is not installed", code="tool_missing", tool=words[0]) from error
    except OSError as error:
        said = f"{words[0]} cannot be run: {error.strerror}"
        raise InternalError(said, code="tool_failed", tool=words[0]) from error
    except subprocess.TimeoutExpired as error:
        raise InternalError(f"{words[0]} did not end within {timeout:.0f} s", code="tool_timeout") from error
    if process.returncode != 0:
        tail = "\n".join((errors or output).strip().splitlines()[-TAIL_LINES:])
        raise InternalError(
            f"{Path(words[0]).name} failed (exit {process.returncode}): {tail}", code="tool_failed", tool=words[0]
        )
    return output


def _kill_group(process: "subprocess.Popen[str]") -> None:
    """End the tool and what it started; it may have ended by itself."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _collect(
    process: "subprocess.Popen[str]", timeout: float, on_line: Callable[[str], None] | None
) -> tuple[str, str]:
    if on_line is None:
        output, errors = process.communicate(timeout=timeout)
        return output, errors
    return _follow(process, timeout, on_line), ""


def _follow(process: "subprocess.Popen[str]", timeout: float, on_line: Callable[[str], None]) -> str:
    """Pass lines on as they come. The deadline is kept by a timer that closes the tool's life, and so its pipe."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill_group(process)

    timer = threading.Timer(timeout, stop)
    timer.start()
    kept: list[str] = []
    try:
        for line in process.stdout or ():
            kept.append(line)
            del kept[:-200]
            on_line(line.rstrip())
        process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        raise subprocess.TimeoutExpired(process.args, timeout)
    return "".join(kept)
