"""Tokens of single sandboxes: what a holder may do without an API key.

Each is an HMAC of the sandbox's id under the server's token key. Nothing is stored, and a token is the same over pause,
resume and every restart; servers that share the key agree on them. A new key makes all tokens void.
"""

import base64
import functools
import hashlib
import hmac
from typing import Final

from skerry.control.live import LiveSandboxes
from skerry.control.principal import Principal, Scope
from skerry.core.models import Sandbox

KEY_BYTES: Final = 32
SIGNATURE_VERSION: Final = "v1_"
_CACHED: Final = 16_384


class SandboxTokens:
    def __init__(self, key: bytes, live: LiveSandboxes) -> None:
        """`key`: at least 32 random bytes."""
        if len(key) < KEY_BYTES:
            raise ValueError(f"a token key has at least {KEY_BYTES} bytes")
        self._key = key
        self._live = live
        self._derived = functools.lru_cache(_CACHED)(self._derive)

    def _derive(self, purpose: str, sandbox_id: str) -> str:
        return hmac.digest(self._key, f"{purpose}\0{sandbox_id}".encode(), "sha256").hex()

    def access(self, sandbox_id: str) -> str:
        """64 hex digits. Its holder may use this sandbox: commands, files, terminals."""
        return self._derived("access", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """64 hex digits. Its holder may reach this sandbox's ports, whether they are public or not."""
        return self._derived("traffic", sandbox_id)

    def opens(self, sandbox_id: str, token: str | None) -> bool:
        """Whether `token` is the sandbox's access token. Takes the same time for every wrong one."""
        return _same(self.access(sandbox_id), token)

    def opens_ports(self, sandbox_id: str, token: str | None) -> bool:
        """Whether `token` is the sandbox's traffic token. Takes the same time for every wrong one."""
        return _same(self.traffic(sandbox_id), token)

    def principal_of(self, sandbox: Sandbox) -> Principal:
        """Who holds the access token: may use this one sandbox, and nothing else of its tenant."""
        return _bound(sandbox, "token")

    def visitor_of(self, sandbox: Sandbox) -> Principal:
        """Who comes to a port of it, with a traffic token or because its ports are public. For `Ports` alone."""
        return _bound(sandbox, "visitor")

    def find(self, sandbox_id: str) -> Sandbox | None:
        """The record of one that is up or rests."""
        live = self._live.get(sandbox_id)
        return None if live is None else live.record

    # ---------------------------------------------------------------------------------------------------- signatures

    def signature(self, sandbox_id: str, path: str, operation: str, user: str = "", expires: int | None = None) -> str:
        """What a signed URL carries: the right to `read` or `write` one path as `user`, until `expires` (Unix seconds).

        `path` and `user` are exactly as they stand in the URL. Whether it is over is for the caller to say.
        """
        said = [path, operation, user, self.access(sandbox_id)]
        if expires is not None:
            said.append(str(expires))
        digest = hashlib.sha256(":".join(said).encode("utf-8", "surrogateescape")).digest()
        return SIGNATURE_VERSION + base64.b64encode(digest).decode("ascii").rstrip("=")

    def find_signed(
        self, signature: str, path: str, operation: str, user: str = "", expires: int | None = None
    ) -> Sandbox | None:
        """The sandbox that is up or rests whose token made this signature. Looks at all of them, always."""
        found: Sandbox | None = None
        for live in self._live:
            if _same(self.signature(live.id, path, operation, user, expires), signature):
                found = live.record
        return found


def _same(own: str, given: str | None) -> bool:
    return given is not None and hmac.compare_digest(own.encode(), given.encode("utf-8", "surrogateescape"))


def _bound(sandbox: Sandbox, kind: str) -> Principal:
    """`kind` and the sandbox's id stand for the key's id in the audit record."""
    return Principal(
        sandbox.tenant_id,
        sandbox.project_id,
        f"{kind}:{sandbox.id}",
        frozenset({Scope.USE.value}),
        sandbox_id=sandbox.id,
    )
