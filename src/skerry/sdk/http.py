"""What both kinds of IO tell httpx and websockets."""

import functools
import os
import ssl
from typing import Any

import httpx

from skerry.sdk.config import Target
from skerry.sdk.io import CONNECT_TIMEOUT, WRITE_TIMEOUT, Request


def client_options(target: Target) -> dict[str, Any]:
    """Idle connections are dropped before a server drops them (5 s is common), so that a request is never sent into a
    connection that is just being closed: its outcome would be unknown. A proxy of the environment is not asked for
    this machine's own addresses."""
    return {
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=3.0),
        "trust_env": not target.is_loopback,
        "verify": _trusted(target),
        "follow_redirects": False,
    }


def _trusted(target: Target) -> ssl.SSLContext:
    """Whom to believe. Reading the authorities takes longer than most requests, and httpx does it for each client."""
    if not target.is_secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used, and believes nobody
    own = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _authorities(not target.is_loopback, *own)


@functools.lru_cache(maxsize=8)
def _authorities(trust_env: bool, _file: str | None, _directory: str | None) -> ssl.SSLContext:  # noqa: FBT001 - a key
    """As httpx finds them, once for each of the environment's settings."""
    return httpx.create_ssl_context(trust_env=trust_env)


def socket_options(*, loopback: bool) -> dict[str, Any]:
    return {
        "open_timeout": CONNECT_TIMEOUT,
        "close_timeout": 5.0,
        "max_size": None,
        "compression": None,
        "proxy": None if loopback else True,
    }


def timeouts(request: Request) -> httpx.Timeout:
    return httpx.Timeout(connect=CONNECT_TIMEOUT, pool=CONNECT_TIMEOUT, write=WRITE_TIMEOUT, read=request.read_timeout)
