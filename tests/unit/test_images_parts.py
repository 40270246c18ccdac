"""The pure parts of the image builds: keys, archives, command lines, what is read out of packages."""

from pathlib import Path

import pytest

from skerry.core.errors import InternalError, InvalidRequest, NotFound
from skerry.images import TemplateImage, cpio, ext4, kernel, load, manifest, qemu
from skerry.images.apt import Mirrors, PrivateApt, parse_targets, source_lines, without_credentials
from skerry.images.cache import key_of
from skerry.images.rootfs import mmdebstrap_argv


def test_a_key_depends_on_every_input_and_not_on_their_order():
    key = key_of({"a": 1, "b": ["x"]})
    assert key == key_of({"b": ["x"], "a": 1})
    assert len({key, key_of({"a": 2, "b": ["x"]}), key_of({"a": 1, "b": ["y"]}), key_of({"a": 1})}) == 4


TARGETS = """\
http://mirror.example/debian/ bookworm Debian
http://mirror.example/debian/ bookworm-updates Debian
http://security.example/debian-security/ bookworm-security Debian
http://other.example/linux/debian/ bookworm Docker
"""


def test_the_mirror_is_the_one_that_debian_itself_comes_from():
    assert parse_targets(TARGETS, "bookworm") == Mirrors(
        "http://mirror.example/debian/", "http://security.example/debian-security/"
    )
    reverse = "\n".join(reversed(TARGETS.splitlines()))
    assert parse_targets(reverse, "bookworm") == parse_targets(TARGETS, "bookworm")


def test_before_the_lists_are_fetched_the_address_tells_debian():
    text = "http://other.example/linux/ubuntu/ bookworm $(ORIGIN)\nhttp://m.example/debian/ bookworm $(ORIGIN)\n"
    assert parse_targets(text, "bookworm") == Mirrors("http://m.example/debian/", None)


def test_no_mirror_is_none():
    assert parse_targets("http://other.example/docker/ bookworm Docker\n", "bookworm") is None
    assert parse_targets("", "bookworm") is None


def test_sources_leave_out_security_where_the_host_has_no_such_mirror():
    lines = source_lines(("trixie", "trixie-security"), Mirrors("http://m.example/debian/", None), Path("/k.gpg"))
    assert lines == "deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian/ trixie main\n"


def test_a_guest_does_not_get_the_mirrors_password():
    text = (
        "deb [signed-by=/k] https://me:secret@mirror.example:8443/debian trixie main\ndeb http://m.example/d x main\n"
    )
    assert without_credentials(text) == (
        "deb [signed-by=/k] https://mirror.example:8443/debian trixie main\ndeb http://m.example/d x main\n"
    )


# ------------------------------------------------------------------------------------------------------------ initramfs


