"""The accelerator's verdict, with programs in QEMU's place: KVM itself cannot be relied on where tests run."""

import json
import stat
from pathlib import Path

import pytest

from skerry.core.errors import InvalidRequest
from skerry.images.model import KernelImage, Toolchain
from skerry.node.vmm.qemu import probe

GOOD = "echo 'Kernel panic - not syncing: VFS: Unable to mount root fs'"


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(probe.ENVIRONMENT, raising=False)
    (tmp_path / "kvm").touch()
    monkeypatch.setattr(probe, "KVM", tmp_path / "kvm")
    monkeypatch.setattr(probe, "DEADLINE_S", 1.0)


def parts(tmp_path: Path, script: str, version: tuple[int, int, int] = (7, 2, 0)) -> tuple[Toolchain, KernelImage]:
    program = tmp_path / "qemu"
    program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return Toolchain(program, program, version, "path"), KernelImage("key", tmp_path / "k", tmp_path / "i", "6")


def runs(tmp_path: Path) -> int:
    path = tmp_path / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (GOOD, True),
        (f"{GOOD}; exit 1", False),
        ("echo 'no such machine' >&2; exit 1", False),
        ("echo 'Booting'", False),
        ("exec sleep 600", False),
        (f"{GOOD}; exec sleep 600", False),
    ],
)
async def test_only_a_guest_that_comes_up_and_resets_in_time_counts(
    tmp_path: Path, script: str, *, expected: bool
) -> None:
    toolchain, kernel = parts(tmp_path, script)
    assert await probe.boots(probe.probe_argv(toolchain, kernel.vmlinuz), {}, 1.0) is expected


async def test_the_verdict_is_kept_for_the_same_kernel_and_qemu(tmp_path: Path) -> None:
    toolchain, kernel = parts(tmp_path, GOOD)
    for _ in range(2):
        verdict = await probe.choose("auto", toolchain, kernel, tmp_path / "cache")
        assert verdict.accelerator == "kvm"
    assert runs(tmp_path) == 1
    toolchain, kernel = parts(tmp_path, "exit 1", (10, 0, 0))
    for _ in range(2):
        verdict = await probe.choose("auto", toolchain, kernel, tmp_path / "cache")
        assert verdict.accelerator == "tcg"
        assert "did not boot" in verdict.because
    assert runs(tmp_path) == 2


async def test_a_broken_cache_is_probed_again(tmp_path: Path) -> None:
    toolchain, kernel = parts(tmp_path, GOOD)
    (tmp_path / "accelerator.json").write_text(json.dumps(["nonsense"]))
    assert (await probe.choose("auto", toolchain, kernel, tmp_path)).accelerator == "kvm"
    (tmp_path / "accelerator.json").write_text("{")
    assert (await probe.choose("auto", toolchain, kernel, tmp_path)).accelerator == "kvm"
    assert runs(tmp_path) == 2


async def test_an_override_is_believed_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain, kernel = parts(tmp_path, GOOD)
    assert (await probe.choose("tcg", toolchain, kernel, tmp_path)).accelerator == "tcg"
    monkeypatch.setenv(probe.ENVIRONMENT, "kvm")
    assert (await probe.choose("tcg", toolchain, kernel, tmp_path)).accelerator == "kvm"
    monkeypatch.setenv(probe.ENVIRONMENT, "xen")
    with pytest.raises(InvalidRequest):
        await probe.choose("auto", toolchain, kernel, tmp_path)
    assert runs(tmp_path) == 0


async def test_without_the_device_nothing_is_run(tmp_path: Path) -> None:
    toolchain, kernel = parts(tmp_path, GOOD)
    (tmp_path / "kvm").unlink()
    verdict = await probe.choose("auto", toolchain, kernel, tmp_path)
    assert verdict.accelerator == "tcg"
    assert runs(tmp_path) == 0
