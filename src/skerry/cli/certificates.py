"""A certificate authority for development, and a certificate of it for every name below a domain."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.cli.serve import keep_private, prepare
from skerry.core.errors import Forbidden, InvalidRequest

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 397
"""No longer: some clients refuse certificates that are good for longer than that."""
SLACK: Final = datetime.timedelta(hours=1)
"""A clock that is a little behind is to believe it, too."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where they are: what clients are to trust, and what the server takes. Keys are readable by their owner only."""

    ca: Path
    ca_key: Path
    cert: Path
    key: Path

    @classmethod
    def of(cls, folder: Path) -> "Files":
        return cls(*(folder / name for name in ("ca.pem", "ca-key.pem", "cert.pem", "key.pem")))


def make(domain: str, folder: Path, now: datetime.datetime) -> Files:
    """A certificate for `domain` and `*.domain`, made anew. The domain's authority is kept if it is there.

    The authority can certify nothing but names of this domain: who trusts it risks no others. Raises InvalidRequest,
    Forbidden `permission_denied`.
    """
    if "." not in domain:
        raise InvalidRequest.of("DOMAIN", "needs a dot: clients refuse *.NAME", given=domain, allowed="NAME.NAME")
    files = Files.of(folder)
    prepare(folder)
    try:
        authority, key = _authority(domain, files, now)
        _leaf(domain, files, authority, key, now)
    except OSError as error:
        raise Forbidden(f"cannot write to {folder}: {error.strerror}", code="permission_denied") from error
    return files


def _authority(
    domain: str, files: Files, now: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if files.ca.exists() and files.ca_key.exists():
        try:
            found = x509.load_pem_x509_certificate(files.ca.read_bytes())
            key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
        except ValueError as error:
            raise InvalidRequest(f"{files.ca} or its key is no certificate: {error}", code="invalid_settings") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or found.subject != _name(domain):
            raise InvalidRequest(
                f"{files.ca} is not the authority of {domain}: choose another --out", code="invalid_settings"
            )
        if found.not_valid_after_utc > now + datetime.timedelta(days=LEAF_DAYS):
            return found, key
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(_name(domain), _name(domain), key, now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(domain)], None), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(files.ca_key, key)
    files.ca.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return made, key


def _leaf(
    domain: str, files: Files, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, now: datetime.datetime
) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain[:64])])
    names = x509.SubjectAlternativeName([x509.DNSName(domain), x509.DNSName(f"*.{domain}")])
    made = (
        _builder(subject, authority.subject, own, now, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(files.key, own)
    files.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))


def _name(domain: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Skerry development"),
            x509.NameAttribute(NameOID.COMMON_NAME, domain[:64]),
        ]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    keep_private(path)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
