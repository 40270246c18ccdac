"""The firewall of a sandbox's namespace, as text for `nft -f -`. Pure."""

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Final

from skerry.core.policy import Ports

TAP: Final = "tap0"
HOST_ADDRESS: Final = "169.254.0.1"
GUEST_ADDRESS: Final = "169.254.0.2"
NETMASK: Final = "255.255.255.252"
GUEST_MAC: Final = "02:00:00:00:00:01"
HOST_MAC: Final = "02:00:00:00:00:fe"
"""The same at both ends of every sandbox, so that a clone finds the neighbours it knew."""

NAMED: Final = "198.18.0.0/15"
"""Where the addresses that stand for names are (see `egress.names`)."""
RELAY_PORT: Final = 15001
DNS_PORT: Final = 53
LISTED_MARK: Final = 1
REFUSED_GROUP: Final = 1
"""The netfilter log group that hears of refused packets."""
CONNECTIONS_MAX: Final = 4096
"""Connections and half-open ones of one guest that the kernel keeps track of."""


def ruleset(tap: str = TAP, guest: str = GUEST_ADDRESS) -> str:
    """What the guest may send: answers on connections that the host opened; questions to a resolver, whichever it asks;
    TCP to addresses that stand for names, and to those in the chain `listed`. All of these end at sockets of ours in
    this very namespace. Everything else is refused at once, so that clients do not wait, and logged.

    There is no way on: nothing is forwarded, and the namespace has no other link. The host opens connections to the
    guest's own address only. IPv6 does not exist in the namespace, and is dropped all the same. ARP is not IP and
    passes, which the guest needs to find the host.
    """
    return f"""\
table inet skerry {{
  chain listed {{
  }}
  set tracked {{
    type ipv4_addr
    size 2
    flags dynamic
  }}
  chain from_guest {{
    type filter hook prerouting priority mangle; policy drop;
    iifname "lo" accept
    iifname != "{tap}" drop
    ip saddr != {guest} drop
    meta nfproto ipv6 drop
    ct state established accept
    ct state invalid drop
    add @tracked {{ ip saddr ct count over {CONNECTIONS_MAX} }} drop
    udp dport {DNS_PORT} accept
    tcp dport {DNS_PORT} accept
    ip daddr {NAMED} meta l4proto tcp accept
    meta l4proto tcp jump listed
    limit rate 50/second burst 50 packets log group {REFUSED_GROUP} snaplen 64
    limit rate over 500/second drop
    meta l4proto tcp reject with tcp reset
    reject with icmp admin-prohibited
  }}
  chain to_us {{
    type nat hook prerouting priority dstnat; policy accept;
    udp dport {DNS_PORT} redirect to :{DNS_PORT}
    tcp dport {DNS_PORT} redirect to :{DNS_PORT}
    ip daddr {NAMED} meta l4proto tcp redirect to :{RELAY_PORT}
    meta mark {LISTED_MARK} meta l4proto tcp redirect to :{RELAY_PORT}
  }}
  chain through {{
    type filter hook forward priority filter; policy drop;
  }}
  chain to_guest {{
    type filter hook output priority filter; policy drop;
    oifname "lo" accept
    oifname "{tap}" ip daddr {guest} accept
  }}
}}
"""


def listing(addresses: Sequence[tuple[IPv4Network, Ports]]) -> str:
    """Commands that let TCP to just these through to the relay, in place of those before."""
    lines = ["flush chain inet skerry listed"]
    for network, ports in addresses:
        ranges = ", ".join(f"{low}-{high}" for low, high in ports)
        match = f"ip daddr {network} tcp dport {{ {ranges} }}"
        lines.append(f"add rule inet skerry listed {match} meta mark set {LISTED_MARK} accept")
    return "\n".join(lines) + "\n"
