"""The node's pure parts: rules, bounds, journal entries, host readings."""

import errno
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from skerry.core.errors import Conflict, InternalError, InvalidRequest, NoSpace
from skerry.node import cgroup, host, host_disk, journal
from skerry.node.config import NodeConfig
from skerry.node.disk import overlay
from skerry.node.net import rules
from skerry.node.vmm.driver import VmHandle
from skerry.node.vmm.qemu import tsc

RULESET = """\
table inet skerry {
  chain listed {
  }
  set tracked {
    type ipv4_addr
    size 2
    flags dynamic
  }
  chain from_guest {
    type filter hook prerouting priority mangle; policy drop;
    iifname "lo" accept
    iifname != "tap0" drop
    ip saddr != 169.254.0.2 drop
    meta nfproto ipv6 drop
    ct state established accept
    ct state invalid drop
    add @tracked { ip saddr ct count over 4096 } drop
    udp dport 53 accept
    tcp dport 53 accept
    ip daddr 198.18.0.0/15 meta l4proto tcp accept
    meta l4proto tcp jump listed
    limit rate 50/second burst 50 packets log group 1 snaplen 64
    limit rate over 500/second drop
    meta l4proto tcp reject with tcp reset
    reject with icmp admin-prohibited
  }
  chain to_us {
    type nat hook prerouting priority dstnat; policy accept;
    udp dport 53 redirect to :53
    tcp dport 53 redirect to :53
    ip daddr 198.18.0.0/15 meta l4proto tcp redirect to :15001
    meta mark 1 meta l4proto tcp redirect to :15001
  }
  chain through {
    type filter hook forward priority filter; policy drop;
  }
  chain to_guest {
    type filter hook output priority filter; policy drop;
    oifname "lo" accept
    oifname "tap0" ip daddr 169.254.0.2 accept
  }
}
"""
ENTRY = journal.Entry(
    sandbox_id="sb1",
    phase="creating",
    template="base",
    cpu=1,
    memory_mb=256,
    disk_mb=8192,
    base="/base.ext4",
    layers=("ly1",),
    artefacts={"kernel": "/k", "initramfs": "/i", "agent": "/a"},
    env={"A": "1"},
    machine_id="0" * 32,
    default_user="user",
    default_cwd=None,
    vm_id="sb1",
    netns="sk-abc-1",
)
HANDLE = VmHandle("qemu", 1, "sb1", {"pid": 5, "started": 6})


def test_the_ruleset_is_this() -> None:
    assert rules.ruleset() == RULESET


def test_listed_addresses_go_to_the_relay() -> None:
    assert rules.listing([]) == "flush chain inet skerry listed\n"
    assert rules.listing([(IPv4Network("10.9.0.0/24"), ((80, 90), (443, 443)))]) == (
        "flush chain inet skerry listed\n"
        "add rule inet skerry listed ip daddr 10.9.0.0/24 tcp dport { 80-90, 443-443 } meta mark set 1 accept\n"
    )


