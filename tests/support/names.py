"""Names of their own for processes that tests start: whatever is at or below a domain is this machine.

As dnsmasq or a wildcard record would do it, without a change to what the rest of the machine resolves: a process that
is started `within` has a mount namespace in which its resolver is ours.
"""

import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

_MOUNT = (
    'mount --bind "$0/resolv.conf" /etc/resolv.conf && mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf && exec "$@"'
)


class Names:
    def __init__(self, domain: str, directory: Path) -> None:
        """`directory`: where the files go that are mounted; it is made."""
        self._domain = dns.name.from_text(domain)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((f"127.83.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}", 53))
        self._directory = directory
        directory.mkdir()
        (directory / "resolv.conf").write_text(f"nameserver {self._socket.getsockname()[0]}\n")
        (directory / "nsswitch.conf").write_text("hosts: files dns\n")
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def within(self, argv: Sequence[str]) -> list[str]:
        """The command that runs this one with these names. It has the process id of the command that it runs."""
        return ["unshare", "--mount", "sh", "-c", _MOUNT, str(self._directory), *argv]

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        asked: Any = dns.message.from_wire(query)
        made: Any = dns.message.make_response(asked)
        (question,) = asked.question
        if not question.name.is_subdomain(self._domain):
            made.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == dns.rdatatype.A:
            made.answer.append(dns.rrset.from_text(question.name, 1, "IN", "A", "127.0.0.1"))
        return made.to_wire()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(30)
        self._socket.close()
