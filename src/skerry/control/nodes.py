"""Which machine runs what. One node today; whoever asks for a node goes through here."""

from collections.abc import Iterable, Iterator, Sequence

from skerry.core.errors import NotFound, Unavailable
from skerry.core.models import SandboxSpec
from skerry.node.contract import ImageInfo, Node


class Nodes:
    """The nodes this server can reach, by their ids."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = {node.info().node_id: node for node in nodes}

    def place(self, spec: SandboxSpec) -> tuple[str, Node]:
        """The node for a new sandbox: of those that have the template, the one with the most free memory.

        Raises NotFound `template_not_found`, Unavailable `node_full` where there is no node at all.
        """
        if not self._nodes:
            raise Unavailable("there is no node to run it", code="node_full", retry_after=5)
        fit = [(node.info().memory_free_mb, node_id) for node_id, node in self._nodes.items() if _has(node, spec)]
        if not fit:
            next(iter(self._nodes.values())).template(spec.template)  # says why there is none, and what to do about it
            raise NotFound(f"there is no template {spec.template!r}", code="template_not_found", template=spec.template)
        node_id = max(fit)[1]
        return node_id, self._nodes[node_id]

    def get(self, node_id: str) -> Node:
        """Raises Unavailable `node_unreachable`."""
        node = self._nodes.get(node_id)
        if node is None:
            raise Unavailable("the sandbox's node cannot be reached", code="node_unreachable", node_id=node_id)
        return node

    def find(self, node_id: str) -> Node | None:
        return self._nodes.get(node_id)

    def items(self) -> Iterable[tuple[str, Node]]:
        return self._nodes.items()

    def has_template(self, name: str) -> bool:
        return any(name in node.templates() for node in self._nodes.values())

    def images(self) -> Iterator[ImageInfo]:
        """What all of them keep."""
        for node in self._nodes.values():
            yield from node.images()

    def templates(self) -> Sequence[str]:
        return sorted({name for node in self._nodes.values() for name in node.templates()})


def _has(node: Node, spec: SandboxSpec) -> bool:
    return spec.template in node.templates()
