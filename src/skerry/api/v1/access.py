"""What every handler needs first: who asks, and the services to ask."""

from typing import cast

from starlette.requests import HTTPConnection

from skerry.api.observe import Metrics
from skerry.api.requests import key_of
from skerry.control import Principal, Services


def services_of(connection: HTTPConnection) -> Services:
    return cast("Services", connection.app.state.services)


def metrics_of(connection: HTTPConnection) -> Metrics:
    return cast("Metrics", connection.app.state.metrics)


async def principal_of(connection: HTTPConnection) -> Principal:
    """Who asks. Raises Unauthenticated `key_missing`, `key_unknown` or `key_revoked`."""
    return await services_of(connection).keys.authenticate(key_of(connection))
