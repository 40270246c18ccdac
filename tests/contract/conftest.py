"""A database of each kind, new for each test."""

import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from skerry.store import Project, Store, Tenant, open_store
from support.postgres import new_database

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    return new_database(request.getfixturevalue("postgres_server"), f"t{next(numbers)}")


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """With the tenants `tna` and `tnb`, each with a project."""
    async with open_store(url) as opened:
        async with opened.write() as tx:
            for name in ("a", "b"):
                await tx.tenants.add(Tenant(f"tn{name}", name, 10, 1000, NOW))
                await tx.tenants.add_project(Project(f"pj{name}", f"tn{name}", "default", NOW))
        yield opened
