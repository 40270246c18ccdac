"""What a client hears of an execution: one JSON object per line."""

import json
import time
from collections.abc import Mapping
from typing import Any, Final

Event = dict[str, Any]

FIELDS: Final = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
"""Kinds of data with a field of their own; all others are in `extra`, by their MIME type."""


def output(stream: str, text: str) -> Event:
    """`stream` is "stdout" or "stderr"; the time is nanoseconds since the epoch."""
    return {"type": stream, "text": text, "timestamp": time.time_ns()}


def result(data: Mapping[str, Any], *, main: bool) -> Event:
    """`main`: the value of the last line, not something that was displayed."""
    event: Event = {"type": "result", "is_main_result": main}
    extra: dict[str, Any] = {}
    for kind, value in data.items():
        if kind in FIELDS:
            event[FIELDS[kind]] = value
        else:
            extra[kind] = value
    text = event.get("text")
    if isinstance(text, str) and len(text) >= 2 and text[0] == text[-1] == "'":
        event["text"] = text[1:-1]  # clients expect a string's value, not its representation
    if extra:
        event["extra"] = extra
    return event


def error(name: str, value: str, traceback: str = "") -> Event:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def count(number: int) -> Event:
    return {"type": "number_of_executions", "execution_count": number}


def line(event: Event) -> bytes:
    return json.dumps(event, ensure_ascii=True, separators=(",", ":"), default=str).encode() + b"\n"
