"""Secrets on their way to commands, over a real database and a node whose faults we set."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from skerry.control import Principal
from skerry.core import ids
from skerry.core.errors import Conflict, Forbidden, InternalError, InvalidRequest, NotFound
from skerry.core.models import Bindings, ProcessSpec, Sandbox, SandboxSpec, SnapshotState
from skerry.store.tables import metadata
from support.fake_node import Fault
from support.house import House, command, opened, until
from support.postgres import new_database

VALUE = "postgres://app:Xq7-marker-9w@db/prod"
BOUND = SandboxSpec(secrets=Bindings({"DATABASE_URL": "db-prod"}, {"PGPASSFILE": "pgpass@1"}))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/skerry.db"
    return new_database(request.getfixturevalue("postgres_server"), ids.new_id("db"))


@pytest.fixture
async def house(url: str) -> AsyncIterator[House]:
    async with opened(url) as made:
        await made.services.secrets.put(made.me, "db-prod", VALUE)
        await made.services.secrets.put(made.me, "pgpass", f"{VALUE}#file")
        yield made


def without(house: House, *scopes: str) -> Principal:
    every = {"sandboxes:read", "sandboxes:write", "sandboxes:use", "secrets:read", "secrets:write", "secrets:use"}
    return replace(house.me, key_id="keyother", scopes=frozenset(every - set(scopes)))


async def start(
    house: House, box: Sandbox, secrets: Bindings | None = None, me: Principal | None = None, **given: object
) -> ProcessSpec:
    """What the guest is given."""
    stream = await house.services.processes.start(me or house.me, box.id, command(**given), secrets or Bindings())
    await stream.aclose()
    return house.node.vms[box.id].started[stream.process.process_id]


async def everything(house: House) -> str:
    rows: list[str] = []
    async with house.store.engine.connect() as connection:
        for table in metadata.sorted_tables:
            rows += [str(tuple(row)) for row in await connection.execute(table.select())]
    return "\n".join(rows)


async def test_a_sandboxs_bindings_reach_each_command_and_nothing_else(house: House) -> None:
    box = await house.create(BOUND)
    assert house.node.vms[box.id].spec.secrets == BOUND.secrets  # names, never values
    for _ in range(2):
        given = await start(house, box)
        assert given.secret_env == {"DATABASE_URL": VALUE}
        assert given.secret_files == {"PGPASSFILE": f"{VALUE}#file"}
        assert given.env == {}
        assert "marker" not in repr(given)
    await house.services.processes.list(house.me, box.id)
    page = await house.services.sandboxes.events(house.me, box.id)
    said = [event.detail.get("secrets") for event in page.items if event.action == "command.started"]
    assert said == [{"DATABASE_URL": "db-prod@1", "PGPASSFILE": "pgpass@1"}] * 2
    assert "marker" not in await everything(house)


async def test_what_is_said_last_of_a_variable_counts(house: House) -> None:
    box = await house.create(BOUND)
    given = await start(house, box, env={"DATABASE_URL": "plain"})
    assert (given.env, given.secret_env) == ({"DATABASE_URL": "plain"}, {})
    given = await start(house, box, Bindings(files={"DATABASE_URL": "db-prod"}))
    assert given.secret_env == {}
    assert given.secret_files == {"DATABASE_URL": VALUE, "PGPASSFILE": f"{VALUE}#file"}
    with pytest.raises(InvalidRequest) as twice:
        await start(house, box, Bindings({"A": "db-prod"}), env={"A": "plain"})
    assert [problem.field for problem in twice.value.problems] == ["env.A"]


async def test_the_newest_version_at_the_start_unless_one_is_named(house: House) -> None:
    box = await house.create(BOUND)
    await house.services.secrets.put(house.me, "db-prod", f"{VALUE}#2")
    given = await start(house, box, Bindings({"OLD": "db-prod@1"}))
    assert given.secret_env == {"DATABASE_URL": f"{VALUE}#2", "OLD": VALUE}
    with pytest.raises(NotFound) as missing:
        await start(house, box, Bindings({"A": "db-prod@3"}))
    assert missing.value.code == "secret_not_found"
    assert "db-prod@3" in missing.value.message


async def test_a_deleted_secret_starts_nothing_and_is_still_known(house: House) -> None:
    box = await house.create(BOUND)
    await start(house, box)
    await house.services.secrets.delete(house.me, "db-prod")
    count = len(house.node.vms[box.id].started)
    with pytest.raises(NotFound, match="db-prod"):
        await start(house, box)
    assert len(house.node.vms[box.id].started) == count
    await start(house, box, env={"DATABASE_URL": "plain"})
    await house.restart()
    live = house.services.sandboxes._live.get(box.id)
    assert live is not None
    assert sorted(live.secrets.values()) == [VALUE.encode(), f"{VALUE}#file".encode()]


async def test_binding_takes_a_scope_and_an_existing_secret_of_the_project(house: House) -> None:
    poor = without(house, "secrets:use")
    create = house.services.sandboxes.create
    with pytest.raises(Forbidden, match="secrets:use"):
        await create(poor, BOUND)
    box = await house.create(BOUND)
    with pytest.raises(Forbidden, match="secrets:use"):
        await start(house, box, Bindings({"A": "db-prod"}), poor)
    assert (await start(house, box, me=poor)).secret_env == {"DATABASE_URL": VALUE}  # lent to the sandbox
    with pytest.raises(NotFound):
        await house.create(SandboxSpec(secrets=Bindings({"A": "nope"})))
    other = await house.other_tenant()
    with pytest.raises(NotFound):
        await create(other, BOUND)
    assert len(await house.all()) == 1
    with pytest.raises(InvalidRequest) as wrong:
        await house.create(SandboxSpec(secrets=Bindings({"A B": "db-prod", "C": f"{VALUE} pasted"})))
    assert [problem.field for problem in wrong.value.problems] == ["env.A B", "env.C"]
    assert "marker" not in str(wrong.value) + repr(wrong.value.problems)


async def test_a_memory_that_may_hold_secrets_is_kept_only_where_that_is_said(house: House) -> None:
    box = await house.create()
    take = house.services.snapshots.take
    assert not (await take(house.me, box.id)).holds_secrets
    await start(house, box, Bindings({"A": "db-prod"}))
    with pytest.raises(Conflict) as refused:
        await take(house.me, box.id)
    assert refused.value.code == "secrets_in_memory"
    assert not (await take(house.me, box.id, memory=False)).holds_secrets
    with pytest.raises(Forbidden, match="secrets:use"):
        await take(without(house, "secrets:use"), box.id, keep_secrets=True)
    kept = await take(house.me, box.id, keep_secrets=True)
    assert kept.holds_secrets
    await house.services.sandboxes.pause(house.me, box.id)
    with pytest.raises(Conflict):
        await take(house.me, box.id)
    await house.restart()
    with pytest.raises(Conflict):
        await house.services.snapshots.take(house.me, box.id)
    await house.services.sandboxes.kill(house.me, box.id)
    spec = SandboxSpec(template=kept.id)
    with pytest.raises(Forbidden, match="secrets:use"):
        await house.services.sandboxes.create(without(house, "secrets:use"), spec)
    await house.services.secrets.delete(house.me, "db-prod")
    made = await house.create(spec)
    live = house.services.sandboxes._live.get(made.id)
    assert live is not None
    assert list(live.secrets.values()) == [VALUE.encode()]


async def test_a_secret_that_is_handed_over_while_a_snapshot_is_taken_spoils_it(house: House) -> None:
    box = await house.create()
    gate = asyncio.Event()
    house.node.faults.snapshot = Fault(gate=gate)
    taking = asyncio.create_task(house.services.snapshots.take(house.me, box.id))

    async def begun() -> bool:
        return any(act.startswith("snapshot") for act in house.node.acts)

    await until(begun)
    await start(house, box, Bindings({"A": "db-prod"}))
    gate.set()
    with pytest.raises(Conflict) as spoiled:
        await taking
    assert spoiled.value.code == "secrets_in_memory"
    (record,) = (await house.services.snapshots.list(house.me)).items
    assert record.state is SnapshotState.FAILED

    async def dropped() -> bool:
        return not house.node.snapshots()

    await until(dropped)


async def test_copies_have_what_the_original_has(house: House) -> None:
    box = await house.create(BOUND)
    with pytest.raises(Forbidden, match="secrets:use"):
        await house.services.forks.fork(without(house, "secrets:use"), box.id)
    await start(house, box)
    (copy,) = await house.services.forks.fork(house.me, box.id, env={"PGPASSFILE": "/none"})
    assert isinstance(copy, Sandbox)
    live = house.services.sandboxes._live.get(copy.id)
    assert live is not None
    assert sorted(live.secrets.values()) == [VALUE.encode(), f"{VALUE}#file".encode()]
    given = await start(house, copy)
    assert (given.secret_env, given.secret_files) == ({"DATABASE_URL": VALUE}, {})
    async with house.store.engine.connect() as connection:
        query = text("SELECT count(*) FROM secret_uses WHERE holder_id = :id")
        assert (await connection.execute(query, {"id": copy.id})).scalar_one() == 2


async def test_a_damaged_version_keeps_no_server_from_starting(house: House) -> None:
    box = await house.create(BOUND)
    await start(house, box)
    async with house.store.write() as tx:
        damage = (
            "UPDATE secret_versions SET sealed = :junk WHERE secret_id = (SELECT id FROM secrets WHERE name = :name)"
        )
        await tx.connection.execute(text(damage), {"junk": b"x" * 60, "name": "db-prod"})
    await house.restart()
    live = house.services.sandboxes._live.get(box.id)
    assert live is not None
    assert list(live.secrets.values()) == [f"{VALUE}#file".encode()]
    with pytest.raises(InternalError) as damaged:
        await start(house, box)
    assert damaged.value.code == "secret_damaged"
