"""Idempotency keys: what is kept of them, and of the request that came with one."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from skerry.control.checks import IDEMPOTENCY_KEY
from skerry.core.errors import Conflict, InvalidRequest
from skerry.store import Remembered


def check_key(key: str | None) -> None:
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest.of(
            "Idempotency-Key", "must be 1 to 255 visible ASCII characters", allowed="1..255 of ! to ~"
        )


def request_hashes(tenant_id: str, body: Mapping[str, Any], key: str | None) -> tuple[bytes | None, bytes]:
    """What is kept of a key and of the request: neither can be read back, since only the key's holder can compute the
    body's hash (which covers environment values). One key serves one request of a tenant, whatever it is for."""
    if key is None:
        return None, b""
    said = json.dumps(body, sort_keys=True, ensure_ascii=True).encode()
    return hashlib.sha256(f"{tenant_id}\n{key}".encode()).digest(), hmac.digest(key.encode(), said, "sha256")


def require_same(remembered: Remembered, body_hash: bytes) -> None:
    """Raises Conflict `idempotency_mismatch` where the key came with another request."""
    if not hmac.compare_digest(remembered.body_hash, body_hash):
        raise Conflict(
            "this idempotency key was used with another request", code="idempotency_mismatch", made=remembered.made[0]
        )
