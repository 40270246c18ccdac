"""How the node reaches the agents inside its guests. A seam, so that tests can stand in for a guest."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol

from skerry.core.errors import SkerryError
from skerry.core.models import Identity
from skerry.node.contract import Guest
from skerry.node.net.rules import GUEST_ADDRESS

AGENT_PORT: Final = 1024
KNOCK_TIMEOUT_S: Final = 0.25
"""A guest without a network yet does not answer at all, and the kernel would wait a second before it asks again."""
KNOCK_EVERY_S: Final = 0.02

OpenSocket = Callable[[], socket.socket]


class AgentLink(Guest, Protocol):
    """A guest and what only the node asks of it."""

    sandbox_id: str
    """Whose errors speak of it."""

    gone: Callable[[], SkerryError | None]
    """Once it returns an error, every new call raises that."""

    async def identify(self, identity: Identity) -> object:
        """Tell it who it is. OutcomeUnknown: it may have been told, and then takes no other word than the token's."""
        ...

    async def freeze(self, *, sync: bool) -> bool:
        """Let all commands stand still until `thaw` or the next identity. False where some could not be stopped."""
        ...

    async def thaw(self) -> None: ...

    def abort(self, error: SkerryError | None = None) -> None:
        """Break every connection: whoever waits on one gets `error`, at once."""
        ...


def end(link: AgentLink, error: SkerryError) -> None:
    """The sandbox is over: what is in flight fails at once with this error, and so does what comes later."""
    link.gone = lambda: error
    link.abort(error)


class Agents(Protocol):
    def link(self, sandbox_id: str, open_socket: OpenSocket, *, token: str | None, generation: int) -> AgentLink:
        """The link to a guest's agent. `token` None: the guest has not been told who it is."""
        ...

    async def reachable(self, open_socket: OpenSocket) -> None:
        """Ends when an agent listens."""
        ...


class GuestAgents:
    """The agents in our guests, over their taps."""

    def link(self, sandbox_id: str, open_socket: OpenSocket, *, token: str | None, generation: int) -> AgentLink:
        from skerry.node.guestlink import GuestLink

        return GuestLink(
            sandbox_id, open_socket, address=(GUEST_ADDRESS, AGENT_PORT), token=token, generation=generation
        )

    async def reachable(self, open_socket: OpenSocket) -> None:
        await knock(open_socket)


async def knock(open_socket: OpenSocket) -> None:
    """Connect until somebody listens at the agent's port, at the pace of a few tries a second."""
    loop = asyncio.get_running_loop()
    while True:
        with open_socket() as attempt:
            try:
                async with asyncio.timeout(KNOCK_TIMEOUT_S):
                    await loop.sock_connect(attempt, (GUEST_ADDRESS, AGENT_PORT))
                    return
            except (OSError, TimeoutError):
                pass
        await asyncio.sleep(KNOCK_EVERY_S)
