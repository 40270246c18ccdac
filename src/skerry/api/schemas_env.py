"""Environments: texts, and secrets that stand in for one."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from skerry.core.models import Bindings
from skerry.core.secrets import SECRET_NAME, VERSION_MAX, reference

TEXT: Final = "(text)"
REFERENCE: Final = "(reference)"
TAGS: Final = frozenset({TEXT, REFERENCE})
"""What pydantic puts into an error's location for the two kinds of a value."""


class SecretRef(BaseModel):
    """A secret of the project, in a variable's value or (`file`) in a file whose path is the variable's value."""

    model_config = ConfigDict(extra="forbid", strict=True)

    secret: str = Field(pattern=rf"^{SECRET_NAME.pattern}$", description="Its name")
    version: int | None = Field(
        default=None, ge=1, le=VERSION_MAX, description="null: the newest when the command starts"
    )
    file: bool = Field(default=False, description="In a file in memory, its user's alone, gone with the process")


def _kind(value: Any) -> str:
    return REFERENCE if isinstance(value, (Mapping, SecretRef)) else TEXT


Value = Annotated[Annotated[str, Tag(TEXT)] | Annotated[SecretRef, Tag(REFERENCE)], Discriminator(_kind)]
Env = dict[str, Value]


def parted(env: Mapping[str, str | SecretRef]) -> tuple[dict[str, str], Bindings]:
    """The texts, and what is bound."""
    texts = {name: value for name, value in env.items() if isinstance(value, str)}
    bound: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name, value in env.items():
        if not isinstance(value, str):
            bound[value.file][name] = reference(value.secret, value.version)
    return texts, Bindings(*bound)
