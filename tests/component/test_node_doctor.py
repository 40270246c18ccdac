"""Doctor looks at this very machine; its answers are held against what the tests know of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from skerry.core.models import SandboxSpec
from skerry.node import doctor
from skerry.node.config import NodeConfig
from skerry.node.doctor import Check, examine
from skerry.node.engine import Engine
from skerry.node.net import namespace
from skerry.node.vmm.fake import FakeDriver, Faults
from support.node import StubAgents, built_images, cache_dir, empty_images


async def look(config: NodeConfig) -> dict[str, Check]:
    checks = await examine(config)
    assert len({c.name for c in checks}) == len(checks)
    for check in checks:
        assert check.level == "ok" or check.remedy or check.name == "accelerator", check
    return {c.name: c for c in checks}


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(tmp_path / "data", tmp_path / "cache", accelerator="tcg", slots=0)


async def test_what_this_machine_can_do(config: NodeConfig) -> None:
    checks = await look(config)
    for name in ("host", "root", "tun", "netns", "nft", "state"):
        assert checks[name].level == "ok", checks[name]
    assert checks["images"].level == "fail"
    assert checks["jail"].level == "warn"
    assert "python -m skerry.images build" in (checks["images"].remedy or "")


async def test_the_jail_is_tried(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    built_images(cache_dir())
    config = replace(config, cache_dir=cache_dir())
    assert (await look(config))["jail"].level == "ok"
    old = replace(doctor.images.toolchain(cache_dir()), version=(7, 2, 0))
    monkeypatch.setattr(doctor.images, "toolchain", lambda *_: old)
    assert (await look(config))["jail"].level == "warn"


async def test_what_is_missing_is_said_with_its_remedy(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(doctor.namespace, "TUN", "/nonexistent/tun")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor.cgroup, "detect", lambda: doctor.cgroup.Hierarchies(0, {}, "none here"))
    checks = await look(config)
    assert {name: checks[name].level for name in ("root", "tun", "nft", "cgroups")} == {
        "root": "fail",
        "tun": "fail",
        "nft": "fail",
        "cgroups": "warn",
    }


async def test_the_state_of_a_data_directory(config: NodeConfig, tmp_path: Path) -> None:
    engine = Engine(config, FakeDriver(Faults(agent=False)), empty_images(tmp_path / "images"), agents=StubAgents())
    async with engine:
        await engine.create("sb1", SandboxSpec(memory_mb=256, disk_mb=2048))
        state = (await look(config))["state"]
        assert state.level == "ok"
        assert "with 1 VMs" in state.detail
    state = (await look(config))["state"]
    assert state.level == "warn"
    for part in ("1 VMs", "1 network namespaces", "1 sandbox directories", "1 journal entries"):
        assert part in state.detail
    async with engine:
        await engine.kill("sb1")
    assert (await look(config))["state"].level == "ok"


async def test_other_instances_are_told_and_left_alone(config: NodeConfig) -> None:
    namespace.create("sk-0000aa-x")
    try:
        check = (await look(config))["other instances"]
        assert "0000aa" in check.detail
        assert "sk-0000aa-x" in namespace.names("sk-")
    finally:
        namespace.delete("sk-0000aa-x")
