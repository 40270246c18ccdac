"""The agent as the first process of a machine: in namespaces of its own, with what it may do to the host taken away."""

import asyncio
import ctypes
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.core.errors import SkerryError
from skerry.core.models import PtySize
from skerry.node.guestlink import GuestLink
from support.guest_agent import GUEST_PYTHON, SOURCE, RunningAgent, compiled_half, end_tree, identity, own_cgroup

# A private /etc and /run (the agent writes to them), /proc, /dev and network; no right to set the clock or to resize a
# disk.
MACHINE = """
set -e
mount -t tmpfs none /mnt && cp -a /etc/. /mnt/ && mount --move /mnt /etc
mount -t tmpfs none /run && mkdir -m 0711 /run/skerry
mount -t proc proc /proc
mount -t tmpfs none /dev/shm && umount /dev/shm
umount -l /dev/pts /dev/shm 2>/dev/null || true
umount -R -l /sys/fs/cgroup
exec setpriv --bounding-set -sys_time,-sys_resource --inh-caps -sys_time,-sys_resource "$@"
"""
# Two networks with a cable between them: the host's end stays in the first.
HOST = """unshare -n sh -c "$WIRE" sh "$@" & wait"""
WIRE = """
set -e
ip link add eth0 type veth peer name host0 netns $PPID
nsenter -t $PPID -n sh -c 'ip addr add 169.254.0.1/30 dev host0; ip link set host0 up'
exec unshare -C -m -u -p --fork sh -c "$MACHINE" sh "$@"
"""
_CLONE_NEWNET = 0x40000000


def socket_in(pid: int) -> socket.socket:
    """A socket in that process's network, bound to the host's address there."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if libc.setns(there, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            try:
                s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                s.bind(("169.254.0.1", 0))
                return s
            finally:
                assert libc.setns(own, _CLONE_NEWNET) == 0
        finally:
            os.close(there)
    finally:
        os.close(own)


@pytest.fixture
async def machine() -> AsyncIterator[RunningAgent]:
    with own_cgroup() as cgroup:
        enter = f'echo $$ > {cgroup}/cgroup.procs; exec unshare -n sh -c "$HOST" sh "$@"'
        python = [str(GUEST_PYTHON), "-S", "-E", "-s", "-B", "-m", "skerry.guest.agent"]
        python += ["--birth", str(compiled_half())]
        env = {"PATH": os.environ["PATH"], "HOST": HOST, "WIRE": WIRE, "MACHINE": MACHINE}
        process = subprocess.Popen(["sh", "-c", enter, "sh", *python], cwd=SOURCE, env=env, stdin=subprocess.DEVNULL)
        try:
            link = GuestLink("sb0", lambda: socket_in(process.pid))
            await answering(link)
            yield RunningAgent(link, 1024, process)
        finally:
            end_tree(process.pid)
            process.wait()


async def answering(link: GuestLink) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await link.ping(timeout=2)
            except SkerryError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_machine_is_made_ready_and_told_who_it_is(machine: RunningAgent) -> None:
    with pytest.raises(SkerryError) as e:
        await machine.link.processes()
    assert e.value.context["guest_code"] == "not_identified"
    problems = await machine.link.identify(identity(hostname="sb77", machine_id="0123456789abcdef" * 2, env={"A": "1"}))
    assert [p.split(":")[0] for p in problems if not p.startswith("root filesystem")] == ["clock"]
    result = await machine.run(
        "hostname; cat /etc/hostname /etc/machine-id; grep sb77 /etc/hosts; echo $A; cat /proc/1/comm; "
        "cat < <(echo subst); stat -f -c %T /dev/shm; ip -o -4 addr show eth0; ip route show default"
    )
    lines = result.stdout.decode().split("\n")
    assert lines[:5] == ["sb77", "sb77", "0123456789abcdef" * 2, "127.0.1.1\tsb77 # skerry", "1"], result
    assert lines[6:8] == ["subst", "tmpfs"]
    assert "169.254.0.2/30" in lines[8]
    assert lines[9].startswith("default via 169.254.0.1 dev eth0")
    assert os.uname().nodename != "sb77"
    terminal = await machine.run("tty", pty=PtySize(80, 24))
    assert terminal.pty.startswith(b"/dev/pts/")


async def test_orphans_are_reaped_and_trees_killed_by_cgroup(machine: RunningAgent) -> None:
    await machine.link.identify(identity())
    stream = await machine.start(
        "(setsid sleep 700.5 &) ; sleep 0.5; cat /proc/self/cgroup; sleep 700.5", background=True
    )
    first = await stream.__anext__()
    assert b"0::/skerry/c" in first.data  # type: ignore[union-attr]
    assert await machine.link.kill_process(stream.process.process_id)
    await stream.aclose()
    for _ in range(30):
        await machine.run("(sleep 0.01 &) ; (setsid true &)")
    names: list[str] = []
    for _ in range(100):
        left = await machine.run("ps -e -o stat=,comm=")
        names = left.stdout.decode().splitlines()
        if not [n for n in names if n.startswith("Z") or "sleep" in n]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(names)


async def test_the_agents_port_is_not_for_those_inside(machine: RunningAgent) -> None:
    await machine.link.identify(identity())
    code = "import socket; s = socket.create_connection(('169.254.0.2', 1024), 5); print(s.recv(10))"
    result = await machine.run(argv=("/usr/bin/python3", "-c", code))
    assert result.stdout in (b"b''\n", b"") and b"b'" not in result.stdout.replace(b"b''", b"")
    assert Path("/etc/hostname").read_text() != "sb0\n"
