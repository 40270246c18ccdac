"""How an API key is spelled.

E2B's older clients take no key that is not `e2b_[0-9a-f]+`. So every key has a second spelling: `e2b_` and its ASCII
bytes in hexadecimal. It is the same key, and it is taken wherever the other one is.
"""

from typing import Final

E2B_PREFIX: Final = "e2b_"


def e2b_spelling(secret: str) -> str:
    """The same key as E2B's clients want it. One that is spelled so already comes back as it is."""
    return secret if secret.startswith(E2B_PREFIX) else E2B_PREFIX + secret.encode("ascii").hex()


def native_spelling(secret: str) -> str:
    """The key itself, however it was spelled. What is no spelling of a key comes back as it is."""
    if not secret.startswith(E2B_PREFIX):
        return secret
    try:
        return bytes.fromhex(secret.removeprefix(E2B_PREFIX)).decode("ascii")
    except ValueError:
        return secret
