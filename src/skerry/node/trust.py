"""The certificates that this machine trusts beside the public ones, brought into guests: into their bundle, and the
variables by which programs find it that would else bring one of their own.

It is done where a guest boots from its template; clones have it in their memory's disk.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from skerry.core.errors import NotFound
from skerry.node.aio import log
from skerry.node.contract import Guest

BUNDLE: Final = "/etc/ssl/certs/ca-certificates.crt"
OWN: Final = "/usr/local/share/ca-certificates"
"""Where `update-ca-certificates` looks for what it has to add whenever it makes the bundle anew."""
VARIABLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "NPM_CONFIG_CAFILE",
    "CARGO_HTTP_CAINFO",
)


@dataclass(frozen=True, slots=True)
class Trust:
    certificates: tuple[bytes, ...] = ()
    """Each in PEM, without anything else that its file held."""

    @property
    def env(self) -> Mapping[str, str]:
        """For the commands of a guest; none where it has nothing to find but what its image came with."""
        return dict.fromkeys(VARIABLES, BUNDLE) if self.certificates else {}

    @property
    def key(self) -> str:
        """Differs where a guest would be furnished differently."""
        return hashlib.sha256(b"".join(self.certificates)).hexdigest() if self.certificates else ""


def load(directory: Path | None) -> Trust:
    """From the `.crt` files of a directory. Blocking. What cannot be read is left out, with a word in the log."""
    found: dict[bytes, None] = {}
    for path in sorted(directory.glob("**/*.crt")) if directory is not None else ():
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("a certificate is not brought into guests", file=str(path), error=str(error))
            continue
        found |= {certificate.public_bytes(Encoding.PEM): None for certificate in certificates}
    return Trust(tuple(found))


async def furnish(guest: Guest, trust: Trust) -> None:
    """Make a guest trust them. Nothing happens to one that does."""
    if not trust.certificates:
        return
    bundle = await _read(guest, BUNDLE)
    missing = [certificate for certificate in trust.certificates if certificate not in bundle]
    if not missing:
        return
    for number, certificate in enumerate(trust.certificates):
        await _write(guest, f"{OWN}/skerry-{number}.crt", certificate)
    if bundle and not bundle.endswith(b"\n"):
        bundle += b"\n"
    await _write(guest, BUNDLE, bundle + b"".join(missing))


async def _read(guest: Guest, path: str) -> bytes:
    """Empty where there is none."""
    try:
        download = await guest.read_file(path, user="root")
    except NotFound:
        return b""
    try:
        return b"".join([chunk async for chunk in download])
    finally:
        await download.aclose()


async def _write(guest: Guest, path: str, data: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data

    await guest.write_file(path, chunks(), user="root", mode=0o644, size=len(data))
