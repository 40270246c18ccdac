"""What E2B has and this server has not (yet): each such route says so, to a key that is good."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from skerry.api.v1.access import principal_of
from skerry.core.errors import NotSupported

Handler = Callable[[Request], Awaitable[Response]]


def absent(message: str) -> Handler:
    async def refuse(request: Request) -> Response:
        await principal_of(request)
        raise NotSupported(message)

    return refuse


builds = absent("templates cannot be built here yet: take a snapshot of a sandbox and use it as a template")
changes = absent("templates cannot be changed here")
secrets = absent("there are no secrets here yet")
volumes = absent("there are no volumes here yet")
