"""References to secrets and where they may be bound. Pure."""

import re
from collections.abc import Collection, Iterator
from typing import Final

from skerry.core.errors import Problem
from skerry.core.limits import ENV_NAME
from skerry.core.models import Bindings

SECRET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION_MAX: Final = 999_999_999
REFERENCE: Final = re.compile(rf"({SECRET_NAME.pattern})(?:@([1-9][0-9]{{0,8}}))?")
VALUE_BYTES_MAX: Final = 16 * 1024
BOUND_MAX: Final = 64
"""Bindings of one sandbox or command."""


def reference(name: str, version: int | None) -> str:
    return name if version is None else f"{name}@{version}"


def parse_reference(text: str) -> tuple[str, int | None]:
    """Name and version; None: the newest when it is delivered. ValueError for what is no reference."""
    found = REFERENCE.fullmatch(text)
    if found is None:
        raise ValueError("not a reference to a secret")
    return found[1], None if found[2] is None else int(found[2])


def check_bindings(bindings: Bindings, env: Collection[str] = ()) -> Iterator[Problem]:
    """Their form, each variable once, in `env` too; whether the secrets exist is the vault's to say."""
    if len(bindings.env) + len(bindings.files) > BOUND_MAX:
        yield Problem("env", "binds too many secrets", len(bindings.env) + len(bindings.files), BOUND_MAX)
        return
    for bound, others in ((bindings.env, env), (bindings.files, {*bindings.env, *env})):
        for variable, wanted in bound.items():
            if not ENV_NAME.fullmatch(variable):
                yield Problem(f"env.{variable[:60]}", "is not a variable name", variable[:200], ENV_NAME.pattern)
            elif variable in others:
                yield Problem(f"env.{variable[:60]}", "is given twice", None, "one value")
            if not REFERENCE.fullmatch(wanted):
                # What is no reference may be a value that somebody has put there: it is not repeated.
                yield Problem(f"env.{variable[:60]}", "is not a reference to a secret", None, "NAME or NAME@VERSION")


def laid_over(below: Bindings, above: Bindings, env: Collection[str] = ()) -> Bindings:
    """Both, where each variable is what was said of it last: by `above`, or by `env`, as a plain text."""
    if not below:
        return above
    said = {*above.env, *above.files, *env}
    kept = [{name: ref for name, ref in bound.items() if name not in said} for bound in (below.env, below.files)]
    return Bindings({**kept[0], **above.env}, {**kept[1], **above.files})
