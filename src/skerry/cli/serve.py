"""`skerry serve`: puts the parts together, serves, and takes them apart again. Sandboxes run on when it ends.

A server that cannot start says why in one line on standard error. Exit codes are in `docs/reference/settings.md`.
"""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import uvicorn
import uvloop

import skerry
from skerry.api.app import create_app
from skerry.api.e2b.control import create_control_app
from skerry.api.e2b.envd import create_envd_app
from skerry.api.front import Faces, Front
from skerry.api.observe import Metrics
from skerry.api.ports.app import PortsApp
from skerry.api.protocol import HttpProtocol
from skerry.api.server import BACKLOG, server_config
from skerry.cli import client_file, logs
from skerry.cli.curated import curated_list, refreshed
from skerry.cli.settings import Settings
from skerry.control import ControlConfig, Services, open_services
from skerry.control.config import Curated
from skerry.control.tokens import KEY_BYTES
from skerry.control.vault import root_keys
from skerry.core import ids
from skerry.core.errors import Conflict, Forbidden, InvalidRequest, SkerryError, Unauthenticated, Unavailable
from skerry.node.build import build_engine
from skerry.node.config import NodeConfig
from skerry.node.contract import Node, NodeInfo
from skerry.store import Store, open_store

log = structlog.get_logger("skerry.serve")

HANDSHAKE_S: Final = 10
NOTICE_S: Final = 0.05
"""Between telling open streams that the server stops and closing their connections."""

EXIT_CODES: Final = {
    "invalid_settings": 2,
    "address_in_use": 3,
    "address_unusable": 3,
    "qemu_missing": 4,
    "qemu_unusable": 4,
    "images_not_built": 5,
    "needs_root": 6,
    "permission_denied": 6,
    "database_too_new": 7,
    "data_dir_in_use": 8,
    "database_unavailable": 9,
    "database_error": 9,
    "root_key_missing": 10,
    "root_key_unsafe": 10,
    "root_key_damaged": 10,
    "root_key_wrong": 10,
}
"""By the code of the error; any other is 1."""


def serve(settings: Settings) -> int:
    """Serve until a signal (SIGINT, SIGTERM) says to stop. Returns the exit code: 0 after a signal."""
    logs.configure(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except SkerryError as error:
        return cannot_start(error)
    return 0


def cannot_start(error: SkerryError) -> int:
    """Say why in one line on standard error; the exit code for it."""
    line = " ".join(str(error).split())
    print(f"skerry: {line} [{error.code}]", file=sys.stderr, flush=True)
    return EXIT_CODES.get(error.code, 1)


async def _serve(settings: Settings) -> None:
    require_root()
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listen(settings.host, settings.port))
        url = address(listening)
        secure = secure_socket(stack, settings)
        store = await stack.enter_async_context(database(settings))
        roots, made = await root_keys(store, settings.root_key_path)
        asked = asyncio.create_task(curated_list(settings), name="curated list")
        try:
            node = await stack.enter_async_context(_machine(settings))
            curated = await asked
        finally:
            asked.cancel()
        plain_port = listening.getsockname()[1]
        config = ControlConfig(
            max_sandboxes=settings.max_sandboxes,
            max_snapshots=settings.max_snapshots,
            max_paused=settings.max_paused,
            token_key=token_key(settings.token_key_path),
            root_keys=roots,
            port_url=settings.port_url(plain_port),
            curated=Curated(curated.rules(), tuple(curated.found.notes)),
        )
        services = await stack.enter_async_context(open_services(store, node, config))
        await stack.enter_async_context(refreshed(curated, services))
        said = await introduce(services, settings.client_path, url)
        if made:
            said += f"; the root key was made in {settings.root_key_path}: keep a copy of it elsewhere"
        banner = _banner(url, node.info(), settings.client_path, said, secure)
        faces = front(services, settings, settings.sandboxes_domain(plain_port))
        await _Server(faces, settings, banner, secure).serve([listening])
        log.info("stopping; sandboxes run on")


