"""One address for each name that was looked up: what makes a connection's destination a name again."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from typing import Final

NETWORK: Final = IPv4Network("198.18.0.0/15")
"""Set apart for benchmarks of networks (RFC 2544): no host of anybody has an address in it."""
FIRST: Final = 256
"""The addresses before are left alone."""
NAMES_MAX: Final = 65_536


class NameTable:
    """Names in the order in which they were first looked up; a name's place is its address.

    The order is all there is to keep: a clone or a restored sandbox that begins with its origin's names finds every
    address that its programs remember to mean what it meant.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        for name in names:
            self.address(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def address(self, name: str) -> IPv4Address | None:
        """The name's address, given now if it has none. None where the table is full."""
        place = self._places.get(name)
        if place is None:
            if len(self._names) >= NAMES_MAX:
                return None
            place = len(self._names)
            self._names.append(name)
            self._places[name] = place
        return NETWORK[FIRST + place]

    def name(self, address: IPv4Address) -> str | None:
        """The name that the address was given to."""
        if address not in NETWORK:
            return None
        place = int(address) - int(NETWORK.network_address) - FIRST
        return self._names[place] if 0 <= place < len(self._names) else None
