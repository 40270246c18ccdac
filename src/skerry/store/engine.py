"""Opening a database, and the two kinds of transaction. The only module that knows SQLite from PostgreSQL's engine.

SQLite: write-ahead log, `synchronous=FULL` (a commit that returned survives a power cut), foreign keys on, and one
writer at a time (a lock in this process, `BEGIN IMMEDIATE` against others), so that no transaction ever fails half way
for having started as a reader. PostgreSQL: read committed; rows that are read to be changed are locked.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from skerry.core.audit import AuditEvent
from skerry.core.errors import InternalError, InvalidRequest, SkerryError, Unavailable
from skerry.store.audit_events import AuditEvents
from skerry.store.egress import EgressPolicies
from skerry.store.idempotency import Idempotency
from skerry.store.migrate import migrate
from skerry.store.sandboxes import Sandboxes
from skerry.store.snapshots import Snapshots
from skerry.store.tenants import ApiKeys, Tenants
from skerry.store.vault import Secrets, TenantKeys

BUSY_S: Final = 10.0
TRANSACTION_S: Final = 30.0
MIGRATE_S: Final = 600.0
_WRITE: Final = "skerry_write"


class Tx:
    """One transaction and the repositories in it."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.tenants = Tenants(connection)
        self.keys = ApiKeys(connection)
        self.sandboxes = Sandboxes(connection)
        self.snapshots = Snapshots(connection)
        self.idempotency = Idempotency(connection)
        self.audit = AuditEvents(connection)
        self.tenant_keys = TenantKeys(connection)
        self.secrets = Secrets(connection)
        self.egress = EgressPolicies(connection)


class Store:
    """An open database. Made by `open_store`.

    Every method and transaction raises only SkerryError: Unavailable `database_unavailable` where the database cannot
    be used now, InternalError `database_error` where it refused a statement of ours.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writer: asyncio.Lock | None = asyncio.Lock() if engine.dialect.name == "sqlite" else None

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Tx]:
        """A transaction that may change things. Commits at the end, rolls back on any exception."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_deadline(TRANSACTION_S))
            stack.enter_context(_Wrapped())
            if self._writer is not None:
                await stack.enter_async_context(self._writer)
            connection = await stack.enter_async_context(self._engine.connect())
            connection = await connection.execution_options(**{_WRITE: True})
            await stack.enter_async_context(connection.begin())
            yield Tx(connection)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Tx]:
        """A transaction that only reads, and sees one state of the database on SQLite."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_deadline(TRANSACTION_S))
            stack.enter_context(_Wrapped())
            connection = await stack.enter_async_context(self._engine.connect())
            await stack.enter_async_context(connection.begin())
            yield Tx(connection)

    async def append_audit(self, events: Sequence[AuditEvent]) -> None:
        """The audit log's backend: append in this order and commit."""
        async with self.write() as tx:
            await tx.audit.append(events)

    async def scrub(self) -> None:
        """Overwrite what was deleted wherever this database keeps it, as far as that is in our hands: SQLite's log is
        written back and emptied. PostgreSQL has a vacuum and a log of its own."""
        if self._engine.dialect.name == "sqlite":
            with _Wrapped():
                async with self._engine.connect() as connection:
                    await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    async def aclose(self) -> None:
        await self._engine.dispose()


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """Open and migrate. `url`: `sqlite:////abs/path`, or `postgresql+psycopg://user@host/name`.

    Raises InvalidRequest for another URL, InternalError `database_too_new`, Unavailable `database_unavailable`.
    """
    engine = _engine(url)
    store = Store(engine)
    try:
        await _migrate(store)
        yield store
    finally:
        await asyncio.shield(store.aclose())


async def _migrate(store: Store) -> None:
    async with _deadline(MIGRATE_S):
        with _Wrapped():
            async with store.engine.connect() as plain:
                connection = await plain.execution_options(**{_WRITE: True})
                async with connection.begin():
                    await connection.run_sync(migrate)


def _engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidRequest.of(
            "database_url",
            "is not a database URL",
            allowed="sqlite:////abs/path or postgresql+psycopg://…",
            code="invalid_settings",
        ) from None
    if parsed.drivername in {"sqlite", "sqlite+aiosqlite"} and (parsed.database or "").startswith("/"):
        return _sqlite(parsed.set(drivername="sqlite+aiosqlite"))
    if parsed.drivername == "postgresql+psycopg":
        return create_async_engine(
            parsed,
            pool_size=8,
            max_overflow=8,
            pool_timeout=BUSY_S,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"connect_timeout": 10, "options": "-c timezone=utc -c application_name=skerry"},
        )
    shown = parsed.render_as_string(hide_password=True)
    raise InvalidRequest.of(
        "database_url",
        "is not supported",
        given=shown,
        allowed="sqlite:////abs/path or postgresql+psycopg://…",
        code="invalid_settings",
    )


def _sqlite(url: URL) -> AsyncEngine:
    engine = create_async_engine(
        url,
        pool_size=4,
        max_overflow=4,
        pool_timeout=BUSY_S,
        hide_parameters=True,
        connect_args={"timeout": BUSY_S},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(dbapi_connection: Any, _record: Any) -> None:
        # The driver must not open transactions by itself: `on_begin` says which kind.
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        _to_wal(cursor)
        for pragma in (
            "synchronous=FULL",
            "foreign_keys=ON",
            f"busy_timeout={int(BUSY_S * 1000)}",
            "temp_store=MEMORY",
            "cache_size=-16384",
            "secure_delete=ON",  # a destroyed key must not stay in a page that is free
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Any) -> None:
        write = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _to_wal(cursor: Any) -> None:
    """Of a new database. SQLite waits for nobody here: of two that switch at once it refuses one, lest they wait for
    each other."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.005)
        else:
            return


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable("the database did not answer in time", code="database_unavailable", retry="unknown") from None


class _Wrapped:
    """Turns the database's exceptions into ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _tb: object) -> None:
        if error is None or isinstance(error, SkerryError):
            return
        if isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError)) and not isinstance(error, TimeoutError):
            raise wrap(error) from error


def wrap(error: BaseException) -> SkerryError:
    """Our error for a database's. The text names the kind and the database's first line, never a parameter."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    line = (str(origin).splitlines() or [""])[0][:300]
    name = type(origin).__name__
    broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if broken or name in {"OperationalError", "InterfaceError"} or isinstance(error, (PoolTimeout, OSError)):
        return Unavailable(f"the database cannot be used now: {line}", code="database_unavailable")
    return InternalError(f"the database refused: {name}: {line}", code="database_error")
