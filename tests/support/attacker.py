"""Attacks on a sandbox's walls. Runs inside the guest, as root, and needs nothing but Python.

    python3 attacker.py NAME JSON-ARGUMENTS

calls the function of that name and prints what it returns, as JSON. Frames leave as they are written here: neither the
guest's kernel nor its configuration has a say in them.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

MARKER = b"skerry-got-out"
HOST_MAC, GUEST_MAC = bytes.fromhex("0200000000fe"), bytes.fromhex("020000000001")
BROADCAST, FOREIGN_MAC = b"\xff" * 6, bytes.fromhex("020000000066")
HOST, GUEST = "169.254.0.1", "169.254.0.2"
IPV4, ARP, IPV6 = 0x0800, 0x0806, 0x86DD
QUESTION = b"\x12\x34\1\0\0\1\0\0\0\0\0\0\7allowed\4test\0\0\1\0\1"


def reach(targets: Sequence[tuple[str, int]]) -> list[str]:
    """How attempts by TCP and by UDP end."""
    return [attempt(host, port) for host, port in targets for attempt in (tcp, udp)]


def tcp(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), 3) as s:
            s.sendall(MARKER)
    except OSError as error:
        return type(error).__name__
    return "connected"


def udp(host: str, port: int) -> str:
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        try:
            s.connect((host, port))
            s.send(MARKER)
            s.recv(100)
        except OSError as error:
            return type(error).__name__
    return "answered"


def ipv6() -> dict[str, object]:
    """With addresses of its own, and with a ping to everybody on the line that its kernel knows nothing of."""
    os.system("sysctl -qw net.ipv6.conf.all.disable_ipv6=0; ip -6 addr add fd00::2/64 dev eth0 2>/dev/null")
    attempts = [tcp(host, 80) for host in ("fd00::1", "fe80::1%eth0", "2001:db8::1")]
    line = Line()
    source, everybody = (socket.inet_pton(socket.AF_INET6, a) for a in ("fe80::1", "ff02::1"))
    ping = struct.pack("!BBHHH", 128, 0, 0, 1, 1)
    packet = struct.pack("!IHBB", 0x60000000, len(ping), 58, 255) + source + everybody + ping
    line.send(IPV6, packet, to=b"\x33\x33\0\0\0\1", times=5)
    answers = line.heard(2, lambda frame: frame[12:14] == struct.pack("!H", IPV6) and frame[6:12] != GUEST_MAC)
    return {"attempts": attempts, "answers": answers}


def protocols(addresses: Sequence[str]) -> int:
    """Echo requests, tunnels and protocols that few know; how many echoes came back."""
    line = Line()
    echo = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + MARKER
    echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
    for target in addresses:
        inner = ip("127.0.0.1", target, 17, datagram(53, MARKER))
        for protocol, payload in (
            (1, echo),
            (4, inner),
            (41, MARKER),
            (47, inner),
            (50, MARKER),
            (132, MARKER),
            (255, MARKER),
        ):
            line.send(IPV4, ip(GUEST, target, protocol, payload))
    return line.heard(2, lambda frame: frame[12:14] == struct.pack("!H", IPV4) and frame[23] == 1 and frame[34] == 0)


def foreign_sources(sources: Sequence[str]) -> list[int]:
    """How many answers the resolver gives to each of these."""
    line, answered = Line(), []
    for source in sources:
        line.send(IPV4, ip(source, HOST, 17, datagram(53, QUESTION)))
        answered.append(line.heard(2, lambda frame: b"\7allowed" in frame and frame[6:12] == HOST_MAC))
    return answered


def odd_frames() -> None:
    """ARP that claims everybody's address, VLANs, foreign kinds, broken headers, a DHCP client."""
    line = Line()
    for sender in (HOST, GUEST, "169.254.0.9", "10.0.0.1"):
        for operation in (1, 2):
            claim = struct.pack("!HHBBH", 1, IPV4, 6, 4, operation) + FOREIGN_MAC + socket.inet_aton(sender)
            line.send(ARP, claim + BROADCAST + socket.inet_aton(HOST), to=BROADCAST, source=FOREIGN_MAC, times=50)
    packet = ip(GUEST, HOST, 17, datagram(53, MARKER))
    for kind in (0x8100, 0x88A8, 0x888E, 0x88CC, 0x8863, 0x0842, 5):
        line.send(kind, struct.pack("!HH", 1, IPV4) + packet, to=BROADCAST, times=20)
    for broken in (b"", b"E" * 10, b"\x4f" + bytes(1400)):
        line.send(IPV4, broken, times=20)
    discover = ip("0.0.0.0", "255.255.255.255", 17, datagram(67, b"\1\1\6" + bytes(240)))
    line.send(IPV4, discover, to=BROADCAST, times=5)


def flood(seconds: float) -> int:
    """Datagrams to everywhere and halves of connections to names, as fast as it goes; how many."""
    line, sent, end = Line(), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        port, sent = 1024 + sent % 60_000, sent + 1
        line.send(IPV4, ip(GUEST, f"10.0.{sent % 250}.1", 17, datagram(port, MARKER)))
        syn = struct.pack("!HHIIBBHHH", port, 443, sent, 0, 80, 2, 1000, 0, 0)
        line.send(IPV4, ip(GUEST, f"198.18.{sent % 250}.{sent % 250}", 6, syn))
    return sent


def agent() -> list[int]:
    """How many bytes the guest's own agent says to somebody in the guest."""
    said = []
    for host in ("127.0.0.1", GUEST):
        try:
            with socket.create_connection((host, 1024), 3) as s:
                s.sendall(b"\0\0\0\2\1{}")
                said.append(len(s.recv(100)))
        except OSError:
            said.append(0)
    return said


# ----------------------------------------------------------------------------------------------------------- the wire


class Line:
    """The sandbox's network card, below everything."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind(("eth0", 0))
        self._socket.settimeout(0.5)

    def send(
        self, kind: int, payload: bytes, *, to: bytes = HOST_MAC, source: bytes = GUEST_MAC, times: int = 1
    ) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError):  # its queue is full, or the frame too short for the kernel's taste
                self._socket.send(to + source + struct.pack("!H", kind) + payload)

    def heard(self, seconds: float, wanted: Callable[[bytes], bool]) -> int:
        """How many such frames come."""
        end, found = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                found += wanted(self._socket.recv(2048))
        return found


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(source: str, target: str, protocol: int, payload: bytes) -> bytes:
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 7, 0, 64, protocol, 0) + addresses
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def datagram(port: int, payload: bytes) -> bytes:
    return struct.pack("!HHHH", 4444, port, 8 + len(payload), 0) + payload


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
