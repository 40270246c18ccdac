"""Which addresses on the Internet are public, whatever spelling they hide in. Pure."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

NAT64: Final = IPv6Network("64:ff9b::/96")
NAT64_LOCAL: Final = IPv6Network("64:ff9b:1::/48")
IPV4_COMPATIBLE: Final = IPv6Network("::/96")
ISATAP_MARKS: Final = (0x00005EFE, 0x02005EFE)
SITE_LOCAL: Final = IPv6Network("fec0::/10")


def embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one carries: mapped, compatible, NAT64, 6to4, Teredo (its client) or ISATAP."""
    if isinstance(address, IPv4Address):
        return None
    number = int(address)
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in NAT64 or (address in IPV4_COMPATIBLE and number > 1):
        return IPv4Address(number & 0xFFFFFFFF)
    if (number >> 32) & 0xFFFFFFFF in ISATAP_MARKS:
        return IPv4Address(number & 0xFFFFFFFF)
    return None


def is_public(address: Address) -> bool:
    """Whether it is a host on the public Internet: not loopback, link-local, private, shared, reserved, multicast or
    a cloud's metadata service, and, where it carries an IPv4 address, that one neither."""
    inner = embedded(address)
    if inner is not None and not is_public(inner):
        return False
    if isinstance(address, IPv6Address) and (address in SITE_LOCAL or address in NAT64_LOCAL):
        return False
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        # NAT64's and the mapped prefix count as reserved; what they carry was judged above.
        return inner is not None and not address.is_multicast
    return address.is_global


def parse_address(text: str) -> Address | None:
    """The address in its one standard spelling, brackets allowed around IPv6; None for anything else.

    Strict on purpose: what C libraries read as an address too (`0x7f.1`, `2130706433`, `010.0.0.1`) is none here, and
    is not a name either (see `policy.parse_name`).
    """
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        if ":" not in text:
            return None
    if "%" in text:
        return None  # a zone is about this machine
    try:
        return ip_address(text)
    except ValueError:
        return None