def members(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Read a newc archive as the kernel does."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        assert fields[2:4] == [0, 0] and fields[5] == 0  # root's, and without a time
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        at += -(-(110 + name_size) // 4) * 4
        if name == "TRAILER!!!":
            assert at == len(data)
            return found
        found[name] = (mode, data[at : at + size])
        at += -(-size // 4) * 4


def module(*depends: str) -> bytes:
    return b"\x7fELF..\0license=GPL\0depends=" + ",".join(depends).encode() + b"\0retpoline=Y\0"


def test_an_archive_is_read_back_and_is_the_same_each_time():
    entries = [cpio.regular("b/c", b"12345", 0o755), cpio.directory("b"), cpio.symlink("a", "b/c")]
    data = cpio.archive(entries)
    assert data == cpio.archive(reversed(entries))
    assert members(data) == {"a": (0o120777, b"b/c"), "b": (0o40755, b""), "b/c": (0o100755, b"12345")}


def test_modules_come_after_what_they_depend_on(tmp_path: Path):
    for name, data in {
        "net_failover": module("failover"),
        "failover": module(),
        "virtio_net": module("net_failover"),
    }.items():
        (tmp_path / f"{name}.ko").write_bytes(data)
    (tmp_path / "modules.builtin").write_text("kernel/drivers/virtio/virtio.ko\n")
    assert list(kernel.read_modules(tmp_path, ["virtio_net", "virtio"])) == ["failover", "net_failover", "virtio_net"]
    with pytest.raises(InternalError, match="no module virtio_blk"):
        kernel.read_modules(tmp_path, ["virtio_blk"])


def test_the_initramfs_loads_its_modules_in_order_and_becomes_the_agent():
    modules = {"failover": module(), "net_failover": module("failover"), "virtio_net": module("net_failover")}
    found = members(kernel.initramfs("6.1-x", b"busybox", modules))
    script = found["init"][1].decode()
    assert "modprobe -a failover net_failover virtio_net ||" in script
    assert "exec switch_root /new /run/skerry/agent/lib/ld-linux-x86-64.so.2 " in script
    assert "@" not in script.replace("$@", "")
    assert found["lib/modules/6.1-x/modules.dep"][1].decode().splitlines() == [
        "failover.ko: ",
        "net_failover.ko: failover.ko",
        "virtio_net.ko: net_failover.ko failover.ko",
    ]
    assert found["init"][0] & 0o111


def test_mke2fs_command_line():
    argv = ext4.mke2fs_argv(Path("/o"), Path("/t"), label="L", uuid="U", size_kb=10, options=["-O", "^has_journal"])
    assert " ".join(argv) == (
        "mke2fs -q -F -t ext4 -b 4096 -m 0 -L L -U U -E hash_seed=U,root_owner=0:0,lazy_itable_init=0 "
        "-O ^has_journal -d /t /o 10k"
    )


def test_mmdebstrap_takes_its_packages_from_the_kept_index_only(tmp_path: Path):
    apt = PrivateApt(tmp_path, ["trixie"])
    argv = mmdebstrap_argv(Path("/t"), ["bash", "git"], apt, Path("/acquire"))
    assert "--include=bash,git" in argv
    assert "--skip=update,essential/unlink,cleanup/apt" in argv
    assert argv[-3:] == ["trixie", "/t", str(tmp_path / "sources.list")]


def test_a_private_apt_names_no_directory_of_the_hosts(tmp_path: Path):
    words = PrivateApt(tmp_path, ["trixie"]).options()
    paths = [word.partition("=")[2] for word in words if word.startswith("Dir::")]
    assert len(paths) == 11
    assert all(path.startswith(str(tmp_path)) for path in paths)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)", (10, 0, 2)),
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)", (7, 2, 22)),
        ("something else", None),
    ],
)
def test_qemus_version(text: str, version: tuple[int, int, int] | None):
    assert qemu.parse_version(text) == version


# ------------------------------------------------------------------------------------------------------------ templates


def test_a_listing_tells_content_mode_and_targets_but_not_times(tmp_path: Path):
    (tmp_path / "d").mkdir()
    file = tmp_path / "d" / "f"
    file.write_text("x")
    (tmp_path / "l").symlink_to("d/f")
    before = manifest.list_files(tmp_path)
    file.touch()
    assert manifest.list_files(tmp_path) == before
    assert [line.split("\t")[0] for line in before] == ["/d", "/d/f", "/l"]
    file.chmod(0o700)
    assert manifest.listing_hash(manifest.list_files(tmp_path)) != manifest.listing_hash(before)


def test_the_largest_image_that_fits_is_the_base_of_a_disk():
    disks = {2048: Path("/small"), 8192: Path("/large")}
    template = TemplateImage("k", "base", disks, Path("/m"), "user", "/home/user", {})
    assert template.disk == Path("/large")
    assert template.disk_for(2048) == (Path("/small"), 2048)
    assert template.disk_for(8191) == (Path("/small"), 2048)
    assert template.disk_for(100_000) == (Path("/large"), 8192)
    with pytest.raises(InvalidRequest):
        template.disk_for(2047)


def test_an_empty_cache_says_what_builds_it(tmp_path: Path):
    with pytest.raises(
        NotFound, match=r"kernel, agent, jail, template base; run `python -m skerry\.images build`"
    ) as caught:
        load(tmp_path)
    assert caught.value.code == "images_not_built"
