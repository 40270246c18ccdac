"""Who calls, for which sandbox, and how: what the application has found out before a service is asked."""

import base64
import binascii
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers

from skerry.control import Principal, Services
from skerry.core.errors import SkerryError
from skerry.core.models import Sandbox

KEEPALIVE_S = 90.0
"""Idle seconds before a stream says that it lives, where the client does not say."""


@dataclass(slots=True)
class Call:
    """One authenticated request."""

    services: Services
    sandbox: Sandbox
    principal: Principal
    user: str | None
    """In whose name; None is the sandbox's default user."""
    keepalive_s: float = KEEPALIVE_S
    broken: SkerryError | None = None
    """Set where a stream cannot end in order: the connection is then cut, which is what clients look for."""

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.id


current: ContextVar[Call] = ContextVar("skerry_e2b_call")
"""The call that a Connect service is answering."""


class BadUserError(Exception):
    """The Authorization header names nobody."""


def user_of(headers: Headers) -> str | None:
    """The user of `Authorization: Basic base64("user:")`; None without one. Raises BadUserError."""
    value = headers.get("authorization")
    if value is None:
        return None
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return None  # not ours: the token that counts is in X-Access-Token
    try:
        said = base64.b64decode(rest.strip(), validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        raise BadUserError("the Authorization header is not of the form: Basic base64(user:)") from None
    return said.partition(":")[0] or None


def keepalive_of(headers: Headers) -> float:
    """What `Keepalive-Ping-Interval` says, in seconds; the default for what is not a positive whole number."""
    value = headers.get("keepalive-ping-interval", "")
    seconds = int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else 0
    return float(seconds) if seconds > 0 else KEEPALIVE_S
