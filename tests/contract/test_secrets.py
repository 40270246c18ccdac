"""The vault's promises, on both databases: who may do what with a secret, what is in the database, keys that go."""

from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest
from sqlalchemy import text

from skerry.control import ControlConfig, Principal, Services, open_services
from skerry.control.config import utc_now
from skerry.control.vault import VERSIONS_KEPT, Vault, erase, root_keys, rotate
from skerry.core.errors import Conflict, Forbidden, InternalError, InvalidRequest, NotFound
from skerry.store import Sealed, Store
from skerry.store.tables import metadata
from skerry.vault import RootKeys, rootkey
from support.fake_node import FakeNode

VALUE = "postgres://app:Xq7-marker-9w@db/prod"
ME = Principal("tna", "pja", "key1", frozenset({"secrets:read", "secrets:write"}))
OTHER = Principal("tnb", "pjb", "key2", frozenset({"admin"}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "root-key"


@pytest.fixture
async def services(store: Store, path: Path) -> AsyncIterator[Services]:
    roots, made = await root_keys(store, path)
    assert made
    async with FakeNode() as node, open_services(store, node, ControlConfig(root_keys=roots)) as opened:
        yield opened


async def value_of(store: Store, path: Path, name: str, version: int | None = None, project: str = "pja") -> str:
    """As a server that starts now would open it."""
    vault = Vault(store, RootKeys.open(path), utc_now)
    async with store.read() as tx:
        where = await tx.secrets.sealed(project, name, version)
        assert where is not None
        return (await vault.open(tx, where)).decode()


async def everything(store: Store) -> str:
    """All rows of all tables, as text."""
    rows: list[str] = []
    async with store.engine.connect() as connection:
        for table in metadata.sorted_tables:
            rows += [str(tuple(row)) for row in await connection.execute(table.select())]
    return "\n".join(rows)


async def test_versions_are_kept_and_the_newest_is_what_the_name_stands_for(
    services: Services, store: Store, path: Path
) -> None:
    for number in range(VERSIONS_KEPT + 2):
        made = await services.secrets.put(ME, "db-prod", f"{VALUE}#{number}")
        assert made.version == number + 1
    assert await value_of(store, path, "db-prod") == f"{VALUE}#{VERSIONS_KEPT + 1}"
    assert await value_of(store, path, "db-prod", 4) == f"{VALUE}#3"
    found, versions = await services.secrets.get(ME, "db-prod")
    assert found == made
    assert [version for version, _ in versions] == list(range(VERSIONS_KEPT + 2, 2, -1))
    assert [secret.name for secret in await services.secrets.list(ME)] == ["db-prod"]


async def test_nothing_in_the_database_is_the_value(services: Services, store: Store, tmp_path: Path) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    with pytest.raises(InvalidRequest):
        await services.secrets.put(ME, "db-prod", f"{VALUE}\0")
    rows = await everything(store)
    assert "db-prod" in rows
    assert "marker" not in rows
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"marker" not in file.read_bytes()


async def test_each_act_is_recorded_without_the_value(services: Services, store: Store) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    await services.secrets.delete(ME, "db-prod")
    with pytest.raises(NotFound):
        await services.secrets.delete(ME, "db-prod")
    await services.secrets.put(ME, "next", VALUE)  # what was said before it is written with it
    async with store.engine.connect() as connection:
        query = "SELECT action, outcome, detail FROM audit_events WHERE action LIKE 'secret%' ORDER BY seq"
        rows = [tuple(row) for row in await connection.execute(text(query))]
    assert "marker" not in str(rows)
    assert [(action, outcome) for action, outcome, _ in rows] == [
        ("secret.put", "ok"), ("secret.deleted", "ok"), ("secret.deleted", "refused"),
        ("secret.put", "ok"),
    ]  # fmt: skip


async def test_scopes_and_projects_are_walls(services: Services) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    assert await services.secrets.list(OTHER) == []
    with pytest.raises(NotFound) as hidden:
        await services.secrets.get(OTHER, "db-prod")
    assert hidden.value.code == "secret_not_found"
    await services.secrets.put(OTHER, "db-prod", VALUE[::-1])
    nobody = Principal("tna", "pja", "key3", frozenset({"sandboxes:write", "sandboxes:use", "secrets:use"}))
    for act in (
        services.secrets.put(nobody, "x", VALUE), services.secrets.list(nobody), services.secrets.get(nobody, "x"),
        services.secrets.delete(nobody, "x"),
    ):  # fmt: skip
        with pytest.raises(Forbidden, match="secrets:"):
            await act


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("", VALUE, "name"), ("a b", VALUE, "name"), ("../x", VALUE, "name"), ("x" * 129, VALUE, "name"),
        ("a@1", VALUE, "name"), ("ok", "short", "value"), ("ok", "aaaaaaaaaaaa", "value"),
        ("ok", "x" * 8 + "\0yz", "value"),
        ("ok", "0123456789" * 2000, "value"), ("ok", "\ud800abcdefghi", "value"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused_by_its_field(
    services: Services, name: str, value: str, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await services.secrets.put(ME, name, value)
    assert [problem.field for problem in refused.value.problems] == [field]
    assert all(value not in str(problem.given) for problem in refused.value.problems)


async def test_a_sealed_value_opens_in_its_own_place_alone(services: Services, store: Store) -> None:
    """Whoever can write to the database cannot make one secret pass for another."""
    await services.secrets.put(ME, "mine", VALUE)
    await services.secrets.put(OTHER, "theirs", VALUE[::-1])
    async with store.write() as tx:
        mine, theirs = await tx.secrets.sealed("pja", "mine", None), await tx.secrets.sealed("pjb", "theirs", None)
        assert mine is not None
        assert theirs is not None
        assert (await services.vault.open(tx, mine)).decode() == VALUE
        for forged in (
            Sealed(mine.tenant_id, mine.project_id, mine.secret_id, mine.name, mine.version, theirs.sealed),
            Sealed(mine.tenant_id, mine.project_id, mine.secret_id, "other", mine.version, mine.sealed),
            Sealed(mine.tenant_id, mine.project_id, mine.secret_id, mine.name, 2, mine.sealed),
            Sealed(mine.tenant_id, "pjb", mine.secret_id, mine.name, mine.version, mine.sealed),
        ):
            with pytest.raises(InternalError) as refused:
                await services.vault.open(tx, forged)
            assert refused.value.code == "secret_damaged"


# ------------------------------------------------------------------------------------------------------- the root key


async def test_a_root_key_that_is_lost_or_another_stops_the_server_and_harms_nothing(
    services: Services, store: Store, path: Path, tmp_path: Path
) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    aside = path.rename(tmp_path / "aside")
    with pytest.raises(InternalError) as missing:
        await root_keys(store, path)
    assert missing.value.code == "root_key_missing"
    assert not path.exists()
    rootkey.create(path)
    roots, made = await root_keys(store, path)
    assert not made
    with pytest.raises(InternalError) as wrong:
        async with FakeNode() as node, open_services(store, node, ControlConfig(root_keys=roots)):
            pass
    assert wrong.value.code == "root_key_wrong"
    aside.rename(path)
    assert await value_of(store, path, "db-prod") == VALUE


async def test_rotation_wraps_every_tenants_key_and_forgets_the_old_one(
    services: Services, store: Store, path: Path
) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    await services.secrets.put(OTHER, "db-prod", VALUE[::-1])
    (old,) = rootkey.read(path)
    done = await rotate(store, path)
    assert (done.tenants, done.finished) == (2, False)
    assert [key.id for key in rootkey.read(path)] == [done.key_id] != [old.id]
    assert await value_of(store, path, "db-prod") == VALUE
    assert await value_of(store, path, "db-prod", project="pjb") == VALUE[::-1]
    # A server that was running meanwhile opens old ones, and closes new ones with the new key.
    await services.secrets.put(ME, "another", VALUE)
    assert await value_of(store, path, "another") == VALUE
    async with store.read() as tx:
        assert {row.root_key_id for row in await tx.tenant_keys.all()} == {done.key_id}


@pytest.mark.parametrize("cut", ["before the keys are wrapped", "after"])
async def test_a_rotation_that_was_cut_off_loses_nothing_and_is_finished_by_the_next(
    services: Services, store: Store, path: Path, cut: str
) -> None:
    await services.secrets.put(ME, "db-prod", VALUE)
    where = "skerry.control.vault._rewrap"
    if cut == "after":
        write, calls = rootkey.write, []

        def second_fails(path: Path, keys: list) -> None:
            calls.append(keys)
            if len(calls) == 2:
                raise RuntimeError("power is gone")
            write(path, keys)

        interruption = patch.object(rootkey, "write", second_fails)
    else:
        interruption = patch(where, side_effect=RuntimeError("power is gone"))
    with interruption, pytest.raises(RuntimeError):
        await rotate(store, path)
    assert len(rootkey.read(path)) == 2
    assert await value_of(store, path, "db-prod") == VALUE
    await services.secrets.put(OTHER, "meanwhile", VALUE)
    done = await rotate(store, path)
    assert done.finished
    assert [key.id for key in rootkey.read(path)] == [done.key_id]
    assert await value_of(store, path, "db-prod") == VALUE
    assert await value_of(store, path, "meanwhile", project="pjb") == VALUE


# -------------------------------------------------------------------------------------------------------------- erase


async def test_an_erased_tenants_secrets_open_no_more(
    services: Services, store: Store, path: Path, tmp_path: Path
) -> None:
    """Not even with all that was in the database before, unless someone kept the key itself: that is gone from the
    file, its free pages and its log."""
    await services.secrets.put(ME, "db-prod", VALUE)
    await services.secrets.put(OTHER, "theirs", VALUE)
    async with store.read() as tx:
        row, where = await tx.tenant_keys.find("tna"), await tx.secrets.sealed("pja", "db-prod", None)
    assert row is not None
    assert row.wrapped is not None
    assert where is not None
    assert await erase(store, "a") == ("tna", 1)
    assert await erase(store, "tna") == ("tna", 0)
    async with store.read() as tx:
        assert await tx.secrets.sealed("pja", "db-prod", None) is None
        with pytest.raises(Conflict) as gone:
            await services.vault.open(tx, where)
    assert gone.value.code == "tenant_key_destroyed"
    with pytest.raises(Conflict):
        await services.secrets.put(ME, "db-prod", VALUE)
    assert await value_of(store, path, "theirs", project="pjb") == VALUE
    await services.vault.check()
    for file in tmp_path.glob("skerry.db*"):
        assert row.wrapped not in file.read_bytes(), file
        assert where.sealed not in file.read_bytes(), file


async def test_a_tenant_without_secrets_can_be_erased_and_gets_none_later(services: Services, store: Store) -> None:
    assert await erase(store, "tnb") == ("tnb", 0)
    with pytest.raises(Conflict):
        await services.secrets.put(OTHER, "late", VALUE)
    with pytest.raises(NotFound):
        await erase(store, "nobody")
