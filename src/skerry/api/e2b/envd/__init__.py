"""E2B's in-VM API ("envd"), served by the host: processes and names over Connect, files over plain HTTP."""

from skerry.api.e2b.envd.app import create_envd_app

__all__ = ["create_envd_app"]
