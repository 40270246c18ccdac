"""The engine of one machine. The control plane knows it only by `skerry.node.contract`."""
