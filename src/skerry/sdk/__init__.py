"""The Python client: `Sandbox` blocks, `AsyncSandbox` is for asyncio. `docs/reference/sdk.md` tells all of it."""

from skerry.core.models import GuestMetrics as Metrics
from skerry.sdk.blocking import Client, Process, Pty, Sandbox, Stream
from skerry.sdk.client import AsyncClient
from skerry.sdk.environment import SecretRef, secret
from skerry.sdk.errors import CommandDeadline, CommandFailed, ForkIncomplete, NotConfigured, TransferIncomplete
from skerry.sdk.io import AsyncStream
from skerry.sdk.models import (
    CommandResult,
    Entry,
    Exited,
    ExitInfo,
    Gap,
    Image,
    Key,
    Output,
    PoolStatus,
    PortAddress,
    ProcessEvent,
    ProcessInfo,
    SandboxInfo,
    SecretInfo,
    Snapshot,
    Started,
    WatchEvent,
)
from skerry.sdk.process import AsyncProcess
from skerry.sdk.pty import AsyncPty
from skerry.sdk.sandbox import AsyncSandbox

__all__ = [
    "AsyncClient",
    "AsyncProcess",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncStream",
    "Client",
    "CommandDeadline",
    "CommandFailed",
    "CommandResult",
    "Entry",
    "ExitInfo",
    "Exited",
    "ForkIncomplete",
    "Gap",
    "Image",
    "Key",
    "Metrics",
    "NotConfigured",
    "Output",
    "PoolStatus",
    "PortAddress",
    "Process",
    "ProcessEvent",
    "ProcessInfo",
    "Pty",
    "Sandbox",
    "SandboxInfo",
    "SecretInfo",
    "SecretRef",
    "Snapshot",
    "Started",
    "Stream",
    "TransferIncomplete",
    "WatchEvent",
    "secret",
]
