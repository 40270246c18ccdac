"""Reading a request's fields, each checked: a host that says nonsense is told so and harms nothing."""

from typing import Any

from skerry.guest.errors import GuestError
from skerry.guest.protocol import MAX_INT


def _bad(name: str, wanted: str) -> GuestError:
    return GuestError("InvalidRequest", "invalid_request", f"{name} must be {wanted}", field=name)


def text(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise _bad(name, "a text")
    return value


def opt_text(request: dict[str, Any], name: str) -> str | None:
    return None if request.get(name) is None else text(request, name)


def integer(request: dict[str, Any], name: str, low: int = 0, high: int = MAX_INT) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"a whole number from {low} to {high}")
    return value


def opt_integer(request: dict[str, Any], name: str, low: int = 0, high: int = MAX_INT) -> int | None:
    return None if request.get(name) is None else integer(request, name, low, high)


def flag(request: dict[str, Any], name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise _bad(name, "true or false")
    return value


def texts(request: dict[str, Any], name: str) -> list[str]:
    value = request.get(name)
    if not isinstance(value, list) or not all(isinstance(v, str) and "\0" not in v for v in value):
        raise _bad(name, "a list of texts without NUL")
    return value


def table(request: dict[str, Any], name: str) -> dict[str, str]:
    """Environment variables: names without `=`, no NUL anywhere. Errors name the key and never the value."""
    value = request.get(name, {})
    if not isinstance(value, dict):
        raise _bad(name, "an object of texts")
    for key, item in value.items():
        if not key or "=" in key or "\0" in key:
            raise _bad(f"{name}.{key[:40]!r}", "a variable name")
        if not isinstance(item, str) or "\0" in item:
            raise _bad(f"{name}.{key[:40]}", "a text without NUL")
    return value
