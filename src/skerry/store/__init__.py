"""The database: SQLAlchemy tables, repositories, migrations. The only place that knows SQLite from PostgreSQL.

async with open_store("sqlite:////var/lib/skerry/skerry.db") as store:
    async with store.write() as tx:
        await tx.sandboxes.add(sandbox)
"""

from skerry.store.engine import Store, Tx, open_store
from skerry.store.paging import Page
from skerry.store.records import (
    MAX_LIFETIME_MS_DEFAULT,
    MAX_PAUSED_DEFAULT,
    MAX_SANDBOXES_DEFAULT,
    MAX_SNAPSHOTS_DEFAULT,
    ApiKey,
    EgressPolicy,
    MadeOf,
    Project,
    Remembered,
    Tenant,
)
from skerry.store.sandboxes import not_found
from skerry.store.vault import Sealed, TenantKey

__all__ = [
    "MAX_LIFETIME_MS_DEFAULT",
    "MAX_PAUSED_DEFAULT",
    "MAX_SANDBOXES_DEFAULT",
    "MAX_SNAPSHOTS_DEFAULT",
    "ApiKey",
    "EgressPolicy",
    "MadeOf",
    "Page",
    "Project",
    "Remembered",
    "Sealed",
    "Store",
    "Tenant",
    "TenantKey",
    "Tx",
    "not_found",
    "open_store",
]
