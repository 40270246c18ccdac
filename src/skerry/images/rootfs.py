"""Template root filesystems: Debian trixie by mmdebstrap, Node.js, two users, what the recipe adds, as ext4 images."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from skerry.core.errors import InternalError
from skerry.images import ext4
from skerry.images.apt import DPKG_STATUS, PrivateApt, without_credentials
from skerry.images.cache import Cache, hash_files, key_of, locked
from skerry.images.manifest import list_files, listing_hash
from skerry.images.model import Progress, Start, TemplateImage
from skerry.images.node import install_node
from skerry.images.process import run
from skerry.images.recipe import NODE_LOCK, Recipe, load_recipe
from skerry.images.wheels import install_wheels

HERE: Final = Path(__file__).parent
SUITE: Final = "trixie"
MMDEBSTRAP_SECONDS: Final = 3600
UUID: Final = "5b6f1d1e-7d0a-4e4b-9c0c-5ce44a9e0002"
GROWTH_BLOCKS: Final = 100 * 1024 * 1024 * 1024 // ext4.BLOCK
"""Room is kept in the group descriptors to grow to 100 GiB while mounted."""

# No journal. A guest's disk is used in one of two ways: together with the memory that has its dirty pages (pause,
# snapshot, fork: nothing is lost by the kill), or after the guest has synced and frozen it. A VM that crashed is not
# started again from its disk, so a journal would protect nothing and make every write in the guest two.
EXT4_OPTIONS: Final = ("-O", "^has_journal", "-E", f"resize={GROWTH_BLOCKS}", "-i", "16384")


def template_key(name: str, apt: PrivateApt) -> str | None:
    """None before the archive's index was fetched. Raises NotFound (`template_not_found`)."""
    recipe = load_recipe(name)
    index = apt.index()
    if index is None:
        return None
    modules = ["rootfs", "ext4", "node", "manifest", "recipe", *(["wheels"] if recipe.wheels else [])]
    inputs = hash_files(HERE, [HERE / f"{module}.py" for module in modules]) | recipe.inputs()
    return key_of({"kind": "template", "name": name, "index": index, "recipe": inputs})


def find_template(cache: Cache, name: str, apt: PrivateApt) -> TemplateImage | None:
    key = template_key(name, apt)
    place = cache.find(f"template-{name}", key) if key else None
    if key is None or place is None:
        return None
    about = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    return TemplateImage(
        key=key,
        name=name,
        disks={size: place / f"disk-{size}.ext4" for size in about["disks_mb"]},
        manifest=place / "manifest.json",
        default_user=about["default_user"],
        default_cwd=about["default_cwd"],
        env=about["env"],
        cpu=about["cpu"],
        memory_mb=about["memory_mb"],
        start=Start(**about["start"]) if about["start"] else None,
    )


def build_template(cache: Cache, name: str, apt: PrivateApt, progress: Progress) -> TemplateImage:
    """Raises InternalError; NotFound for an unknown name."""
    key = template_key(name, apt)
    if key is None:
        raise InternalError("the archive's index was not fetched", code="no_index")
    step = f"template {name}"
    cache.build(
        f"template-{name}",
        key,
        lambda work: make_template(work, name, apt, lambda text: progress.line(step, text)),
        progress=progress,
        step=step,
    )
    found = find_template(cache, name, apt)
    if found is None:
        raise InternalError("the template that was just built is not there", code="cache_unusable")
    return found


