"""What runs inside a sandbox (`agent`, standard library only) and the wire protocol both sides share (`protocol`)."""
