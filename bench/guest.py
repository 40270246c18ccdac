"""Programs that run in the guest to measure what the guest itself can do, and a raw line into it to compare with."""

import ctypes
import json
import os
import socket
import threading
from pathlib import Path

import psutil

from support.server import Server

FORK_EXEC = """
import os, statistics, time
def once():
    t = time.perf_counter()
    pid = os.posix_spawn("/bin/true", ["true"], os.environ)
    os.waitpid(pid, 0)
    return (time.perf_counter() - t) * 1000
[once() for _ in range(5)]
print(statistics.median([once() for _ in range(40)]))
"""

RECEIVE = """
import socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", 9000)); s.listen()
print("ready", flush=True)
buffer = bytearray(262144)
while True:
    c, _ = s.accept()
    while c.recv_into(buffer): pass
    c.close()
"""

SEND = """
import socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", 9001)); s.listen()
print("ready", flush=True)
while True:
    c, _ = s.accept()
    with open("/tmp/bench.bin", "rb") as f: c.sendfile(f)
    c.close()
"""

GUEST_ADDRESS = "169.254.0.2"
CLONE_NEWNET = 0x40000000


def vmm(server: Server, sandbox_id: str) -> psutil.Process:
    """The QEMU process of a sandbox, by the node's journal."""
    entry = json.loads((server.data_dir / "node" / "journal" / f"{sandbox_id}.json").read_text())
    return psutil.Process(entry["handle"]["state"]["pid"])


def pss_mb(pid: int) -> float:
    """Private memory and the VM's share of what it shares, MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError("no Pss")


def private_mb(pid: int) -> float:
    """Memory that goes when the VM does, MB: without what it shares, or could share, with other clones of its image."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def connect(pid: int, port: int) -> socket.socket:
    """A TCP connection into the guest from its own namespace, past everything of ours."""
    made: list[socket.socket] = []

    def make() -> None:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)
        made.append(socket.create_connection((GUEST_ADDRESS, port), timeout=30))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
