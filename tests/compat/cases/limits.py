"""What a server that is full says, as the Python client tells it. Each has a server of its own (test_field.py)."""

import e2b
from e2b import RateLimitException, Sandbox, SandboxException
from shared import raises, within

BUSY = getattr(e2b, "ServiceBusyException", SandboxException)


def test_too_many_is_a_rate_limit():
    box = Sandbox.create(timeout=60)
    try:
        with raises(RateLimitException, "may have 1"):
            Sandbox.create(timeout=60)
        with raises(RateLimitException, "no room for 2"):
            box.fork(count=2)
    finally:
        box.kill()
    Sandbox.create(timeout=60).kill()


async def test_no_room_is_a_busy_service():
    retries = {"retries": 0} if "retries" in e2b.ApiParams.__annotations__ else {}
    async with within(90):
        with raises(BUSY, "disk"):
            await e2b.AsyncSandbox.create(timeout=60, **retries)