def make_template(work: Path, name: str, apt: PrivateApt, say: Callable[[str], None]) -> None:
    """Build into `work`: disk images, manifest.json and files.tsv."""
    ext4.require_root()
    recipe = load_recipe(name)
    tree = work / "tree"
    _bootstrap(tree, recipe.packages, apt, say)
    node = install_node(tree / "usr" / "local", NODE_LOCK, work / "node", say)
    for wheels in recipe.wheels:
        install_wheels(tree, wheels.lock, wheels.site, wheels.prefix, work / "wheels", say)
    _install_sources(tree, recipe)
    say("settling users, names and caches")
    packages = _packages(tree)
    _configure(tree, recipe, apt)
    _tidy(tree)
    _clamp_times(tree)
    _compile_python(tree, recipe.compile)
    _clamp_times(tree)
    files = list_files(tree)
    (work / "files.tsv").write_text("".join(files), encoding="utf-8", errors="surrogateescape")
    for size in recipe.disks_mb:
        say(f"ext4 image of {size} MB")
        image = work / f"disk-{size}.ext4"
        ext4.make(image, tree, label=f"skerry-{name}"[:16], uuid=UUID, size_kb=size * 1024, options=EXT4_OPTIONS)
    about = {
        "name": name,
        "suite": SUITE,
        "files": len(files),
        "files_sha256": listing_hash(files),
        "packages": packages,
        "node": node,
        "default_user": recipe.default_user,
        "default_cwd": recipe.default_cwd,
        "env": recipe.env,
        "disks_mb": recipe.disks_mb,
        "cpu": recipe.cpu,
        "memory_mb": recipe.memory_mb,
        "start": asdict(recipe.start) if recipe.start else None,
    }
    (work / "manifest.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(tree)


def _install_sources(tree: Path, recipe: Recipe) -> None:
    """Our own code, as a package `skerry` that holds nothing else."""
    for source in recipe.sources:
        place = tree / source.into
        for path in source.files():
            target = place / path.relative_to(source.package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o755 if path.suffix == ".sh" else 0o644)
        (place.parent / "__init__.py").touch(mode=0o644)


def mmdebstrap_argv(tree: Path, packages: Sequence[str], apt: PrivateApt, acquire: Path) -> list[str]:
    """The command line: packages come from the index that `apt` holds, and from its store where it has them."""
    archives = apt.root / "archives"
    return [
        "mmdebstrap", "--variant=minbase", "--mode=root", "--architectures=amd64", "--format=directory",
        f"--include={','.join(packages)}", f"--aptopt={acquire}",
        "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/info/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--skip=update,essential/unlink,cleanup/apt",
        f'--setup-hook=mkdir -p "$1/var/lib/apt/lists/partial" "$1/var/cache/apt/archives/partial"'
        f' && cp -a {apt.lists}/*_* "$1/var/lib/apt/lists/"'
        f' && find {archives} -maxdepth 1 -name "*.deb" -exec cp -t "$1/var/cache/apt/archives/" {{}} +',
        f'--customize-hook=cp -n "$1"/var/cache/apt/archives/*.deb {archives}/',
        SUITE, str(tree), str(apt.sources),
    ]  # fmt: skip


def _bootstrap(tree: Path, packages: Sequence[str], apt: PrivateApt, say: Callable[[str], None]) -> None:
    acquire = tree.parent / "acquire.conf"
    acquire.write_text(run(["apt-config", "dump", "--format", '%F "%v";%n', "Acquire"], timeout=60), encoding="utf-8")

    def line(text: str) -> None:
        if text.startswith("I: "):
            say(text[3:])

    with locked(apt.root / "lock"):
        run(
            mmdebstrap_argv(tree, packages, apt, acquire),
            timeout=MMDEBSTRAP_SECONDS,
            # Programs that packages run would leave compiled modules behind, no two times the same.
            env={
                "SOURCE_DATE_EPOCH": str(ext4.EPOCH),
                "DEBIAN_FRONTEND": "noninteractive",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            on_line=line,
        )
    acquire.unlink()


def _packages(tree: Path) -> dict[str, str]:
    """Versions by name of what is installed."""
    status = tree / DPKG_STATUS.relative_to("/")
    text = run(["dpkg-query", f"--admindir={status.parent}", "-W", "-f", "${Package} ${Version}\n"], timeout=60)
    return dict(sorted(line.split(" ", 1) for line in text.splitlines()))


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _configure(tree: Path, recipe: Recipe, apt: PrivateApt) -> None:
    etc = tree / "etc"
    user = recipe.default_user
    _add_user(tree, user, 1000)
    _write(etc / "sudoers.d" / user, f"{user} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
    _write(etc / "hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
    _write(etc / "hostname", "sandbox\n")
    _write(etc / "resolv.conf", "nameserver 169.254.0.1\n")
    _write(etc / "machine-id", "")
    _write(etc / "fstab", "")
    _write(etc / "default" / "locale", f"LANG={recipe.env['LANG']}\n")
    environment = "".join(f'{name}="{value}"\n' for name, value in sorted(recipe.env.items()))
    _write(etc / "environment", environment)
    path = recipe.env["PATH"]
    _write(etc / "profile.d" / "skerry.sh", f"export LANG=C.UTF-8\nPATH={path}\nexport PATH\n")
    (etc / "apt" / "sources.list.d" / "0000sources.list").unlink(missing_ok=True)  # mmdebstrap's, the same once more
    _write(etc / "apt" / "sources.list", without_credentials(apt.sources.read_text(encoding="utf-8")))
    # A sandbox is thrown away: pip may install into the system's Python, as everyone's instructions expect.
    for marker in (tree / "usr" / "lib").glob("python3*/EXTERNALLY-MANAGED"):
        marker.unlink()


def _add_user(tree: Path, user: str, uid: int) -> None:
    """Written by hand, because useradd puts today's date into the files."""
    day = ext4.EPOCH // 86_400
    additions = {
        "passwd": f"{user}:x:{uid}:{uid}::/home/{user}:/bin/bash\n",
        "group": f"{user}:x:{uid}:\n",
        "shadow": f"{user}:!:{day}:0:99999:7:::\n",
        "gshadow": f"{user}:!::\n",
        "subuid": f"{user}:100000:65536\n",
        "subgid": f"{user}:100000:65536\n",
    }
    for name, line in additions.items():
        with (tree / "etc" / name).open("a", encoding="utf-8") as file:
            file.write(line)
    home = tree / "home" / user
    shutil.copytree(tree / "etc" / "skel", home)
    for path in (home, *home.rglob("*")):
        os.chown(path, uid, uid)
    home.chmod(0o755)


def _tidy(tree: Path) -> None:
    """Remove what a build leaves: caches, logs, lists, back-ups, device nodes, and what must differ by machine."""
    for directory in (
        "var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/cache/ldconfig", "var/log", "tmp", "dev", "run",
        "usr/share/man", "usr/share/info", "usr/share/locale",
    ):  # fmt: skip
        _empty(tree / directory)
    patterns = (
        "etc/*-",
        "var/lib/dpkg/*-old",
        "etc/ssh/ssh_host_*",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "root/.*history",
    )
    for pattern in patterns:
        for path in tree.glob(pattern):
            path.unlink()
    for directory in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
        (tree / directory).mkdir(parents=True, exist_ok=True)


def _empty(directory: Path) -> None:
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _clamp_times(tree: Path) -> None:
    """What is newer than our epoch becomes as old as it: times of a build differ, times in packages do not."""
    for directory, names, files in os.walk(tree, topdown=False):
        for name in (*names, *files):
            path = Path(directory, name)
            if path.lstat().st_mtime > ext4.EPOCH:
                os.utime(path, (ext4.EPOCH, ext4.EPOCH), follow_symlinks=False)
    os.utime(tree, (ext4.EPOCH, ext4.EPOCH))


def _compile_python(tree: Path, more: Sequence[str]) -> None:
    """Byte-compile the guest's Python again, after its sources got the times that the byte code has to name."""
    for cache in (tree / "usr" / "lib").glob("python3*/**/__pycache__"):
        if stat.S_ISDIR(cache.lstat().st_mode):
            shutil.rmtree(cache)
    roots = ["/usr/lib/python3.13", "/usr/lib/python3/dist-packages", *(f"/{directory}" for directory in more)]
    skip = ["-x", r"/(tests?|idlelib|lib2to3/tests|turtledemo)/"]
    run(
        [
            "chroot",
            tree,
            "/usr/bin/python3",
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "timestamp",
            *skip,
            *roots,
        ],
        timeout=900,
        # Of the modules that this imports, too, the compiler writes what is kept: an import's differs.
        env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
