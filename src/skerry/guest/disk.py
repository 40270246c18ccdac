"""The root filesystem's size follows its disk's."""

import fcntl
import os
import struct

_EXT4_IOC_RESIZE_FS = 0x40086610
_EXT4_MAGIC = 0xEF53


def grow_root() -> None:
    """Grow / to the whole of its block device, online. Nothing where it fills it already or is not ext4."""
    device = os.stat("/").st_dev
    node = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    try:
        with open(f"{node}/size", "rb", buffering=0) as f:
            size = int(f.read(64)) * 512
        fd = os.open(f"/dev/{os.path.basename(os.readlink(node))}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        block = os.pread(fd, 1024, 1024)
    finally:
        os.close(fd)
    found = filesystem_size(block)
    if found is None:
        return
    blocks, block_size = found
    wanted = size // block_size
    if wanted <= blocks:
        return
    root = os.open("/", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.ioctl(root, _EXT4_IOC_RESIZE_FS, struct.pack("Q", wanted))
    finally:
        os.close(root)


def filesystem_size(superblock: bytes) -> tuple[int, int] | None:
    """(blocks, bytes per block) of an ext4 superblock; None if it is not one."""
    if len(superblock) < 1024 or struct.unpack_from("<H", superblock, 0x38)[0] != _EXT4_MAGIC:
        return None
    low, log_size = struct.unpack_from("<I", superblock, 4)[0], struct.unpack_from("<I", superblock, 0x18)[0]
    wide = struct.unpack_from("<I", superblock, 0x60)[0] & 0x80
    high = struct.unpack_from("<I", superblock, 0x150)[0] if wide else 0
    return (high << 32) | low, 1024 << min(log_size, 6)
