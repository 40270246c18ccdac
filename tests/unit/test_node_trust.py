"""Which of a machine's certificates guests are to trust."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from skerry.node.trust import BUNDLE, Trust, load


def certificate(name: str) -> tuple[bytes, bytes]:
    """A certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=1)
    made = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), now, end)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return pem, key.private_bytes(serialization.Encoding.PEM, *form)


def test_certificates_alone_are_taken_each_once(tmp_path: Path) -> None:
    one, key = certificate("one")
    two, _ = certificate("two")
    (tmp_path / "a.crt").write_bytes(b"a word of somebody's\n" + one + key)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.crt").write_bytes(two + one)
    (tmp_path / "c.crt").write_bytes(b"no certificate")
    (tmp_path / "d.txt").write_bytes(two)
    found = load(tmp_path)
    assert found.certificates == (one, two)
    assert set(found.env.values()) == {BUNDLE}
    assert {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT"} <= set(
        found.env
    )
    assert found.key not in {load(tmp_path / "deep").key, ""}


def test_without_any_guests_are_as_their_image(tmp_path: Path) -> None:
    assert load(None) == load(tmp_path) == load(tmp_path / "missing") == Trust()
    assert (Trust().env, Trust().key) == ({}, "")
