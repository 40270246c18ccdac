"""References to secrets and where they may be bound. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from skerry.core.errors import Problem
from skerry.core.limits import ENV_NAME
from skerry.core.models import Bindings

SECRET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
REFERENCE: Final = re.compile(rf"({SECRET_NAME.pattern})(?:@([1-9][0-9]{{0,8}}))?")
FILES_ROOT: Final = "/run/secrets/"
FILE_PATH: Final = re.compile(rf"{FILES_ROOT}[A-Za-z0-9._-]{{1,128}}")
VALUE_BYTES_MAX: Final = 16 * 1024
BOUND_MAX: Final = 64
"""Bindings of one sandbox or command."""


def parse_reference(text: str) -> tuple[str, int | None]:
    """Name and version; None: the newest when it is delivered. ValueError for what is no reference."""
    found = REFERENCE.fullmatch(text)
    if found is None:
        raise ValueError("not a reference to a secret")
    return found[1], None if found[2] is None else int(found[2])


def check_bindings(bindings: Bindings) -> Iterator[Problem]:
    """Their form; whether the secrets exist is the vault's to say."""
    if len(bindings.env) + len(bindings.files) > BOUND_MAX:
        yield Problem("secrets", "are too many", len(bindings.env) + len(bindings.files), BOUND_MAX)
        return
    yield from _check("secret_env", bindings.env, ENV_NAME, "is not a variable name")
    yield from _check("secret_files", bindings.files, FILE_PATH, f"is not a file directly in {FILES_ROOT}")
    for path in bindings.files:
        if path.removeprefix(FILES_ROOT) in {".", ".."}:
            yield Problem("secret_files", f"is not a file directly in {FILES_ROOT}", path)


def _check(field: str, bound: Mapping[str, str], target: re.Pattern[str], wrong: str) -> Iterator[Problem]:
    for where, reference in bound.items():
        if not target.fullmatch(where):
            yield Problem(field, wrong, where, target.pattern)
        if not REFERENCE.fullmatch(reference):
            # What is no reference may be a value that somebody has put there: it is not repeated.
            yield Problem(f"{field}.{where[:60]}", "is not a reference to a secret", None, "NAME or NAME@VERSION")
