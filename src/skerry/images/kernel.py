"""The guests' kernel and initramfs: Debian trixie's cloud kernel, unpacked, and a busybox with our /init."""

import json
import lzma
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images import cpio
from skerry.images.agent import ENTRY
from skerry.images.apt import PrivateApt
from skerry.images.cache import Cache, hash_files, key_of
from skerry.images.model import KernelImage, Progress

HERE: Final = Path(__file__).parent
META_PACKAGE: Final = "linux-image-cloud-amd64"
KERNEL_PACKAGE: Final = r"linux-image-[0-9][^ ]*-cloud-amd64"
MODULES: Final = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio-rng")
"""What a guest needs before its disks are there. ext4 is built into the kernel."""
APPLETS: Final = ("sh", "mount", "mkdir", "modprobe", "sleep", "ln", "switch_root", "poweroff", "reboot")


def kernel_key(apt: PrivateApt) -> str | None:
    """None before the archive's index was fetched."""
    index = apt.index()
    if index is None:
        return None
    recipe = hash_files(HERE, [HERE / "kernel.py", HERE / "cpio.py", HERE / "files" / "init.sh"])
    return key_of({"kind": "kernel", "index": index, "recipe": recipe, "entry": ENTRY})


def find_kernel(cache: Cache, apt: PrivateApt) -> KernelImage | None:
    key = kernel_key(apt)
    place = cache.find("kernel", key) if key else None
    if key is None or place is None:
        return None
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    return KernelImage(
        key=key,
        vmlinuz=place / "vmlinuz",
        initramfs=place / "initramfs.img",
        release=about["release"],
    )


def build_kernel(cache: Cache, apt: PrivateApt, progress: Progress) -> KernelImage:
    """The kernel and initramfs of the index that `apt` holds. Raises InternalError."""
    key = kernel_key(apt)
    if key is None:
        raise InternalError("the archive's index was not fetched", code="no_index")
    step = "kernel and initramfs"
    cache.build(
        "kernel",
        key,
        lambda work: _make(work, apt, lambda text: progress.line(step, text)),
        progress=progress,
        step=step,
    )
    found = find_kernel(cache, apt)
    if found is None:
        raise InternalError("the kernel that was just built is not there", code="cache_unusable")
    return found


def _make(work: Path, apt: PrivateApt, say: Callable[[str], None]) -> None:
    package = apt.depends(META_PACKAGE, KERNEL_PACKAGE)
    release = package.removeprefix("linux-image-")
    tree = work / "tree"
    versions = apt.unpack([package, "busybox-static"], tree, on_line=say)
    (tree / "boot" / f"vmlinuz-{release}").rename(work / "vmlinuz")
    modules = tree / "usr" / "lib" / "modules" / release
    if not modules.is_dir():
        modules = tree / "lib" / "modules" / release
    busybox = (tree / "usr" / "bin" / "busybox").read_bytes()
    image = initramfs(release, busybox, read_modules(modules, MODULES))
    (work / "initramfs.img").write_bytes(image)
    say(f"initramfs {len(image) // 1024} KiB")
    about = {"release": release, "packages": versions}
    (work / "about.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(tree)


def read_modules(directory: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """The wanted modules and those they depend on, decompressed, each after all that it depends on.

    What a module needs it says itself. A name that is neither a file nor built in is an error.
    """
    files = {path.name.split(".ko")[0].replace("_", "-"): path for path in directory.rglob("*.ko*")}
    builtin = {
        Path(line).name.removesuffix(".ko").replace("_", "-")
        for line in (directory / "modules.builtin").read_text(encoding="utf-8").split()
    }
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        plain = name.replace("_", "-")
        if plain in builtin or name in found:
            return
        path = files.get(plain)
        if path is None:
            raise InternalError(f"the kernel has no module {name}", code="package_unexpected")
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
        for needed in module_depends(data):
            add(needed)
        found[path.name.split(".ko")[0]] = data

    for name in wanted:
        add(name)
    return found


def module_depends(module: bytes) -> list[str]:
    """What the module's own .modinfo says it depends on."""
    match = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name for name in (match[1].decode() if match else "").split(",") if name]


def initramfs(release: str, busybox: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The archive. `modules` in the order they have to be loaded.

    It is not compressed: unpacking costs an emulated guest more time than reading 3 MB does.
    """
    base = f"lib/modules/{release}"
    entries = [cpio.directory(path) for path in ("bin", "dev", "lib", "lib/modules", base, "new", "proc", "sys")]
    entries.append(cpio.char_device("dev/console", 5, 1))
    entries.append(cpio.regular("bin/busybox", busybox, 0o755))
    entries += [cpio.symlink(f"bin/{name}", "busybox") for name in APPLETS]
    entries += [cpio.regular(f"{base}/{name}.ko", data) for name, data in modules.items()]
    depends = (
        f"{name}.ko: {' '.join(f'{d}.ko' for d in _load_first(data, modules))}\n" for name, data in modules.items()
    )
    entries.append(cpio.regular(f"{base}/modules.dep", "".join(depends).encode()))
    script = (HERE / "files" / "init.sh").read_text(encoding="utf-8")
    script = script.replace("@MODULES@", " ".join(modules)).replace("@AGENT@", " ".join(ENTRY))
    entries.append(cpio.regular("init", script.encode(), stat.S_IRWXU | 0o055))
    return cpio.archive(entries)


def _load_first(module: bytes, modules: Mapping[str, bytes]) -> list[str]:
    """All that a module needs, nearest first, as modules.dep has it."""
    by_plain = {name.replace("_", "-"): name for name in modules}
    needed: list[str] = []
    for name in module_depends(module):
        present = by_plain.get(name.replace("_", "-"))
        if present is not None:
            needed += [present, *_load_first(modules[present], modules)]
    return list(dict.fromkeys(needed))