def front(services: Services, settings: Settings, domain: str) -> Front:
    """All faces behind one address; sandboxes have names below `domain`."""
    metrics = Metrics()
    native = create_app(services, max_body_bytes=settings.max_body_bytes, metrics=metrics)
    faces = Faces(
        control=create_control_app(services, domain=domain),
        envd=create_envd_app(services, native.state.stopping, native.state.owned),
        ports=PortsApp(services, native.state.stopping),
    )
    return Front(native, faces, metrics=metrics, domain=domain)


@asynccontextmanager
async def database(settings: Settings) -> AsyncIterator[Store]:
    """The open store; a file of ours is its owner's alone."""
    prepare(settings.data_dir)
    if settings.database_url is None:
        keep_private(settings.data_dir / "skerry.db")
    async with open_store(settings.database) as store:
        yield store


@asynccontextmanager
async def _machine(settings: Settings) -> AsyncIterator[Node]:
    """The running node."""
    upstream_allow, private_allow, allow = settings.egress_lists
    config = NodeConfig(
        data_dir=settings.data_dir,
        cache_dir=settings.cache_dir,
        node_id=node_id(settings.data_dir),
        accelerator=settings.accelerator,
        qemu=settings.qemu,
        max_sandboxes=settings.max_sandboxes,
        pool_floor=settings.pool_floor,
        pool_ceiling=settings.pool_ceiling,
        memory_share=settings.memory_share,
        memory_floor_mb=settings.memory_floor_mb,
        disk_floor_mb=settings.disk_floor_mb,
        disk_mb_per_s=settings.disk_mb_per_s,
        disk_operations_per_s=settings.disk_operations_per_s,
        boots_at_once=settings.boots_at_once,
        boot_deadline_s=settings.boot_deadline_s,
        trust_dir=settings.trust_dir,
        egress_upstream_allow=upstream_allow,
        egress_private_allow=private_allow,
        egress_allow=allow,
        egress_connections=settings.egress_connections,
        egress_connections_per_s=settings.egress_connections_per_s,
        egress_mb_per_s=settings.egress_mb_per_s,
        egress_proxy=settings.egress_proxy,
    )
    async with await build_engine(config) as engine:
        yield engine


# ------------------------------------------------------------------------------------------------------------ address


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. Raises Conflict `address_in_use`, Forbidden `permission_denied`, `address_unusable`."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}: {error.strerror or error}", code="address_unusable") from error
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(BACKLOG)
            listening.setblocking(False)  # noqa: FBT003
        except OSError as error:
            said = f"cannot listen on {host} port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise Conflict(said, code="address_in_use") from error
            if error.errno in {errno.EACCES, errno.EPERM}:
                raise Forbidden(said, code="permission_denied") from error
            raise Unavailable(said, code="address_unusable") from error
        yield listening


@dataclass(frozen=True, slots=True)
class Secure:
    """Where TLS is served as well, and with what."""

    listening: socket.socket
    context: ssl.SSLContext


def secure_socket(stack: AsyncExitStack, settings: Settings) -> Secure | None:
    """The second listener, where there is a certificate. Raises as `listen` does, InvalidRequest `invalid_settings`."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")  # none: a server asks nobody for one
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"tls_cert and tls_key cannot be used: {error}", code="invalid_settings") from error
    return Secure(stack.enter_context(listen(settings.host, settings.tls_port)), context)


def address(listening: socket.socket) -> str:
    """The URL by which clients on this machine reach it."""
    host, port = listening.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104  (recognised, not bound)
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# ------------------------------------------------------------------------------------------------------------ machine


def require_root() -> None:
    """Namespaces, taps and cgroups take root. Raises Forbidden `needs_root`."""
    if os.geteuid() != 0:
        raise Forbidden("skerry serve has to run as root (it makes namespaces, taps and cgroups)", code="needs_root")


def prepare(*directories: Path) -> None:
    """Make the directories that must be there. Raises Forbidden `permission_denied`."""
    for directory in directories:
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise Forbidden(f"cannot make {directory}: {error.strerror}", code="permission_denied") from error


def keep_private(path: Path) -> None:
    """Make sure that only its owner can read it (SQLite gives its companion files the same mode)."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise Forbidden(f"cannot open {path}: {error.strerror}", code="permission_denied") from error


