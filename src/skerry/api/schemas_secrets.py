"""Shapes of secrets, as `schemas` has the others."""

from pydantic import Field

from skerry.api.schemas import Strict, View


class PutSecret(Strict):
    value: str = Field(description="Text of 8 bytes to 16 KiB without NUL. No answer ever holds it", repr=False)


class SecretView(View):
    id: str
    name: str
    version: int
    created_at: str
    updated_at: str


class SecretList(View):
    items: list[SecretView]


class SecretVersion(View):
    version: int
    created_at: str


class SecretVersions(SecretView):
    versions: list[SecretVersion]
