"""QEMU's command line."""

from dataclasses import replace
from pathlib import Path

import pytest

from skerry.images.model import Toolchain
from skerry.node.vmm.driver import MemoryImage, VmSpec
from skerry.node.vmm.qemu import argv
from skerry.node.vmm.qemu.jail import jailed
from skerry.node.vmm.qemu.probe import probe_argv

TOOLCHAIN = Toolchain(Path("/q/qemu-system-x86_64"), Path("/q/qemu-img"), (10, 0, 2), "path", ("-L", "/q/share"))
SPEC = VmSpec(
    vm_id="sb1",
    cpu=2,
    memory_mb=1024,
    kernel=Path("/c/vmlinuz"),
    initramfs=Path("/c/initramfs"),
    disk=Path("/d/disk.qcow2"),
    agent_image=Path("/c/agent.ext4"),
    run_dir=Path("/d"),
    netns="sk-abc-1",
    tap="tap0",
)
GOLDEN_TCG = """\
/q/qemu-system-x86_64 -L /q/share
-name skerry-sb1
-nodefaults -no-user-config -display none -no-reboot
-action shutdown=pause
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-M microvm,pit=on,pic=on,rtc=on,acpi=on,memory-backend=ram,dump-guest-core=off,suppress-vmdesc=on
-global migration.send-configuration=off
-accel tcg,thread=multi,tb-size=128
-cpu max,la57=off,erms=off,fsrm=off
-smp 2
-m 1024M
-object memory-backend-file,id=ram,size=1024M,share=off,dump=off,mem-path=ram
-kernel /c/vmlinuz
-initrd /c/initramfs
-append console=ttyS0 quiet loglevel=4 reboot=t panic=-1 random.trust_cpu=on tsc_early_khz=2600000 tsc=reliable \
no_timer_check mitigations=off init_on_alloc=0
-chardev ringbuf,id=console,size=65536
-serial chardev:console
-blockdev driver=qcow2,node-name=disk,discard=unmap,cache.no-flush=on,file.driver=file,file.cache.no-flush=on,\
file.filename=/d/disk.qcow2
-device virtio-blk-device,id=vda,drive=disk,serial=disk,werror=report,rerror=report
-blockdev driver=raw,node-name=agent,read-only=on,file.driver=file,file.filename=/c/agent.ext4
-device virtio-blk-device,drive=agent,serial=agent
-netdev tap,id=net,fd=4
-device virtio-net-device,netdev=net,mac=02:00:00:00:00:01
-device virtio-rng-device
-chardev socket,id=monitor,fd=3,server=on,wait=off
-mon chardev=monitor,mode=control
"""


def build(accelerator: argv.Accelerator, spec: VmSpec = SPEC) -> list[str]:
    return argv.build(spec, TOOLCHAIN, accelerator, argv.Inherited(monitor=3, tap=4), tsc_khz=2_600_000)


def test_the_emulated_command_line_is_this() -> None:
    assert " ".join(build("tcg")) == " ".join(GOLDEN_TCG.splitlines())


def test_a_restored_guest_differs_in_its_ram_and_in_what_only_a_boot_needs() -> None:
    booted, restored = build("tcg"), build("tcg", replace(SPEC, restore=MemoryImage.below(Path("/images/x"))))
    ram = booted[booted.index("-object") + 1].replace("mem-path=ram", "mem-path=/images/x/ram,readonly=on,rom=off")
    boot = booted.index("-kernel")
    assert booted[boot : boot + 6 : 2] == ["-kernel", "-initrd", "-append"]
    expected = [*booted[: boot - 1], ram, *booted[boot + 6 :], "-incoming", "defer", "-S"]
    assert booted[boot - 2] == "-object"
    assert restored == expected


