"""What a sandbox's QEMU may do to the host, if its guest gets the better of it: who it is and what it can reach.

Looked at through the kernel's own books of the process, and by a program that goes where QEMU is, as who QEMU is.
"""

import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.core.errors import SkerryError
from skerry.core.models import SandboxSpec
from skerry.node.config import NodeConfig
from skerry.node.vmm.qemu.launch import rehearse
from support.node import Left, built_images, cache_dir, vm_engine
from support.templates import Templates

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]
SPEC = SandboxSpec(memory_mb=256)
NAMESPACES = ("mnt", "pid", "ipc", "uts", "net", "cgroup")
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
# $1: a process. Prints what of all that it sees is a file or directory that its user may write, or read and is no
# library; and what becomes of attempts on what it must not see.
VISITOR = """
import json, os, stat, sys
pid, uid, *attempts = sys.argv[1:]
os.chroot(f"/proc/{pid}/root"); os.chdir("/")
os.setgroups([]); os.setresgid(int(uid), int(uid), int(uid)); os.setresuid(int(uid), int(uid), int(uid))
readable, writable = [], []
for where, folders, files in os.walk("/"):
    if where == "/usr": folders[:] = [f for f in folders if f not in ("lib", "lib64", "share")]
    for path in (os.path.join(where, name) for name in [*files, "."]):
        path = os.path.normpath(path)
        if os.path.islink(path): continue
        if os.access(path, os.W_OK): writable.append(path)
        if os.access(path, os.R_OK) and not os.path.isdir(path): readable.append(path)
def tried(path):
    try: os.close(os.open(path, os.O_RDONLY))
    except OSError as e: return e.errno
    return 0
devices = [p for p in readable if not stat.S_ISREG(os.stat(p).st_mode)]
print(json.dumps([readable, writable, devices, {a: tried(a) for a in attempts}]))
"""


@dataclass
class Seen:
    readable: set[str]
    writable: set[str]
    devices: list[str]
    attempts: dict[str, int]


@dataclass
class Two:
    """A sandbox that was booted and one that is a clone, of one engine."""

    config: NodeConfig
    pids: dict[str, int]

    def status(self, name: str) -> dict[str, list[str]]:
        lines = Path(f"/proc/{self.pids[name]}/status").read_text().splitlines()
        return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}

    def uid(self, name: str) -> int:
        return int(self.status(name)["Uid"][0])

    def look(self, name: str, *attempts: Path) -> Seen:
        command = [sys.executable, "-c", VISITOR, self.pids[name], self.uid(name), *attempts]
        said = subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
        readable, writable, devices, tried = json.loads(said.stdout)
        return Seen(set(readable), set(writable), devices, tried)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory, templates: Templates) -> AsyncIterator[Two]:
    data = tmp_path_factory.mktemp("jail") / "data"
    templates.lend(data, {"memory_mb": 256})
    config = NodeConfig(data, cache_dir(), slots=2, pool_floor=0, pool_ceiling=0)
    async with vm_engine(config) as engine:
        clone = await engine.create("sbclone", SPEC)
        await engine.create("sbbooted", SPEC)
        await engine.pause("sbbooted", memory=False)
        booted = await engine.resume("sbbooted")
        yield Two(config, {sandbox.id: sandbox.vmm_pid for sandbox in (clone, booted)})
        for sandbox in (clone, booted):
            await engine.kill(sandbox.id)
    assert Left.of(config).nothing


KINDS = pytest.mark.parametrize("name", ["sbclone", "sbbooted"])


@KINDS
async def test_it_is_a_user_of_its_own_without_any_right(two: Two, name: str) -> None:
    status = two.status(name)
    assert len({*status["Uid"], *status["Gid"]}) == 1
    assert two.uid(name) == 0x70000000 + two.pids[name]
    assert status["Groups"] == []
    assert {int(status[key][0], 16) for key in CAPABILITIES} == {0}
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]
    others = {Path(f"/proc/{pid}").stat().st_uid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
              if pid != two.pids[name]}  # fmt: skip
    assert two.uid(name) not in others


