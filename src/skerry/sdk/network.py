"""What may leave a sandbox: its own rules, within the policy of its project (`client.egress`)."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, TypedDict

from skerry.core.errors import InvalidRequest
from skerry.sdk.client import Call, Connection, pages, segment
from skerry.sdk.io import AsyncStream
from skerry.sdk.models import NetworkChange, NetworkEvent, NetworkInForce, parse


class NetworkOptions(TypedDict, total=False):
    """A sandbox's own say. It can only narrow what its project and its template allow."""

    mode: Literal["allow", "open"]
    """"open": whatever is allowed around it, but for `deny`. By default "allow" where `allow` is given, else "open"."""
    allow: Sequence[str]
    """These alone: "pypi.example", "*.example.com:443", "192.0.2.0/24:5432". Empty: nothing."""
    deny: Sequence[str]


Network = NetworkOptions | bool
"""False: nothing leaves it. True: whatever is allowed around it."""


def network_body(network: Network | None) -> dict[str, Any] | None:
    """As the server takes it."""
    if network is None:
        return None
    if isinstance(network, bool):
        return {"mode": "open"} if network else {"allow": []}
    unknown = set(network) - set(NetworkOptions.__annotations__)
    if unknown:
        name = sorted(unknown)[0]
        raise InvalidRequest.of("network", "has no such field", given=name, allowed="mode, allow, deny")
    return {name: value if isinstance(value, str) else list(value) for name, value in network.items()}  # type: ignore[arg-type]


class AsyncNetwork:
    """What may leave a sandbox."""

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._path = f"/v1/sandboxes/{segment(sandbox_id)}/network"
        self._about = {"sandbox_id": sandbox_id}

    async def get(self) -> NetworkInForce:
        """Its own rules, and all layers that hold for it."""
        call = Call("GET", self._path, again=True, about=self._about)
        return parse(NetworkInForce, await self._connection.send(call))

    async def update(self, network: Network) -> NetworkChange:
        """Its own rules from now on, in place of those before; connections that they forbid are cut.

        Raises InvalidRequest with the code `beyond_policy` for an entry of `allow` that its project never allows.
        """
        call = Call("PUT", self._path, json=network_body(network), again=True, about=self._about)
        return parse(NetworkChange, await self._connection.send(call))

    def events(self, *, refused: bool = False) -> AsyncStream[NetworkEvent]:
        """What it looked up and connected to, oldest first. `refused`: only what was not allowed."""
        query = {"refused": refused, "limit": 1000}

        async def found() -> AsyncGenerator[NetworkEvent, None]:
            async for item in pages(self._connection, f"{self._path}/events", query):
                yield parse(NetworkEvent, item)

        return AsyncStream(found())
