"""Sealing bytes so that they open only with their key, and only as what they were sealed as. Pure.

AES-256-GCM with a random 96-bit nonce before the ciphertext. What a sealed text is bound to (its kind, tenant, name,
version) is authenticated with it: put in another's place it does not open. One key may seal 2³² texts; a tenant's
secrets are far from that.
"""

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_SCHEME: Final = "skerry/1"


class Unreadable(Exception):
    """Another key, another place, or damage: which of them cannot be told."""


@dataclass(frozen=True, slots=True)
class Key:
    """An AES-256 key. Its id is made of it, so that damage shows before anything is opened."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")

    @property
    def id(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(b"skerry key id\0" + self.secret).hexdigest()[:16]


def new_key() -> Key:
    return Key(secrets.token_bytes(KEY_BYTES))


def seal(key: Key, data: bytes, *bound: str) -> bytes:
    """Nonce, ciphertext, tag: 28 bytes longer than `data`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(key.secret).encrypt(nonce, data, _associated(bound))


def unseal(key: Key, sealed: bytes, *bound: str) -> bytes:
    """What was sealed with this key and bound to the same. Raises Unreadable."""
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise Unreadable("too short to be a sealed text")
    try:
        return AESGCM(key.secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _associated(bound))
    except InvalidTag:
        raise Unreadable("it does not open") from None


def _associated(bound: tuple[str, ...]) -> bytes:
    """One spelling for each list of texts."""
    return json.dumps([_SCHEME, *bound]).encode()