@KINDS
async def test_its_namespaces_are_nobody_elses(two: Two, name: str) -> None:
    def space(pid: int | str, kind: str) -> str:
        return os.readlink(f"/proc/{pid}/ns/{kind}")

    (other,) = set(two.pids) - {name}
    for kind in NAMESPACES:
        assert space(two.pids[name], kind) not in {space("self", kind), space(two.pids[other], kind)}, kind
    assert two.status(name)["NSpid"] == [str(two.pids[name]), "1"]


@KINDS
async def test_it_sees_its_own_files_and_libraries_and_nothing_else(two: Two, name: str) -> None:
    images = built_images(two.config.cache_dir)
    (other,) = set(two.pids) - {name}
    private = [
        Path("/etc/passwd"), Path("/etc/shadow"), Path("/root"), Path("/proc/1/maps"), Path("/sys"), Path("/dev/zero"),
        Path("/bin/sh"), Path("/usr/bin/python3"), Path("/run"), two.config.journal_dir, two.config.data_dir / "root",
        Path(f"/proc/{two.pids[other]}/root"),
    ]  # fmt: skip
    seen = two.look(name, *private)
    assert {attempt: errno for attempt, errno in seen.attempts.items() if errno == 0} == {}
    state = two.config.state_dir
    disks = {path for path in seen.writable if Path(path).parent == state / "layers"}
    assert len(disks) == 1
    extra = seen.writable - disks - {os.devnull}
    assert extra == ({str(state / "vms" / "sbbooted" / "ram")} if name == "sbbooted" else set())
    template = images.templates["base"]
    ours = {str(images.agent.image), *map(str, template.disks.values())}
    if name == "sbbooted":
        ours |= {str(images.kernel.vmlinuz), str(images.kernel.initramfs)}
    programs = str(images.toolchain.root or images.toolchain.qemu)
    rest = {p for p in seen.readable - seen.writable - ours if not p.startswith((programs, "/usr/local/lib/"))}
    rest.discard("/etc/ld.so.cache")
    assert {Path(p).parent.parent.name for p in rest if not p.endswith(".qcow2")} <= {"images"}, rest
    assert {Path(p).parent for p in rest if p.endswith(".qcow2")} <= {state / "layers"}, rest
    assert seen.devices == [os.devnull]
    assert two.look(other).writable & seen.writable == {os.devnull}


@KINDS
async def test_its_open_files_are_its_disk_its_monitor_and_its_tap(two: Two, name: str) -> None:
    state = str(two.config.state_dir)
    for fd in Path(f"/proc/{two.pids[name]}/fd").iterdir():
        target = os.readlink(fd)
        mode = int(Path(f"/proc/{two.pids[name]}/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0], 8)
        if mode & os.O_ACCMODE != os.O_RDONLY and target.startswith("/") and not target.startswith("/memfd:"):
            allowed = ("/dev/null", "/dev/net/tun", f"{state}/layers/", f"{state}/vms/sbbooted/ram")
            assert target.startswith(allowed), target
        if target.startswith(("/dev/", "/proc/", "/sys/")):
            assert target in {"/dev/null", "/dev/net/tun"}


@KINDS
async def test_it_dumps_no_core_and_is_what_the_kernel_kills_first(two: Two, name: str) -> None:
    process = Path(f"/proc/{two.pids[name]}")
    assert (process / "oom_score_adj").read_text().strip() == "500"
    (core,) = (line for line in (process / "limits").read_text().splitlines() if "core file" in line)
    assert core.split()[4:6] == ["0", "0"]


async def test_what_is_only_read_belongs_to_root(two: Two) -> None:
    top = {path.name for path in map(Path, two.look("sbclone").writable | two.look("sbbooted").writable)}
    for layer in (two.config.state_dir / "layers").iterdir():
        found = layer.stat()
        if layer.name in top:
            assert found.st_uid in {two.uid(name) for name in two.pids}
            assert stat.S_IMODE(found.st_mode) == 0o600


async def test_the_jail_says_what_it_could_not_do(two: Two, tmp_path: Path) -> None:
    images = built_images(two.config.cache_dir)
    rehearse(images.jail)
    broken = tmp_path / "jail"
    broken.write_text("#!/bin/sh\necho 'jail: open_tree /x: error 2' >&2\nexit 70\n")
    broken.chmod(0o755)
    with pytest.raises(SkerryError, match="open_tree /x: error 2"):
        rehearse(broken)
