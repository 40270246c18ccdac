"""What the cases for the Python clients share: one sandbox for each file, sync or async."""

import asyncio
import os
from contextlib import contextmanager
from importlib.metadata import version

import e2b
from runner import Skipped, at_end

GENERATION = tuple(int(part) for part in version("e2b").split(".")[:2])
LIFE_S = 1800
_made: dict[str, object] = {}


def sandbox() -> e2b.Sandbox:
    if "sync" not in _made:
        _made["sync"] = e2b.Sandbox.create(timeout=LIFE_S)
        at_end.append(_made["sync"].kill)
    return _made["sync"]


async def async_sandbox() -> e2b.AsyncSandbox:
    if "async" not in _made:
        _made["async"] = await e2b.AsyncSandbox.create(timeout=LIFE_S)
        at_end.append(_made["async"].kill)
    return _made["async"]


def since(*generation: int) -> None:
    """Skip the case with a client older than this."""
    if generation > GENERATION:
        raise Skipped(f"e2b {'.'.join(map(str, GENERATION))} does not have it")


@contextmanager
def raises(kind: type[BaseException], text: str = ""):
    """As pytest's, which is not installed beside the client."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        assert text in str(error), f"{error!r} does not say {text!r}"
        caught.error = error
        return
    raise AssertionError(f"{kind.__name__} was not raised")


class Caught:
    error = None


def within(seconds: float = 30):
    return asyncio.timeout(seconds)


def client() -> str:
    return os.environ["SKERRY_COMPAT_CLIENT"]