def test_kvm_and_emulation_differ_in_accelerator_cpu_and_what_only_emulation_needs() -> None:
    kvm, tcg = build("kvm"), build("tcg")
    assert len(kvm) == len(tcg)
    differences = {kvm[i - 1]: (a, b) for i, (a, b) in enumerate(zip(kvm, tcg, strict=True)) if a != b}
    assert set(differences) == {"-accel", "-cpu", "-append"}
    assert differences["-accel"][0] == "kvm"
    assert differences["-cpu"][0] == "host"
    of_kvm, of_tcg = (set(words.split()) for words in differences["-append"])
    assert of_kvm < of_tcg
    assert {word.split("=")[0] for word in of_tcg - of_kvm} == {
        "tsc_early_khz",
        "tsc",
        "no_timer_check",
        "mitigations",
        "init_on_alloc",
    }


@pytest.mark.parametrize(("cpu", "translation"), [(1, 64), (4, 256), (8, 256)])
def test_translated_code_is_bounded(cpu: int, translation: int) -> None:
    assert f"tcg,thread=multi,tb-size={translation}" in build("tcg", replace(SPEC, cpu=cpu))


def test_a_comma_in_a_path_does_not_start_an_option() -> None:
    command = build("tcg", replace(SPEC, disk=Path("/d,readonly=on/x")))
    assert any(word.endswith("file.filename=/d,,readonly=on/x") for word in command)


@pytest.mark.parametrize("value", ["a b", "a\nb", 'a"b'])
def test_a_kernel_argument_cannot_smuggle_another(value: str) -> None:
    with pytest.raises(ValueError, match="not a kernel argument"):
        build("tcg", replace(SPEC, cmdline={"skerry.x": value}))


def test_extra_kernel_arguments_come_last_and_in_order() -> None:
    command = build("kvm", replace(SPEC, cmdline={"skerry.b": "2", "skerry.a": "1"}))
    assert command[command.index("-append") + 1].endswith(" skerry.a=1 skerry.b=2")


def options(spec: VmSpec, toolchain: Toolchain = TOOLCHAIN) -> dict[str, set[str]]:
    command = jailed(spec, Path("/c/jail"), toolchain, "tcg", ["prog", "--", "arg"])
    end = command.index("--")
    assert command[0] == "/c/jail"
    assert command[end:] == ["--", "prog", "--", "arg"]
    found: dict[str, set[str]] = {}
    for option, value in zip(command[1:end:2], command[2:end:2], strict=True):
        found.setdefault(option, set()).add(value)
    return found


def test_the_jail_shows_a_booted_guests_files_and_lets_it_write_its_own() -> None:
    cgroups = (Path("/cg/a"), Path("/cg/b"))
    found = options(replace(SPEC, cgroup_procs=cgroups, backing=(Path("/d/below.qcow2"), Path("/c/base.ext4"))))
    assert found["-c"] == {"/cg/a", "/cg/b"}
    assert found["-r"] == {"/c/vmlinuz", "/c/initramfs", "/c/agent.ext4", "/d/below.qcow2", "/c/base.ext4"}
    assert found["-w"] == {"/d/disk.qcow2", "/d/ram"}
    assert "/q/qemu-system-x86_64" in found["-R"]
    assert found["-d"] == {"/d"}
    assert "-u" not in found
    assert found["-v"] == {"/dev/null"}


def test_the_jail_shows_an_image_read_only_except_to_a_qemu_that_cannot_open_it_so() -> None:
    spec = replace(SPEC, restore=MemoryImage.below(Path("/images/x")))
    found = options(spec)
    assert found["-r"] == {"/c/agent.ext4", "/images/x/ram"}
    assert found["-w"] == {"/d/disk.qcow2"}
    old = options(spec, replace(TOOLCHAIN, version=(7, 2, 0)))
    assert old["-w"] == {"/d/disk.qcow2", "/images/x/ram"}
    assert old["-u"] == {"0"}


def test_the_probe_uses_the_machine_that_guests_get() -> None:
    probe = probe_argv(TOOLCHAIN, Path("/c/vmlinuz"))
    real = build("kvm")
    assert real[real.index("-M") + 1].startswith(probe[probe.index("-M") + 1])
    for option in ("-accel", "-cpu"):
        assert probe[probe.index(option) + 1] == real[real.index(option) + 1]
