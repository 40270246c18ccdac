"""`python -m skerry.images build [TEMPLATE …] [--refresh]` and `python -m skerry.images show`."""

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from skerry.core.errors import SkerryError
from skerry.images import TEMPLATES, ImageSet, build, default_cache_dir, load


class TerminalProgress:
    """A line per step on a terminal, with what it does right now; every line of it where output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None

    def started(self, step: str) -> None:
        if self._status is not None:
            self._status.update(step)
            self._status.start()
        else:
            self._console.print(f"{step} …", highlight=False, markup=False)

    def line(self, step: str, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{step}  [dim]{text[:100].replace('[', chr(92) + '[')}[/dim]")
        else:
            self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def done(self, step: str, seconds: float) -> None:
        if self._status is not None:
            self._status.stop()
        self._console.print(f"✓ {step}  {seconds:.1f} s", highlight=False, markup=False)


def _mb(path: Path) -> str:
    return f"{path.stat().st_blocks * 512 / 1_048_576:.1f} MB"


def show(images: ImageSet, console: Console) -> None:
    tools = images.toolchain
    rows = [
        ("QEMU", f"{tools.version_text} ({tools.source})", tools.qemu, ""),
        ("kernel", images.kernel.release, images.kernel.vmlinuz, _mb(images.kernel.vmlinuz)),
        ("initramfs", "", images.kernel.initramfs, _mb(images.kernel.initramfs)),
        ("agent", images.agent.key, images.agent.image, _mb(images.agent.image)),
    ]
    rows += [
        (f"template {t.name}", f"{size} MB disk", path, _mb(path))
        for t in images.templates.values()
        for size, path in t.disks.items()
    ]
    for name, what, path, size in rows:
        console.print(f"{name:14} {what:32} {size:>9}  {path}", highlight=False, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m skerry.images", description="Build and list guest images.")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="default: %(default)s")
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("build", help="build what is missing")
    making.add_argument("template", nargs="*", metavar="TEMPLATE", help=f"of {', '.join(TEMPLATES)}; default: base")
    making.add_argument("--refresh", action="store_true", help="fetch Debian's index anew and build what changed")
    verbs.add_parser("show", help="list what is built")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    console = Console()
    began = time.monotonic()
    try:
        if options.verb == "build":
            progress = TerminalProgress(console)
            images = build(options.cache_dir, progress, options.template or ("base",), refresh=options.refresh)
            console.print(f"images are ready ({time.monotonic() - began:.1f} s)", highlight=False)
        else:
            images = load(options.cache_dir)
    except SkerryError as error:
        print(f"skerry.images: {error.message}", file=sys.stderr)
        return 1
    show(images, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