def node_id(data_dir: Path) -> str:
    """This machine's id, made once and kept in `data_dir`."""
    path = data_dir / "node-id"
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = ""
    except OSError as error:
        raise Forbidden(f"cannot read {path}: {error.strerror}", code="permission_denied") from error
    if ids.is_id(found, ids.NODE):
        return found
    made = ids.new_id(ids.NODE)
    try:
        temporary = path.with_suffix(".new")
        temporary.write_text(made + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Forbidden(f"cannot write {path}: {error.strerror}", code="permission_denied") from error
    return made


def _make_token_key(path: Path) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    keep_private(made)
    try:
        made.write_text(secrets.token_hex(KEY_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):  # another server was first: they share its key
            os.link(made, path)
    finally:
        made.unlink()


def token_key(path: Path) -> bytes:
    """What sandboxes' tokens are made of: 32 random bytes as hex digits, made once and kept for its owner alone.

    Raises Forbidden `permission_denied`, InvalidRequest `invalid_settings` where the file holds something else.
    """
    try:
        if not path.exists():
            _make_token_key(path)
        found = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Forbidden(f"cannot use {path}: {error}", code="permission_denied") from error
    if not re.fullmatch(r"[0-9a-fA-F]{64,}", found) or len(found) % 2:
        raise InvalidRequest(f"{path} holds no token key: 64 or more hex digits", code="invalid_settings")
    return bytes.fromhex(found)


# ---------------------------------------------------------------------------------------------------------- first key


async def introduce(services: Services, path: Path, url: str) -> str:
    """Leave address and key for clients on this machine; what is to be said about it.

    The key that stands there is kept while it is good. A lost or revoked one is replaced by a new one.
    """
    key = client_file.read_key(path)
    if key is not None:
        try:
            await services.keys.authenticate(key)
        except Unauthenticated:
            key = None
    said = ""
    if key is None:
        key, fresh = await services.keys.first_key()
        said = "" if fresh else "; the key that stood there was lost or revoked: a new one was made"
    client_file.write(path, url, key)
    return said


def _banner(url: str, info: NodeInfo, path: Path, said: str, secure: Secure | None) -> str:
    if secure is not None:
        url += f" and, with TLS, port {secure.listening.getsockname()[1]}"
    return f"skerry {skerry.__version__} at {url} ({info.vmm}, {info.accelerator}); address and key in {path}{said}"


# ------------------------------------------------------------------------------------------------------------- server


class _Server(uvicorn.Server):
    """uvicorn under our signals: the first stops gracefully, the second at once; neither ends the process itself."""

    def __init__(self, app: Front, settings: Settings, banner: str, secure: Secure | None) -> None:
        super().__init__(server_config(app, stop_grace_s=settings.stop_grace_s))
        self._native = app.native
        self._banner = banner
        self._secure = secure

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._secure is not None:
            self.servers.append(await self._serve_tls(self._secure))
        print(self._banner, flush=True)

    async def _serve_tls(self, secure: Secure) -> asyncio.Server:
        """uvicorn serves either with TLS or without: the same protocol once more, behind TLS."""

        def protocol() -> asyncio.Protocol:
            return HttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        return await asyncio.get_running_loop().create_server(
            protocol, sock=secure.listening, ssl=secure.context, backlog=BACKLOG, ssl_handshake_timeout=HANDSHAKE_S
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._native.state.stopping.set()
        await asyncio.sleep(NOTICE_S)
        await super().shutdown(sockets)
