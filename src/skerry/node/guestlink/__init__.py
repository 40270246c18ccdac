"""The host's client of the guest agent. The guest may be hostile: whatever it says is checked and bounded."""

from skerry.node.guestlink.link import GuestLink

__all__ = ["GuestLink"]
