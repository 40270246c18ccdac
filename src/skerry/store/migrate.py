"""Bringing a database to the code's version, and refusing one that is ahead of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, inspect, text

from skerry.core.errors import InternalError

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0008"
"""The revision this code needs. Known without Alembic, whose import takes a tenth of a server's start."""

# Two servers that open one PostgreSQL at the same moment must not both migrate. The number is arbitrary, but ours.
_LOCK = 7_305_803_111


def _config(connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def known() -> list[str]:
    """The revisions that this code can bring a database to, the newest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def migrate(connection: Connection) -> None:
    """Upgrade in the connection's transaction. Raises InternalError `database_too_new` and then changes nothing."""
    if _revisions(connection) == [HEAD]:
        return
    from alembic import command

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    ours = set(known())
    for revision in _revisions(connection):
        if revision not in ours:
            raise InternalError(
                f"the database is newer than this version of skerry (its schema is {revision}, this is {HEAD}); "
                "run the newer version, or use another database",
                code="database_too_new",
                schema=revision,
                known=HEAD,
            )
    command.upgrade(_config(connection), "head")


def _revisions(connection: Connection) -> list[str]:
    if not inspect(connection).has_table("alembic_version"):
        return []
    return list(connection.scalars(text("SELECT version_num FROM alembic_version")))
