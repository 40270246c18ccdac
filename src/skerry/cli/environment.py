"""Options that give a sandbox or a command its variables."""

import os
from typing import Annotated, Any

import typer

from skerry.core.errors import InvalidRequest
from skerry.core.secrets import parse_reference
from skerry.sdk import SecretRef

Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="K=V, or K to pass on the own one. Repeatable.")]
SecretEnv = Annotated[
    list[str] | None,
    typer.Option("--secret-env", metavar="K=SECRET", help="A variable that gets a secret's value. Repeatable."),
]
SecretFile = Annotated[
    list[str] | None,
    typer.Option("--secret-file", metavar="K=SECRET", help="A variable that names a file with a secret. Repeatable."),
]


def pairs(option: str, values: list[str] | None, environ: Any = None) -> dict[str, str]:
    """K=V texts as a mapping; with `environ`, K alone takes its value from there."""
    found: dict[str, str] = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals and environ is not None and name in environ:
            value, equals = environ[name], "="
        if not name or not equals:
            raise InvalidRequest.of(option, "must be K=V", given=name, allowed="K=V")
        found[name] = value
    return found


def environment(
    env: list[str] | None, secret_env: list[str] | None, secret_file: list[str] | None
) -> dict[str, str | SecretRef]:
    """What the three options say together; each variable once."""
    found: dict[str, str | SecretRef] = dict(pairs("--env", env, os.environ))
    for option, values, file in (("--secret-env", secret_env, False), ("--secret-file", secret_file, True)):
        for name, wanted in pairs(option, values).items():
            if name in found:
                raise InvalidRequest.of(option, "names a variable that has a value already", given=name)
            try:
                secret, version = parse_reference(wanted)
            except ValueError:  # it may be a value that somebody has put there: it is not repeated
                raise InvalidRequest.of(
                    option, f"{name}: is not a secret", allowed="K=NAME or K=NAME@VERSION"
                ) from None
            found[name] = SecretRef(secret, version, file)
    return found
