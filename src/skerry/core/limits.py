"""Bounds that hold for everybody, with their units in their names, and the checks that say what is allowed."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from skerry.core.errors import InvalidRequest, Problem

CPU_MIN: Final = 1
CPU_MAX: Final = 8
MEMORY_MB_MIN: Final = 256
MEMORY_MB_MAX: Final = 8192
DISK_MB_MIN: Final = 2048
DISK_MB_MAX: Final = 102_400
TIMEOUT_MS_MIN: Final = 60_000
"""What `/v1` lets a caller ask for. The services take any from 0 on, which ends it at once: other faces have other
rules."""
TIMEOUT_MS_MAX: Final = 14_400_000
TIMEOUT_MS_DEFAULT: Final = 300_000
IDLE_TIMEOUT_MS_DEFAULT: Final = 300_000
PERSISTENT_IDLE_TIMEOUT_MS_DEFAULT: Final = 900_000
"""For sandboxes that are paused, not killed."""
FORK_MAX: Final = 20
COMMAND_TIMEOUT_MS_DEFAULT: Final = 55_000

METADATA_ENTRIES_MAX: Final = 64
METADATA_KEY_MAX: Final = 128
METADATA_VALUE_MAX: Final = 1024

COMMAND_BYTES_MAX: Final = 2 * 1024 * 1024
"""All of argv together."""
ARGUMENT_BYTES_MAX: Final = 128 * 1024 - 1
"""What Linux takes for one argument, and so for the text of a shell command."""
ENV_BYTES_MAX: Final = 1024 * 1024
ENV_ENTRIES_MAX: Final = 4096
ENV_VALUE_BYTES_MAX: Final = 128 * 1024 - 1 - 256
"""One `KEY=value` is one string to the kernel and shares its 128 KiB limit."""

PATH_BYTES_MAX: Final = 4095
NAME_BYTES_MAX: Final = 255

ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SNAPSHOT_NAME: Final = re.compile(r"(?=.{1,128}$)[a-z0-9][a-z0-9._-]*(:[A-Za-z0-9._-]+)?")
"""Optionally with a tag."""
TAG_DEFAULT: Final = "default"
"""The tag of a name without one. It is never written."""
TEMPLATE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}(:[A-Za-z0-9._-]{1,128})?")


def idle_timeout_ms_default(*, auto_pause: bool) -> int:
    """What a sandbox gets that was given none."""
    return PERSISTENT_IDLE_TIMEOUT_MS_DEFAULT if auto_pause else IDLE_TIMEOUT_MS_DEFAULT


def check_range(field: str, value: int, low: int, high: int) -> Iterator[Problem]:
    if not low <= value <= high:
        yield Problem(field, f"must be from {low} to {high}", value, f"{low}..{high}")


def check_env(field: str, env: Mapping[str, str]) -> Iterator[Problem]:
    """Names must be what a shell can hold, values what the kernel takes. Errors never repeat a value."""
    if len(env) > ENV_ENTRIES_MAX:
        yield Problem(field, f"has too many entries (at most {ENV_ENTRIES_MAX})", len(env), ENV_ENTRIES_MAX)
        return
    total = 0
    for key, value in env.items():
        if not ENV_NAME.fullmatch(key):
            yield Problem(f"{field}.{key}", "is not a variable name", key, ENV_NAME.pattern)
        if "\0" in value:
            yield Problem(f"{field}.{key}", "holds a NUL character, which no environment can carry", None, "no NUL")
        size = len(value.encode("utf-8", "surrogateescape"))
        total += len(key) + size
        if size > ENV_VALUE_BYTES_MAX:
            yield Problem(f"{field}.{key}", "is too long", f"{size} bytes", f"{ENV_VALUE_BYTES_MAX} bytes")
    if total > ENV_BYTES_MAX:
        yield Problem(field, "is too large in total", f"{total} bytes", f"{ENV_BYTES_MAX} bytes")


def check_metadata(field: str, metadata: Mapping[str, str]) -> Iterator[Problem]:
    if len(metadata) > METADATA_ENTRIES_MAX:
        yield Problem(field, "has too many entries", len(metadata), METADATA_ENTRIES_MAX)
    for key, value in metadata.items():
        if not 0 < len(key) <= METADATA_KEY_MAX:
            yield Problem(f"{field}.{key[:40]}", "key length is out of range", len(key), f"1..{METADATA_KEY_MAX}")
        if len(value) > METADATA_VALUE_MAX:
            yield Problem(f"{field}.{key[:40]}", "is too long", len(value), METADATA_VALUE_MAX)


def refuse(problems: Iterator[Problem] | list[Problem]) -> None:
    """Raise InvalidRequest if there is any problem."""
    found = list(problems)
    if found:
        raise InvalidRequest("; ".join(f"{p.field} {p.message}" for p in found[:5]), problems=found)
