"""What can be said about the server itself."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from skerry.control.creation import Creation
from skerry.control.live import LiveSandboxes
from skerry.control.nodes import Nodes
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import Recorder
from skerry.core.lifecycle import State
from skerry.node.contract import ImageInfo, NodeInfo, PoolStatus


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    node_id: str
    accelerator: str
    vmm: str
    templates: tuple[str, ...]


class Server:
    def __init__(self, nodes: Nodes, live: LiveSandboxes, creation: Creation, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes = nodes
        self._live = live
        self._creation = creation

    def info(self, principal: Principal) -> ServerInfo:  # noqa: ARG002 - having one is what is asked for
        """For any valid key."""
        node = self.nodes()[0]
        return ServerInfo(_version(), node.node_id, node.accelerator, node.vmm, tuple(self._nodes.templates()))

    def nodes(self) -> Sequence[NodeInfo]:
        return [node.info() for _, node in self._nodes.items()]

    def live(self) -> int:
        """Sandboxes that are not over, those under creation included. For the metrics page."""
        return len(self._live)

    def by_state(self) -> Mapping[State, int]:
        """Sandboxes that are not over, by their states. For the metrics page."""
        return Counter(live.record.state for live in self._live)

    def pool(self, principal: Principal) -> Sequence[PoolStatus]:
        """The warm clones of all nodes."""
        principal.require(Scope.ADMIN)
        return self.pools()

    def pools(self) -> Sequence[PoolStatus]:
        """The same for the metrics page."""
        return [status for _, node in self._nodes.items() for status in node.pool()]

    async def images(self, principal: Principal, *, verify: bool = False) -> Sequence[ImageInfo]:
        """What the nodes keep; with `verify` every byte is read and compared."""
        principal.require(Scope.ADMIN)
        found: list[ImageInfo] = []
        for _, node in list(self._nodes.items()):
            found += await node.verify_images() if verify else node.images()
        return found

    async def collect_images(self, principal: Principal) -> Sequence[str]:
        """Remove what nothing needs. Returns the ids."""
        async with self._recorder.act(principal, "images.collected", None) as act:
            principal.require(Scope.ADMIN)
            removed = [image_id for _, node in self._nodes.items() for image_id in await node.collect_images()]
            act.detail["removed"] = len(removed)
        return removed

    def starting(self) -> int:
        """Creates under way. For the metrics page."""
        return self._creation.starting


def _version() -> str:
    try:
        return version("skerry")
    except PackageNotFoundError:
        return "0+unknown"
