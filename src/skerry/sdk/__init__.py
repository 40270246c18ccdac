"""The Python client: `Sandbox` blocks, `AsyncSandbox` is for asyncio. `docs/reference/sdk.md` tells all of it."""

from skerry.core.models import GuestMetrics as Metrics
from skerry.sdk.blocking import Client, Process, Pty, Sandbox, Stream
from skerry.sdk.client import AsyncClient
from skerry.sdk.environment import SecretRef, secret
from skerry.sdk.errors import CommandDeadline, CommandFailed, ForkIncomplete, NotConfigured, TransferIncomplete
from skerry.sdk.io import AsyncStream
from skerry.sdk.models import (
    CommandResult,
    CuratedRule,
    EgressChange,
    EgressPolicy,
    Entry,
    Exited,
    ExitInfo,
    Gap,
    Image,
    Key,
    NetworkChange,
    NetworkInfo,
    NetworkInForce,
    NetworkLayer,
    Output,
    PoolStatus,
    PortAddress,
    ProcessEvent,
    ProcessInfo,
    ProjectEgress,
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
    "CuratedRule",
    "EgressChange",
    "EgressPolicy",
    "Entry",
    "ExitInfo",
    "Exited",
    "ForkIncomplete",
    "Gap",
    "Image",
    "Key",
    "Metrics",
    "NetworkChange",
    "NetworkInForce",
    "NetworkInfo",
    "NetworkLayer",
    "NotConfigured",
    "Output",
    "PoolStatus",
    "PortAddress",
    "Process",
    "ProcessEvent",
    "ProcessInfo",
    "ProjectEgress",
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
