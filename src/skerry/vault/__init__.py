"""Keys and what they close: the operator's root key, the tenants' keys under it, what lies under those."""

from skerry.vault.envelope import Key, Unreadable, new_key, seal, unseal
from skerry.vault.rootkey import RootKeys

__all__ = ["Key", "RootKeys", "Unreadable", "new_key", "seal", "unseal"]
