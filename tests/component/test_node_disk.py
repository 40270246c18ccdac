"""The layers we write are what qemu-img takes them for."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from skerry.node.disk import overlay


def qemu_img(*args: str | Path) -> str:
    command = [shutil.which("qemu-img") or "qemu-img", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("size_mb", [2048, 8192, 102_400])
def test_an_empty_layer_is_what_qemu_img_would_make(tmp_path: Path, size_mb: int) -> None:
    base = tmp_path / "base.ext4"
    with base.open("wb") as file:
        file.truncate(64 << 20)
    ours, theirs = tmp_path / "ours.qcow2", tmp_path / "theirs.qcow2"
    overlay.create(ours, base, size_mb << 20)
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", theirs, f"{size_mb}M")
    qemu_img("check", ours)
    said = [json.loads(qemu_img("info", "--output=json", path)) for path in (ours, theirs)]
    for field in ("virtual-size", "format", "backing-filename", "backing-filename-format", "format-specific"):
        assert said[0][field] == said[1][field], field
    assert ours.stat().st_mode & 0o777 == 0o600


def test_reads_come_from_the_base_and_writes_stay_in_the_layer(tmp_path: Path) -> None:
    base, layer = tmp_path / "base.ext4", tmp_path / "layer.qcow2"
    content = b"base" * 1024
    base.write_bytes(content)
    overlay.create(layer, base, 2 << 30)
    qemu_io = [shutil.which("qemu-io") or "qemu-io", "-c", "read -P 0x61 1 1", "-c", "write -P 0x7 1G 64k", str(layer)]
    said = subprocess.run(qemu_io, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "Pattern verification failed" not in said
    qemu_img("check", layer)
    assert base.read_bytes() == content
