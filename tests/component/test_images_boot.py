"""The built artefacts, booted: with each QEMU that this machine can have, down to an agent that runs as PID 1."""

import shutil
import subprocess
from pathlib import Path

import pytest

import skerry.guest
from skerry.core.errors import InternalError, InvalidRequest, NotFound
from skerry.images import ImageSet, Silent, Toolchain, build, default_cache_dir, guest_apt, load, toolchain
from skerry.images.cache import Cache
from skerry.images.qemu import backports_apt
from skerry.images.rootfs import make_template
from skerry.node.vmm.qemu.tsc import khz

pytestmark = pytest.mark.vm

TOY_AGENT = """
import ctypes, json, os, subprocess, sys

def main():
    shell = "/bin/sh" if os.path.exists("/bin/sh") else None
    said = shell and subprocess.run(
        [shell, "-c", "id -un; id -un user; node --version; python3 -c 'print(6*7)'"],
        capture_output=True, text=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
    mounts = {line.split()[1]: line.split()[2] for line in open("/proc/self/mounts")}
    about = {"pid": os.getpid(), "python": sys.version_info[:2], "mounts": mounts, "path": sys.path,
             "interfaces": sorted(os.listdir("/sys/class/net")), "said": said.stdout.split() if said else None}
    print("REPORT " + json.dumps(about), flush=True)
    os.sync()
    ctypes.CDLL(None).reboot(0x4321FEDC)
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    """The machine's own images, with an agent of ours that reports and powers off."""
    source = tmp_path_factory.mktemp("guest")
    (source / "__init__.py").touch()
    (source / "agent.py").write_text(TOY_AGENT)
    shutil.copy(Path(skerry.guest.__file__).with_name("birth.c"), source)
    return build(default_cache_dir(), Silent(), guest_source=source)


def boot(images: ImageSet, tools: Toolchain, kernel: Path, disks: list[list[str]]) -> str:
    """Boot to the end and give the console."""
    argv = [
        *tools.argv, "-M", "microvm,pit=on,pic=on,rtc=on", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "256",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", str(kernel), "-initrd", str(images.kernel.initramfs),
        "-append",
        f"console=ttyS0 quiet tsc_early_khz={khz()} tsc=reliable no_timer_check reboot=t panic=-1 random.trust_cpu=on",
        "-netdev", "user,id=n,restrict=on", "-device", "virtio-net-device,netdev=n", "-device", "virtio-rng-device",
    ]  # fmt: skip
    for number, drive in enumerate(disks):
        argv += ["-drive", f"id=d{number},if=none,{','.join(drive)}", "-device", f"virtio-blk-device,drive=d{number}"]
    done = subprocess.run(
        argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=120, env={**tools.env}, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="replace")


def overlay(tools: Toolchain, base: Path, path: Path) -> list[str]:
    words = [tools.qemu_img, "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", path]
    subprocess.run(words, check=True, env={**tools.env}, timeout=60)
    return [f"file={path}", "format=qcow2", "cache=unsafe"]


def agent_disk(images: ImageSet) -> list[str]:
    return [f"file={images.agent.image}", "format=raw", "readonly=on"]


def report(console: str) -> dict:
    import json

    lines = [line for line in console.splitlines() if "REPORT " in line]
    assert lines, console
    return json.loads(lines[0].partition("REPORT ")[2])


def qemus() -> list[str]:
    """Which QEMUs this machine has to have: its own always, and on Debian 12 the one of the backports."""
    return ["host", "backports"] if backports_apt(Cache(default_cache_dir())) else ["host"]


@pytest.mark.parametrize("which", qemus())
def test_a_guest_boots_to_its_agent(images: ImageSet, tmp_path: Path, which: str):
    tools = toolchain(default_cache_dir(), which)
    assert tools.source == which
    base = images.templates["base"]
    disk = overlay(tools, base.disk, tmp_path / "o.qcow2")
    about = report(boot(images, tools, images.kernel.vmlinuz, [disk, agent_disk(images)]))
    assert about["pid"] == 1
    assert about["python"] == [3, 13]
    assert about["interfaces"] == ["eth0", "lo"]
    assert all(path.startswith("/run/skerry/agent/") for path in about["path"])
    mounts = about["mounts"]
    assert mounts["/"] == "ext4" and mounts["/run/skerry/agent"] == "ext4"
    assert {"/proc", "/sys", "/dev", "/run", "/dev/pts", "/dev/shm"} <= set(mounts)
    assert about["said"][:2] == ["root", "user"]
    assert about["said"][2].startswith("v22.")
    assert about["said"][3] == "42"


def test_the_agent_needs_nothing_of_the_root_filesystem(images: ImageSet, tmp_path: Path):
    """An empty disk: no shell, no C library, not even a directory."""
    empty = tmp_path / "empty.ext4"
    subprocess.run(["/usr/sbin/mke2fs", "-q", "-t", "ext4", empty, "16m"], check=True, timeout=60)
    disk = [f"file={empty}", "format=raw"]
    about = report(boot(images, images.toolchain, images.kernel.vmlinuz, [disk, agent_disk(images)]))
    assert about["pid"] == 1
    assert about["said"] is None


def test_a_disk_that_is_none_is_said_in_one_line_and_ends_the_machine(images: ImageSet, tmp_path: Path):
    blank = tmp_path / "blank"
    blank.touch()
    blank.open("r+b").truncate(1 << 20)
    disk = [f"file={blank}", "format=raw"]
    console = boot(images, images.toolchain, images.kernel.vmlinuz, [disk, agent_disk(images)])
    said = [line for line in console.splitlines() if "skerry-init" in line]
    assert said == ["skerry-init: the root disk /dev/vda did not mount: the guest cannot start"]


def test_what_was_built_is_found_again(images: ImageSet):
    assert load(default_cache_dir()).kernel == images.kernel


def test_qemu_is_chosen_by_name_path_or_environment(images: ImageSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host = toolchain(default_cache_dir(), "host")
    monkeypatch.setenv("SKERRY_QEMU", str(host.qemu))
    by_path = toolchain(default_cache_dir())
    assert (by_path.source, by_path.qemu, by_path.version) == ("path", host.qemu, host.version)
    monkeypatch.setenv("SKERRY_QEMU", "newest")
    with pytest.raises(InvalidRequest, match="SKERRY_QEMU"):
        toolchain(default_cache_dir())
    with pytest.raises(InternalError) as caught:
        toolchain(default_cache_dir(), "/no/such/qemu")
    assert caught.value.code == "qemu_unusable"
    with pytest.raises(NotFound) as missing:
        toolchain(tmp_path, "backports")
    assert missing.value.code == "images_not_built"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_index_gives_the_same_files(images: ImageSet, tmp_path: Path):
    """Build the template once more, and compare every file of it by content, mode and owner."""
    cache = Cache(default_cache_dir())
    make_template(tmp_path, "base", guest_apt(cache), lambda _: None)
    first = images.templates["base"].manifest
    differ = set((first.parent / "files.tsv").read_text().splitlines()) ^ set(
        (tmp_path / "files.tsv").read_text().splitlines()
    )
    assert differ == set()
    assert first.read_text() == (tmp_path / "manifest.json").read_text()