@pytest.mark.parametrize(
    ("version", "controller", "expected"),
    [
        (1, "memory", {"memory.limit_in_bytes": "1048576"}),
        (1, "cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "300000", "cpu.shares": "2048"}),
        (
            2,
            "",
            {
                "memory.max": "1048576",
                "memory.swap.max": "0",
                "cpu.max": "300000 100000",
                "cpu.weight": "200",
                "pids.max": "256",
            },
        ),
        (1, "pids", {"pids.max": "256"}),
        (1, "blkio", {}),
    ],
)
def test_bounds_of_a_cgroup(version: int, controller: str, expected: dict[str, str]) -> None:
    assert cgroup.settings(version, controller, cgroup.Limits(1 << 20, 2)) == expected


def test_a_disk_is_bounded_in_bytes_and_operations_where_the_host_has_one() -> None:
    limits = cgroup.Limits(1 << 20, 1, disk_bytes_per_s=1000, disk_operations_per_s=20)
    assert cgroup.settings(1, "blkio", limits, "254:0") == {
        "blkio.throttle.read_bps_device": "254:0 1000",
        "blkio.throttle.write_bps_device": "254:0 1000",
        "blkio.throttle.read_iops_device": "254:0 20",
        "blkio.throttle.write_iops_device": "254:0 20",
    }
    assert cgroup.settings(2, "", limits, "254:0")["io.max"] == "254:0 rbps=1000 wbps=1000 riops=20 wiops=20"
    assert "io.max" not in cgroup.settings(2, "", limits)
    half = replace(limits, disk_operations_per_s=0)
    assert cgroup.settings(2, "", half, "254:0")["io.max"] == "254:0 rbps=1000 wbps=1000 riops=max wiops=max"


def test_the_disk_of_a_path_is_a_whole_one_or_none(tmp_path: Path) -> None:
    found = cgroup.disk_of(tmp_path)
    assert not found or not Path(f"/sys/dev/block/{found}/partition").exists()
    assert cgroup.disk_of(Path("/proc")) == ""


def test_what_nobody_asked_for_gives_way_and_is_bounded_alike() -> None:
    mine, spare = (cgroup.settings(2, "", cgroup.Limits(1 << 20, 1, waiting=waiting)) for waiting in (False, True))
    assert (mine.pop("cpu.weight"), spare.pop("cpu.weight")) == ("100", "10")
    assert mine == spare
    of_v1 = cgroup.settings(1, "cpu", cgroup.Limits(1 << 20, 1, waiting=True))
    assert of_v1["cpu.shares"] == "102"


def test_cgroup_v1_is_found_by_its_controllers() -> None:
    found = cgroup.detect(
        "cgroup /cg/memory cgroup rw,memory 0 0\ncgroup /cg/cpu cgroup rw,cpu,cpuacct 0 0\nproc /proc proc rw 0 0\n"
    )
    assert (found.version, found.roots) == (1, {"memory": Path("/cg/memory"), "cpu": Path("/cg/cpu")})


def test_cgroup_v2_needs_both_controllers(tmp_path: Path) -> None:
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    assert cgroup.detect(mounts).version == 2
    (tmp_path / "cgroup.controllers").write_text("hugetlb")
    found = cgroup.detect(mounts)
    assert found.version == 0
    assert found.problem == "no mounted cgroup hierarchy has the memory and cpu controller"


def test_an_entry_survives_its_encoding() -> None:
    entry = replace(ENTRY, phase="running", handle=HANDLE, token="secret", generation=1)
    assert journal.decode(journal.encode(entry)) == entry
    assert journal.decode(journal.encode(ENTRY)) == ENTRY


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"version": 2}', b'{"version": 1, "handle": null}'])
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        journal.decode(data)


def test_the_journal_keeps_secrets_to_itself_and_forgets_what_is_removed(tmp_path: Path) -> None:
    book = journal.Journal(tmp_path)
    book.write(ENTRY)
    book.write(replace(ENTRY, phase="running", handle=HANDLE, token="secret", generation=1))
    assert [p.stat().st_mode & 0o777 for p in tmp_path.iterdir()] == [0o600]
    read = book.read("sb1")
    assert read is not None
    assert read.token == "secret"
    (tmp_path / "sb2.new").write_bytes(b"half")
    assert book.names() == ["sb1", "sb2"]
    assert book.read("sb2") is None
    for name in ("sb1", "sb2", "sb2"):
        book.remove(name)
    assert book.names() == []


def test_a_second_server_on_the_same_data_is_refused_in_one_line(tmp_path: Path) -> None:
    first = journal.DataLock(tmp_path / "lock")
    with pytest.raises(Conflict) as refusal:
        journal.DataLock(tmp_path / "lock")
    assert refusal.value.code == "data_dir_in_use"
    assert "\n" not in str(refusal.value)
    first.release()
    journal.DataLock(tmp_path / "lock").release()


def test_the_instance_is_the_data_directory_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    by_name, by_link = (NodeConfig(tmp_path / n, tmp_path).instance for n in ("data", "link"))
    assert by_name == by_link
    assert len(by_name) == 6
    assert NodeConfig(tmp_path / "other", tmp_path).instance != by_name


def test_memory_is_read_in_megabytes() -> None:
    text = "MemTotal:       24683520 kB\nMemFree: 1 kB\nMemAvailable:   10485760 kB\nHugePages_Total: 0\n"
    assert host.memory(text) == host.Memory(24105, 10240)


def test_the_time_stamp_counter_runs_at_a_plausible_speed() -> None:
    assert 500_000 < tsc.khz() < 10_000_000


def test_a_disk_below_its_template_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with base.open("wb") as file:
        file.truncate(3 << 20)
    with pytest.raises(InvalidRequest) as refusal:
        overlay.create(tmp_path / "layer", base, 2 << 20)
    assert [p.as_dict()["allowed"] for p in refusal.value.problems] == [3]
    assert not (tmp_path / "layer").exists()


def test_a_full_disk_is_told_from_a_broken_one():
    full = host_disk.failure(
        OSError(errno.ENOSPC, "No space left on device"), "the journal cannot be written", "journal"
    )
    assert (type(full), full.code, full.status) == (NoSpace, "host_disk_full", 507)
    broken = host_disk.failure(OSError(errno.EIO, "Input/output error"), "the journal cannot be written", "journal")
    assert (type(broken), broken.context["step"]) == (InternalError, "journal")
    assert str(broken) == "the journal cannot be written: [Errno 5] Input/output error"
