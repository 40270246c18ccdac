"""`skerry domain`: what gives sandboxes names of their own under TLS while one develops."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from skerry.cli.output import JsonOption, write_json
from skerry.cli.serving import server_parts

Domain = Annotated[str, typer.Argument(metavar="DOMAIN", help="Such as boxes.test; ports get names below it.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to; by default tls in the server's data directory.")]
TlsPort = Annotated[int, typer.Option("--port", min=1, max=65535, help="The port that the server is to take for TLS.")]

_TEXT = """\
Made for {domain} and *.{domain}, good until {until}; run this again for a new one.

The server (environment, or /etc/skerry/skerry.toml without SKERRY_ and in small letters):
  export SKERRY_DOMAIN={address}
  export SKERRY_TLS_PORT={port}
  export SKERRY_TLS_CERT={cert}
  export SKERRY_TLS_KEY={key}

Clients have to find the names. With dnsmasq, all of them:
  address=/{domain}/127.0.0.1
or line by line in /etc/hosts, with one more for each sandbox's port:
  127.0.0.1 {domain} api.{domain} sandbox.{domain} 8000-SANDBOX.{domain}

Clients have to trust the authority, which can certify names of {domain} only:
  export SSL_CERT_FILE={ca}           # Python, curl, most others: instead of what they trust else
  export NODE_EXTRA_CA_CERTS={ca}     # Node: besides what it trusts else
  export E2B_DOMAIN={address}
"""


def domain(domain: Domain, out: Out = None, port: TlsPort = 443, as_json: JsonOption = False) -> None:
    """Make a certificate authority for development and a certificate for *.DOMAIN, and say what to set."""
    with server_parts():
        from skerry.cli.certificates import LEAF_DAYS, make
        from skerry.cli.settings import check_domain, load_settings
    name = check_domain(domain)
    folder = (out if out is not None else load_settings().data_dir / "tls").absolute()
    now = datetime.now(UTC)
    files = make(name, folder, now)
    said = {
        "domain": name,
        "address": name if port == 443 else f"{name}:{port}",
        "port": port,
        "ca": str(files.ca),
        "cert": str(files.cert),
        "key": str(files.key),
    }
    if as_json:
        write_json(said)
        return
    until = datetime.fromordinal(now.toordinal() + LEAF_DAYS).date().isoformat()
    sys.stdout.write(_TEXT.format(**said, until=until))
