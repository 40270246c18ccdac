"""What the firewall of a sandbox refused, as the kernel tells it: netfilter's log, over netlink.

Source: linux/netfilter/nfnetlink_log.h. Only what is needed of it; the kernel is trusted, the packets in it are not.
"""

import socket
import struct
from ipaddress import IPv4Address
from typing import Final, NamedTuple

NETLINK_NETFILTER: Final = 12
_SUBSYSTEM: Final = 4 << 8  # NFNL_SUBSYS_ULOG
_PACKET, _CONFIG = _SUBSYSTEM, _SUBSYSTEM | 1
_REQUEST, _ACK = 1, 4
_ATTRIBUTE_COMMAND, _ATTRIBUTE_MODE = 1, 2
_BIND, _COPY_PACKET = 1, 2
_PAYLOAD: Final = 9
_HEADER: Final = struct.Struct("=IHHII")
_FAMILY: Final = struct.Struct("!BBH")
_ERROR: Final = 2
READ_BYTES: Final = 65_536

PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 132: "sctp", 47: "gre", 41: "ipv6"}


class Refused(NamedTuple):
    protocol: str
    address: str
    port: int | None


def _attribute(kind: int, body: bytes) -> bytes:
    return (struct.pack("=HH", 4 + len(body), kind) + body).ljust((4 + len(body) + 3) & ~3, b"\0")


def _config(group: int, attributes: bytes) -> bytes:
    body = _FAMILY.pack(socket.AF_INET, 0, group) + attributes
    return _HEADER.pack(_HEADER.size + len(body), _CONFIG, _REQUEST | _ACK, 0, 0) + body


def listen(sock: socket.socket, group: int, copied: int) -> None:
    """Let a netlink socket (of the namespace it was made in) hear of `group`. Raises OSError."""
    sock.bind((0, 0))
    for attributes in (
        _attribute(_ATTRIBUTE_COMMAND, bytes([_BIND])),
        _attribute(_ATTRIBUTE_MODE, struct.pack("!IBB", copied, _COPY_PACKET, 0)),
    ):
        sock.send(_config(group, attributes))
        answer = sock.recv(READ_BYTES)
        kind, code = struct.unpack_from("=4xH10xi", answer)
        if kind == _ERROR and code != 0:
            raise OSError(-code, "the kernel does not log refused packets here")


def parse(data: bytes) -> list[Refused]:
    """The packets in what was read from such a socket."""
    found: list[Refused] = []
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            break
        if kind == _PACKET:
            packet = _payload(data[at + _HEADER.size + _FAMILY.size : at + size])
            refused = _packet(packet) if packet is not None else None
            if refused is not None:
                found.append(refused)
        at += (size + 3) & ~3
    return found


def _payload(attributes: bytes) -> bytes | None:
    at = 0
    while at + 4 <= len(attributes):
        size, kind = struct.unpack_from("=HH", attributes, at)
        if size < 4:
            return None
        if kind & 0x3FFF == _PAYLOAD:
            return attributes[at + 4 : at + size]
        at += (size + 3) & ~3
    return None


def _packet(packet: bytes) -> Refused | None:
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    number = packet[9]
    port: int | None = None
    head = (packet[0] & 15) * 4
    if number in {6, 17, 132} and len(packet) >= head + 4:
        port = int.from_bytes(packet[head + 2 : head + 4], "big")
    return Refused(PROTOCOLS.get(number, str(number)), str(IPv4Address(packet[16:20])), port)
