"""The artefacts a guest is made of: kernel, initramfs, agent image, template root filesystems, and the QEMU to run.

`build` makes what is missing and `load` finds what is there; neither ever gives an artefact that is half-built.

    images = load(default_cache_dir())
    images.kernel.vmlinuz, images.kernel.initramfs, images.agent.image
    images.templates["base"].disk_for(8192), images.toolchain.argv
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skerry.core.errors import NotFound, SkerryError
from skerry.images.agent import ENTRY as AGENT_ENTRY
from skerry.images.agent import MOUNTPOINT as AGENT_MOUNTPOINT
from skerry.images.agent import build_agent, find_agent
from skerry.images.apt import PrivateApt
from skerry.images.cache import Cache, default_cache_dir
from skerry.images.compiled import jail
from skerry.images.kernel import build_kernel, find_kernel
from skerry.images.model import AgentImage, ImageSet, KernelImage, Progress, Silent, TemplateImage, Toolchain
from skerry.images.qemu import build_toolchain
from skerry.images.qemu import toolchain as _toolchain
from skerry.images.recipe import NAMES as TEMPLATES
from skerry.images.rootfs import build_template, find_template

__all__ = [
    "AGENT_ENTRY",
    "AGENT_MOUNTPOINT",
    "TEMPLATES",
    "AgentImage",
    "ImageSet",
    "KernelImage",
    "Progress",
    "Silent",
    "TemplateImage",
    "Toolchain",
    "build",
    "default_cache_dir",
    "load",
    "toolchain",
]

SUITES: Final = ("trixie", "trixie-updates", "trixie-security")
"""Debian 13, whatever the host is: Debian 12 and 13 hosts run the same guests."""


def guest_apt(cache: Cache) -> PrivateApt:
    """The private apt that guests are made with."""
    return PrivateApt(cache.root / "apt-trixie", SUITES)


def toolchain(cache_dir: Path, prefer: str | None = None) -> Toolchain:
    """The QEMU to use: see `skerry.images.qemu.toolchain`."""
    return _toolchain(Cache(cache_dir), prefer)


def load(cache_dir: Path, *, guest_source: Path | None = None) -> ImageSet:
    """What is built and belongs to this version of the code. Raises NotFound (`images_not_built`), or for QEMU as
    `toolchain` does.

    Reads no network. `guest_source`: take this directory for the package skerry.guest (for tests).
    """
    cache = Cache(cache_dir)
    apt = guest_apt(cache)
    kernel = find_kernel(cache, apt)
    agent = find_agent(cache, apt, guest_source)
    jailer = jail().find(cache, apt)
    templates = {name: found for name in TEMPLATES if (found := find_template(cache, name, apt)) is not None}
    if kernel is None or agent is None or jailer is None or not templates:
        parts = (("kernel", kernel), ("agent", agent), ("jail", jailer), ("template base", templates))
        missing = [name for name, value in parts if not value]
        raise NotFound(
            f"not built in {cache_dir}: {', '.join(missing)}; run `python -m skerry.images build`",
            code="images_not_built",
            missing=", ".join(missing),
        )
    return ImageSet(kernel=kernel, agent=agent, templates=templates, toolchain=_toolchain(cache), jail=jailer)


def build(
    cache_dir: Path,
    progress: Progress | None = None,
    templates: Sequence[str] = ("base",),
    *,
    refresh: bool = False,
    guest_source: Path | None = None,
) -> ImageSet:
    """Make what is missing. `refresh`: fetch Debian's index anew, and so build whatever has new versions.

    Needs root. Raises InternalError, and NotFound (`template_not_found`) for an unknown template.
    """
    progress = progress or Silent()
    cache = Cache(cache_dir)
    cache.prepare()
    tools = build_toolchain(cache, progress, refresh=refresh)
    apt = guest_apt(cache)
    apt.update(force=refresh)
    try:
        return _build(cache, apt, progress, templates, tools, guest_source)
    except SkerryError as error:
        if refresh or "404" not in error.message:
            raise
    # The mirror has moved on and no longer carries what the kept index names: take its new index.
    progress.line("Debian's index", "is out of date, fetching it anew")
    apt.update(force=True)
    return _build(cache, apt, progress, templates, tools, guest_source)


def _build(
    cache: Cache,
    apt: PrivateApt,
    progress: Progress,
    templates: Sequence[str],
    tools: Toolchain,
    guest_source: Path | None,
) -> ImageSet:
    kernel = build_kernel(cache, apt, progress)
    agent = build_agent(cache, apt, progress, guest_source)
    jailer = jail().build(cache, apt, progress)
    built = {name: build_template(cache, name, apt, progress) for name in templates}
    return ImageSet(kernel=kernel, agent=agent, templates=built, toolchain=tools, jail=jailer)
