"""Package managers and git in a real sandbox, through the wall, to registries of the test's own behind a private CA."""

import base64
import datetime
import functools
import hashlib
import http.server
import io
import json
import ssl
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from skerry import Client, Sandbox
from skerry.sdk import NetworkEvent
from support.server import Server
from support.waiting import wait_until

HOST = "registry.test"
PATIENCE = 300
"""Seconds for one command: package managers take their time in an emulated guest on a busy machine."""


def authority(folder: Path) -> Path:
    """A CA's certificate in `folder`/trust, and beside that a server's certificate for `HOST` with its key."""
    now = datetime.datetime.now(datetime.UTC)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, issuer: str, *, ca: bool) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now - datetime.timedelta(days=1),
            now + datetime.timedelta(days=2),
        ).add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        # What strict clients want to see.
        use = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        made = made.add_extension(use, critical=True).add_extension(signer, critical=False)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        names = x509.SubjectAlternativeName([x509.DNSName(HOST)])
        return made if ca else made.add_extension(names, critical=False)

    root = certificate("the test's own CA", ca_key, "the test's own CA", ca=True).sign(ca_key, hashes.SHA256())
    leaf = certificate(HOST, key, "the test's own CA", ca=False).sign(ca_key, hashes.SHA256())
    (folder / "trust").mkdir()
    (folder / "trust/own.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pair = leaf.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)
    (folder / "server.pem").write_bytes(pair)
    return folder / "server.pem"


def wheel(site: Path) -> None:
    """An index of one package: `six`."""
    folder = site / "simple/six"
    folder.mkdir(parents=True)
    name = "six-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("six.py", "OURS = True\n")
        archive.writestr("six-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: six\nVersion: 1.0\n")
        archive.writestr("six-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("six-1.0.dist-info/RECORD", "six.py,,\n")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')


def module(site: Path) -> None:
    """A registry of one package: `is-number`."""
    told = {"name": "is-number", "version": "1.0.0", "main": "index.js"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (("package.json", json.dumps(told)), ("index.js", "module.exports = 'ours'\n")):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (site / "is-number-1.0.0.tgz").write_bytes(packed.getvalue())
    digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    dist = {"tarball": f"https://{HOST}/is-number-1.0.0.tgz", "integrity": f"sha512-{digest}"}
    document = {"name": "is-number", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {**told, "dist": dist}}}
    (site / "is-number").write_text(json.dumps(document))


def repositories(site: Path) -> None:
    """A flat one for apt, and a bare one for git."""
    (site / "apt").mkdir()
    (site / "apt/Packages").write_text("Package: ours\nVersion: 1\nArchitecture: all\nFilename: x\n\n")
    work = site.parent / "work"
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.com", "-C", str(work)]
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    (work / "README").write_text("ours\n")
    subprocess.run([*git, "add", "README"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(site / "repo.git")], check=True)
    subprocess.run(["git", "-C", str(site / "repo.git"), "update-server-info"], check=True)


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """In a project whose rules let it reach the test's registries alone."""
    folder = tmp_path_factory.mktemp("real-use")
    site = folder / "site"
    site.mkdir()
    for make in (wheel, module, repositories):
        make(site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as web:
        web.socket = context.wrap_socket(web.socket, server_side=True)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        port = web.server_address[1]
        settings = {
            "SKERRY_TRUST_DIR": str(folder / "trust"),
            "SKERRY_EGRESS_ALLOW": f"{HOST}:443 -> 127.0.0.1:{port}",
            "SKERRY_POOL_CEILING": "0",
        }
        server = Server(folder / "data", **settings).start()
        try:
            with Client(**server.client) as client, Sandbox.create(timeout=3600, client=client) as sandbox:
                yield sandbox
        finally:
            server.finish()
            web.shutdown()


def run(sandbox: Sandbox, command: str) -> str:
    done = sandbox.run(f"{command} 2>&1", timeout=PATIENCE)
    assert done.exit_code == 0, done.stdout
    return done.stdout


def test_pip_installs(sandbox: Sandbox) -> None:
    run(sandbox, f"pip install --no-cache-dir --index-url https://{HOST}/simple/ six")
    assert run(sandbox, "python3 -c 'import six; print(six.OURS)'") == "True\n"


def test_npm_installs(sandbox: Sandbox) -> None:
    run(sandbox, f"mkdir -p ~/n && cd ~/n && npm install --no-audit --registry https://{HOST}/ is-number")
    assert run(sandbox, "cd ~/n && node -p \"require('is-number')\"") == "ours\n"


def test_apt_updates(sandbox: Sandbox) -> None:
    line = f"deb [trusted=yes] https://{HOST}/apt ./"
    run(sandbox, f"echo '{line}' | sudo tee /etc/apt/sources.list && sudo apt-get update")
    assert "Version: 1" in run(sandbox, "apt-cache show ours")


def test_git_clones(sandbox: Sandbox) -> None:
    run(sandbox, f"git clone -q https://{HOST}/repo.git ~/repo")
    assert run(sandbox, "cat ~/repo/README") == "ours\n"


def test_programs_that_bring_their_own_certificates_trust_it_too(sandbox: Sandbox) -> None:
    assert "is-number" in run(sandbox, f"curl -sS https://{HOST}/is-number")
    fetch = f"import urllib.request; print(urllib.request.urlopen('https://{HOST}/apt/').status)"
    assert run(sandbox, f'python3 -c "{fetch}"') == "200\n"
    assert run(sandbox, f"node -e \"fetch('https://{HOST}/apt/').then(r => console.log(r.status))\"") == "200\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("curl -sS https://evil.test/", "Could not resolve host: evil.test"),
        ("pip download --no-cache-dir --retries 0 --index-url https://evil.test/simple/ seven", "seven"),
        ("git clone https://evil.test/repo.git /tmp/repo", "Could not resolve host: evil.test"),
        ("npm view --fetch-retries 0 --registry https://evil.test/ is-number", "ENOTFOUND"),
    ],
)
def test_what_is_not_on_the_list_fails_at_once_and_is_recorded(sandbox: Sandbox, command: str, said: str) -> None:
    done = sandbox.run(f"{command} 2>&1", timeout=PATIENCE)
    assert done.exit_code != 0
    assert said in done.stdout

    def recorded() -> list[NetworkEvent]:
        return [event for event in sandbox.network.events(refused=True) if event.name == "evil.test"]

    wait_until(recorded, 20)
    assert recorded()[0].rule == "project: no rule allows it"
