"""Shapes of secrets, as `schemas` has the others."""

from typing import Literal

from pydantic import Field

from skerry.api.schemas import Strict, View
from skerry.core.secrets import SECRET_NAME, VERSION_MAX
from skerry.core.step_tokens import BUDGET_MAX


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


class MintStepToken(Strict):
    """What the token may be used for; all of it must fit."""

    secret: str = Field(pattern=rf"^{SECRET_NAME.pattern}$", description="The name of what it stands for")
    version: int | None = Field(default=None, ge=1, le=VERSION_MAX, description="null: the newest when it is used")
    host: str
    methods: list[Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]] = Field(min_length=1)
    path_prefix: str = Field(default="/", description="Whole segments")
    repository: str | None = Field(default=None, description="owner/name")
    budget: int = Field(default=100, ge=1, le=BUDGET_MAX, description="So many requests")
    step: str | None = Field(default=None, description="What its maker calls the step")


class RenewStepToken(Strict):
    token: str = Field(repr=False)


class StepTokenView(View):
    id: str
    secret: str
    step: str | None
    host: str
    methods: list[str]
    path_prefix: str
    repository: str | None
    budget: int
    left: int
    minted_at: str
    expires_at: str
    revoked: Literal["revoked", "host", "method", "path", "repository", "budget"] | None


class NewStepToken(StepTokenView):
    token: str = Field(description="Shown this once", repr=False)


class StepTokenList(View):
    items: list[StepTokenView]
