"""The authority and the certificate that `skerry domain` makes: real TLS between this process and itself."""

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skerry.cli.certificates import Files, make
from skerry.cli.settings import check_domain
from skerry.core.errors import InvalidRequest

NOW = datetime.now(UTC)


def handshake(files: Files, name: str) -> None:
    """As a client that trusts the authority and nothing else."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as line:
                line.recv(1)
        except OSError:
            return

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ssl.create_default_context(cafile=str(files.ca)).wrap_socket(ours, server_hostname=name):
            pass
    finally:
        ours.close()
        thread.join()


def test_names_below_the_domain_are_trusted_and_no_others(tmp_path: Path) -> None:
    files = make("boxes.test", tmp_path / "new", NOW)
    for name in ("boxes.test", "8000-sb0.boxes.test", "api.boxes.test"):
        handshake(files, name)
    for name in ("evil.test", "boxes.test.evil.test", "a.b.boxes.test"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(files, name)
    for key in (files.key, files.ca_key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_authority_cannot_speak_for_other_names(tmp_path: Path) -> None:
    """Even whoever has its key: the constraint is in the certificate that clients trust."""
    from skerry.cli import certificates

    files = make("boxes.test", tmp_path, NOW)
    authority, key = certificates._authority("boxes.test", files, NOW)
    certificates._leaf("bank.test", files, authority, key, NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        handshake(files, "bank.test")


def test_a_second_run_keeps_the_authority(tmp_path: Path) -> None:
    first = make("boxes.test", tmp_path, NOW)
    ca, cert = first.ca.read_bytes(), first.cert.read_bytes()
    make("boxes.test", tmp_path, NOW)
    assert first.ca.read_bytes() == ca
    assert first.cert.read_bytes() != cert
    handshake(first, "x.boxes.test")
    make("boxes.test", tmp_path, NOW + timedelta(days=3300))  # it would end before the new certificate
    assert first.ca.read_bytes() != ca


def test_another_domains_authority_is_not_replaced(tmp_path: Path) -> None:
    make("boxes.test", tmp_path, NOW)
    with pytest.raises(InvalidRequest, match="another --out"):
        make("other.test", tmp_path, NOW)
    (tmp_path / "ca.pem").write_text("nonsense")
    with pytest.raises(InvalidRequest, match="no certificate"):
        make("boxes.test", tmp_path, NOW)


@pytest.mark.parametrize("domain", ["", "a b", "-a.b", "a..b", "a.b:80", "*.a.b", "a" * 300, "a_b.c", "é.test"])
def test_what_is_no_domain_is_refused(domain: str) -> None:
    with pytest.raises(InvalidRequest):
        check_domain(domain)


def test_a_domain_needs_a_dot(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dot"):
        make("test", tmp_path, NOW)
