"""Environments: texts, and references to secrets that the server puts in their place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SecretRef:
    """A secret of the project where a variable's text would stand. It holds no value."""

    name: str
    version: int | None = None
    """None: the newest when the command starts."""
    file: bool = False
    """The variable tells where a file is that holds it."""


def secret(name: str, version: int | None = None, *, file: bool = False) -> SecretRef:
    """For `env`: the variable gets the secret's value when a command starts, which nobody need know.

    `file=True`: the variable gets the path of a file that holds it: in memory only, readable for the command's user
    alone, gone when the command ends.
    """
    return SecretRef(name, version, file)


Env = Mapping[str, str | SecretRef]
"""Variables of a command or a sandbox."""


def env_body(env: Env) -> dict[str, Any]:
    """As requests have it."""
    return {name: value if isinstance(value, str) else _body(value) for name, value in env.items()}


def _body(value: Any) -> Any:
    if not isinstance(value, SecretRef):
        return value  # the server says what is wrong with it
    body: dict[str, Any] = {"secret": value.name}
    if value.version is not None:
        body["version"] = value.version
    if value.file:
        body["file"] = True
    return body
