"""Connections to ports inside a sandbox: who may have one, and that the sandbox counts as used while one is open.

They are traffic, not acts: the audit record says who resumed a sandbox by one, and nothing of each connection.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from skerry.control.access import Access
from skerry.control.config import ControlConfig
from skerry.control.live import Live, LiveSandboxes
from skerry.control.principal import Principal, Scope
from skerry.control.tokens import SandboxTokens
from skerry.core.errors import Forbidden, InvalidRequest, LimitExceeded, SkerryError
from skerry.core.lifecycle import FINAL, gone
from skerry.core.models import Sandbox
from skerry.node.contract import Connection
from skerry.store import not_found

PORT_MAX: Final = 65535
OPEN_MAX: Final = 512
"""Connections to one sandbox's ports. Its agent takes twice as many; the rest is for its owner's commands."""


@dataclass(frozen=True, slots=True)
class PortAddresses:
    url: str
    """By name; `{port}` stands for the port."""
    public: bool
    token: str = field(repr=False)
    """The traffic token."""


class PortConnection:
    """A `contract.Connection` that keeps its sandbox from being idle until it is closed. Closing twice is no error."""

    def __init__(self, source: Connection, live: Live, access: Access, closed: Callable[[], None]) -> None:
        self._source = source
        self._live = live
        self._access = access
        self._closed = closed
        self._held = True

    @property
    def sandbox(self) -> Sandbox:
        return self._live.record

    async def read(self, limit: int = 262_144) -> bytes:
        """Up to `limit` bytes as they come; b"" where the guest has ended its side in order. A broken line raises, and
        Gone or Conflict `sandbox_paused` say why."""
        try:
            return await self._source.read(limit)
        except SkerryError as error:
            raise await self._access.explain(self._live, error) from error

    async def write(self, data: bytes) -> None:
        """Returns when the line has taken all of it."""
        try:
            await self._source.write(data)
        except SkerryError as error:
            raise await self._access.explain(self._live, error) from error

    async def write_eof(self) -> None:
        """Our side is over; the guest's goes on."""
        try:
            await self._source.write_eof()
        except SkerryError as error:
            raise await self._access.explain(self._live, error) from error

    async def aclose(self) -> None:
        try:
            await self._source.aclose()
        finally:
            if self._held:
                self._held = False
                self._closed()


class Ports:
    def __init__(self, access: Access, tokens: SandboxTokens, live: LiveSandboxes, config: ControlConfig) -> None:
        self._access = access
        self._url = config.port_url
        self._tokens = tokens
        self._live = live
        self._open: Counter[str] = Counter()

    async def addresses(self, principal: Principal, sandbox_id: str) -> PortAddresses:
        """Where its ports are. Raises Forbidden without the right to use it, NotFound, Gone."""
        principal.require(Scope.USE)
        record = await self._access.record(principal, sandbox_id)
        if record.state in FINAL:
            raise gone(sandbox_id, record.end_reason)
        url = self._url.replace("{id}", sandbox_id)
        return PortAddresses(url, public=record.spec.public_ports, token=self._tokens.traffic(sandbox_id))

    async def connect(self, principal: Principal, sandbox_id: str, port: int) -> PortConnection:
        """A connection to what listens on this TCP port inside, on the loopback or the sandbox's address.

        One that rests is resumed if it has `auto_resume`, and the caller waits. Raises InvalidRequest, Forbidden,
        NotFound, Gone, Conflict `port_not_open`, `sandbox_paused` or `sandbox_state`, LimitExceeded
        `too_many_connections`, GuestUnreachable.
        """
        if not 1 <= port <= PORT_MAX:
            raise InvalidRequest.of("port", "must be from 1 to 65535", given=port, allowed="1..65535")
        entry = await self._access.enter(principal, sandbox_id)
        try:
            self._count(sandbox_id)
        except SkerryError:
            self._access.leave(entry.live)
            raise

        def closed() -> None:
            self._open[sandbox_id] -= 1
            if not self._open[sandbox_id]:
                del self._open[sandbox_id]
            self._access.leave(entry.live)

        try:
            async with self._access.answered(entry.live):
                source = await entry.guest.connect(port)
        except BaseException:
            closed()
            raise
        return PortConnection(source, entry.live, self._access, closed)

    def _count(self, sandbox_id: str) -> None:
        if self._open[sandbox_id] >= OPEN_MAX:
            raise LimitExceeded(
                f"{OPEN_MAX} connections to this sandbox's ports are open: no room for another",
                code="too_many_connections",
                retry="safe",
                retry_after=1,
                limit=OPEN_MAX,
            )
        self._open[sandbox_id] += 1

    async def visit(
        self, sandbox_id: str, port: int, token: str | None, *, token_needed: bool = False
    ) -> PortConnection:
        """As `connect`, for somebody without a key: the ports are public, or `token` is the traffic token.

        `token_needed`: as if they were not public. Raises Forbidden `traffic_token_missing` or `traffic_token_wrong`,
        and NotFound also for one that is over.
        """
        live = self._live.get(sandbox_id)
        if live is None:
            raise not_found(sandbox_id)
        if token_needed or not live.record.spec.public_ports:
            self._check(sandbox_id, token)
        return await self.connect(self._tokens.visitor_of(live.record), sandbox_id, port)

    def _check(self, sandbox_id: str, token: str | None) -> None:
        if token is None:
            raise Forbidden(
                "a traffic token is needed to reach this sandbox's ports",
                code="traffic_token_missing",
                sandbox_id=sandbox_id,
            )
        if not self._tokens.opens_ports(sandbox_id, token):
            raise Forbidden(
                "that is not the sandbox's traffic token", code="traffic_token_wrong", sandbox_id=sandbox_id
            )
