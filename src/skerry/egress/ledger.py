"""Every look-up and connection is told, and a flood of them costs a bounded amount: what is alike is counted.

The first of a kind within a window is told at once; those after it are counted and told together when the window ends.
Of kinds there are at most `KINDS_MAX` in a window, and in the long run `KINDS_A_SECOND`; the rest is counted too, in
one event without a name. So the counts are exact, whatever a sandbox does, and its record grows slowly.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from skerry.core.models import NetworkEvent
from skerry.egress.dns import Lookup
from skerry.egress.rate import Bucket
from skerry.egress.relay import Connection

WINDOW_S: Final = 1.0
KINDS_MAX: Final = 100
KINDS_A_SECOND: Final = 10.0
KINDS_AT_ONCE: Final = 500.0
REST: Final = "more than can be told one by one"


class Ledger:
    """Of one sandbox. Belongs to one event loop."""

    def __init__(self, sandbox_id: str, publish: Callable[[NetworkEvent], None]) -> None:
        self._sandbox_id = sandbox_id
        self._publish = publish
        self._seen: dict[Any, NetworkEvent] = {}
        """Of this window: what of each kind is still to be told (`count` 0: nothing)."""
        self._kinds = Bucket(KINDS_A_SECOND, KINDS_AT_ONCE)
        self._timer: asyncio.TimerHandle | None = None

    def look_up(self, found: Lookup) -> None:
        self._tell(
            self._event("look_up", found.verdict.allowed, found.verdict.rule, found.name, found.address, found.kind)
        )

    def connection(self, ended: Connection) -> None:
        event = self._event("connection", ended.verdict.allowed, ended.verdict.rule, ended.name, ended.address)
        self._tell(
            replace(
                event,
                port=ended.port,
                sent_bytes=ended.sent,
                received_bytes=ended.received,
                duration_ms=round(ended.duration_ms, 1),
                error=ended.error,
            )
        )

    def packet(self, protocol: str, address: str, port: int | None) -> None:
        event = self._event("packet", allowed=False, rule="no rule allows it", address=address)
        self._tell(replace(event, protocol=protocol, port=port))

    def close(self) -> None:
        """Tell what is left."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_window()

    def _event(
        self,
        kind: str,
        allowed: bool,  # noqa: FBT001
        rule: str,
        name: str | None = None,
        address: object = None,
        record: str | None = None,
    ) -> NetworkEvent:
        told = str(address) if address is not None else None
        return NetworkEvent(self._sandbox_id, datetime.now(UTC), kind, allowed, rule, name, told, record=record)

    def _tell(self, event: NetworkEvent) -> None:
        key = (event.kind, event.allowed, event.rule, event.name, event.address, event.port, event.record, event.error)
        known = self._seen.get(key)
        if known is None and (len(self._seen) >= KINDS_MAX or not self._kinds.take()):
            key = (event.kind, event.allowed)
            known = self._seen.get(key)
            if known is None:
                rest = NetworkEvent(self._sandbox_id, event.at, event.kind, event.allowed, REST, count=0)
                known = self._seen[key] = rest
        if known is None:
            self._seen[key] = replace(event, count=0, sent_bytes=0, received_bytes=0)
            self._publish(event)
        else:
            self._seen[key] = replace(
                known,
                count=known.count + 1,
                sent_bytes=known.sent_bytes + event.sent_bytes,
                received_bytes=known.received_bytes + event.received_bytes,
            )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._end_window)

    def _end_window(self) -> None:
        self._timer = None
        seen, self._seen = self._seen, {}
        for event in seen.values():
            if event.count:
                self._publish(event)
