"""E2B's control API, in both its generations: thin translations of the services behind `/v1`.

It stands at the root of the server, since E2B's clients let nobody choose a path. Errors are `{"code", "message"}`.
What this server cannot do is refused with a message: an option is never taken and then ignored.
"""

from skerry.api.e2b.control.app import create_control_app

__all__ = ["create_control_app"]
