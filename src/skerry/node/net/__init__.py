"""The walls around a sandbox's network: a namespace with one tap and no way out."""
