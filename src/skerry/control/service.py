"""What every service that changes sandboxes works with."""

from dataclasses import dataclass

from skerry.audit import AuditSink
from skerry.control.config import ControlConfig
from skerry.control.live import LiveSandboxes
from skerry.control.nodes import Nodes
from skerry.control.owned import Owned
from skerry.control.recorder import Recorder
from skerry.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """One of each in a server."""

    store: Store
    sink: AuditSink
    recorder: Recorder
    nodes: Nodes
    live: LiveSandboxes
    owned: Owned
    config: ControlConfig


class Service:
    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._sink = context.sink
        self._recorder = context.recorder
        self._nodes = context.nodes
        self._live = context.live
        self._owned = context.owned
        self._config = context.config
