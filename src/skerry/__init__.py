"""Skerry: a Linux microVM for every AI agent, on your own hardware.

The client's names stand here and are imported when they are first used: `import skerry` alone loads nothing else, so
that parts that ship without the client (what runs inside a machine) can import the package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skerry.core.errors import (
        Conflict,
        Forbidden,
        Gone,
        GuestUnreachable,
        InternalError,
        InvalidRequest,
        LimitExceeded,
        NoSpace,
        NotFound,
        OutcomeUnknown,
        SkerryError,
        TooLarge,
        Unauthenticated,
        Unavailable,
    )
    from skerry.sdk import (
        AsyncClient,
        AsyncProcess,
        AsyncPty,
        AsyncSandbox,
        Client,
        CommandDeadline,
        CommandFailed,
        CommandResult,
        Entry,
        Exited,
        ForkIncomplete,
        Gap,
        Key,
        Metrics,
        Output,
        PortAddress,
        Process,
        ProcessInfo,
        Pty,
        Sandbox,
        SandboxInfo,
        SecretInfo,
        Snapshot,
        TransferIncomplete,
        WatchEvent,
        secret,
    )

__version__ = "0.1.0"

_HOMES = {
    "skerry.core.errors": (
        "Conflict",
        "Forbidden",
        "Gone",
        "GuestUnreachable",
        "InternalError",
        "InvalidRequest",
        "LimitExceeded",
        "NoSpace",
        "NotFound",
        "OutcomeUnknown",
        "SkerryError",
        "TooLarge",
        "Unauthenticated",
        "Unavailable",
    ),
    "skerry.sdk": (
        "AsyncClient",
        "AsyncProcess",
        "AsyncPty",
        "AsyncSandbox",
        "Client",
        "CommandDeadline",
        "CommandFailed",
        "CommandResult",
        "Entry",
        "Exited",
        "ForkIncomplete",
        "Gap",
        "Key",
        "Metrics",
        "Output",
        "PortAddress",
        "Process",
        "ProcessInfo",
        "Pty",
        "Sandbox",
        "SandboxInfo",
        "SecretInfo",
        "Snapshot",
        "TransferIncomplete",
        "WatchEvent",
        "secret",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncClient",
    "AsyncProcess",
    "AsyncPty",
    "AsyncSandbox",
    "Client",
    "CommandDeadline",
    "CommandFailed",
    "CommandResult",
    "Conflict",
    "Entry",
    "Exited",
    "Forbidden",
    "ForkIncomplete",
    "Gap",
    "Gone",
    "GuestUnreachable",
    "InternalError",
    "InvalidRequest",
    "Key",
    "LimitExceeded",
    "Metrics",
    "NoSpace",
    "NotFound",
    "OutcomeUnknown",
    "Output",
    "PortAddress",
    "Process",
    "ProcessInfo",
    "Pty",
    "Sandbox",
    "SandboxInfo",
    "SecretInfo",
    "SkerryError",
    "Snapshot",
    "TooLarge",
    "TransferIncomplete",
    "Unauthenticated",
    "Unavailable",
    "WatchEvent",
    "__version__",
    "secret",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'skerry' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
