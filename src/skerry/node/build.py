"""Puts a node together from what is installed and built on this machine."""

from skerry import images
from skerry.egress.upstream import upstream_of
from skerry.node.aio import in_thread, log
from skerry.node.config import NodeConfig
from skerry.node.engine import Engine
from skerry.node.vmm.qemu.driver import QemuDriver
from skerry.node.vmm.qemu.probe import choose


async def build_engine(config: NodeConfig) -> Engine:
    """The engine of this machine, not started yet.

    Raises NotFound `images_not_built`, InternalError `qemu_missing` or `qemu_unusable`, InvalidRequest.
    """
    image_set = await in_thread(images.load, config.cache_dir)
    toolchain = image_set.toolchain
    if config.qemu is not None:
        toolchain = await in_thread(images.toolchain, config.cache_dir, str(config.qemu))
    verdict = await choose(config.accelerator, toolchain, image_set.kernel, config.cache_dir)
    log.debug("accelerator", accelerator=verdict.accelerator, because=verdict.because, qemu=toolchain.version_text)
    upstream = upstream_of(
        config.egress_upstream_allow, config.egress_private_allow, config.egress_allow, config.egress_proxy
    )
    driver = QemuDriver(toolchain, verdict.accelerator, image_set.jail)
    return Engine(config, driver, image_set, upstream=upstream)
