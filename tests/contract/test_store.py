"""The store's promises, the same on SQLite and on a real PostgreSQL."""

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from skerry.core import ids
from skerry.core.audit import AuditEvent, Outcome
from skerry.core.errors import Conflict, InternalError, InvalidRequest, NotFound, Unavailable
from skerry.core.lifecycle import EndReason, Event, State
from skerry.core.models import Sandbox, SandboxSpec, Snapshot, SnapshotState
from skerry.store import ApiKey, MadeOf, Project, Remembered, Store, Tenant, open_store
from skerry.store.migrate import HEAD, known
from skerry.store.tables import metadata as tables
from support.waiting import until

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def sandbox(tenant: str = "a", at: datetime = NOW, **spec: object) -> Sandbox:
    return Sandbox(
        id=ids.new_id(ids.SANDBOX),
        tenant_id=f"tn{tenant}",
        project_id=f"pj{tenant}",
        spec=SandboxSpec(**spec),  # type: ignore[arg-type]
        state=State.CREATING,
        node_id="nd1",
        created_at=at,
        started_at=None,
        expires_at=at + timedelta(minutes=5),
        ended_at=None,
        end_reason=None,
        error=None,
        start_kind=None,
    )


async def add(store: Store, *rows: Sandbox) -> None:
    async with store.write() as tx:
        for row in rows:
            await tx.sandboxes.add(row)


# ----------------------------------------------------------------------------------------------------------- opening


async def test_migrations_and_tables_say_the_same(store: Store) -> None:
    async with store.engine.connect() as connection:
        difference = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync, opts={"compare_type": True}), tables)
        )
    assert difference == []


async def test_a_database_of_the_first_version_is_brought_up_with_what_it_holds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = command.upgrade
    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", lambda config, _: upgrade(config, "0001"))
        async with open_store(url) as store, store.write() as tx:
            at = NOW.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            columns = "id, name, max_sandboxes, max_lifetime_ms, created_at"
            await tx.connection.execute(text(f"INSERT INTO tenants ({columns}) VALUES ('tna', 'a', 10, 1000, '{at}')"))
            await tx.tenants.add_project(Project("pja", "tna", "default", NOW))
            columns = (
                "id, tenant_id, project_id, template, cpu, memory_mb, disk_mb, timeout_ms, metadata, state, node_id, "
                "created_at, expires_at"
            )
            values = f"'sb1', 'tna', 'pja', 'base', 1, 512, 8192, 60000, '{{}}', 'running', 'nd1', '{at}', '{at}'"
            await tx.connection.execute(text(f"INSERT INTO sandboxes ({columns}) VALUES ({values})"))
            insert = "INSERT INTO idempotency VALUES ('tna', :key, :body, 'sb1', :at)"
            await tx.connection.execute(text(insert), {"key": b"k" * 32, "body": b"b" * 32, "at": at})
    async with open_store(url) as store:
        async with store.read() as tx:
            found = await tx.sandboxes.get("sb1")
            assert await tx.tenants.get("tna") == Tenant("tna", "a", 10, 1000, NOW, 100, 100)
            assert await tx.idempotency.find("tna", b"k" * 32, NOW) == Remembered("sb1", ("sb1",), b"b" * 32, NOW)
            assert (await tx.snapshots.page("tna")).items == ()
        assert (found.state, found.created_at, found.spec.auto_pause) == (State.RUNNING, NOW, False)
        assert (found.paused_at, found.remaining_ms, found.rested_ms, found.snapshot_id) == (None, None, 0, None)
        assert found.spec.auto_pause_memory
        async with store.engine.connect() as connection:
            differences = await connection.run_sync(
                lambda sync: compare_metadata(MigrationContext.configure(sync), tables)
            )
        assert differences == []


async def test_opens_again_with_what_was_there(url: str) -> None:
    async with open_store(url) as first, first.write() as tx:
        await tx.tenants.add(Tenant("tna", "a", 10, 1000, NOW))
    async with open_store(url) as second, second.read() as tx:
        assert await tx.tenants.get("tna") == Tenant("tna", "a", 10, 1000, NOW)


def test_the_newest_migration_is_the_one_that_the_code_names() -> None:
    assert known()[0] == HEAD


async def test_refuses_a_newer_database_and_leaves_it_alone(url: str) -> None:
    async with open_store(url) as store, store.write() as tx:
        await tx.connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InternalError) as refused:
        async with open_store(url):
            pass
    assert refused.value.code == "database_too_new"
    assert "9999" in refused.value.message
    assert HEAD in refused.value.message
    assert "\n" not in refused.value.message


async def test_two_servers_may_open_an_empty_database_at_once(url: str) -> None:
    async def open_and_count() -> int:
        async with open_store(url) as store, store.read() as tx:
            return await tx.tenants.count()

    assert await asyncio.gather(*(open_and_count() for _ in range(6))) == [0] * 6


@pytest.mark.parametrize("bad", ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:", "postgresql://h/d"])
async def test_refuses_other_databases(bad: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        async with open_store(bad):
            pass
    assert refused.value.problems[0].field == "database_url"


async def test_a_database_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    for url in (
        f"sqlite:///{tmp_path}/no/such/dir/x.db",
        f"postgresql+psycopg://u:hunter2@/x?host={tmp_path}",
    ):
        with pytest.raises(Unavailable) as refused:
            async with open_store(url):
                pass
        assert refused.value.code == "database_unavailable"
        assert "hunter2" not in str(refused.value)
    # The thread of a connection that failed still tells this test's loop that it ends.
    await until(lambda: not any("_connection_worker_thread" in thread.name for thread in threading.enumerate()))


# ------------------------------------------------------------------------------------------------------ transactions


async def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    row = sandbox()
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await tx.sandboxes.add(row)
            raise Conflict("no")
    async with store.read() as tx:
        with pytest.raises(NotFound):
            await tx.sandboxes.get(row.id)


async def test_a_refused_statement_is_ours_and_repeats_no_value(store: Store) -> None:
    row = sandbox(metadata={"canary": "s3cr3t"})
    await add(store, row)
    with pytest.raises(InternalError) as refused:
        await add(store, row)
    assert refused.value.code == "database_error"
    assert "s3cr3t" not in str(refused.value)


async def test_foreign_keys_hold(store: Store) -> None:
    with pytest.raises(InternalError):
        await add(store, replace(sandbox(), tenant_id="tnnone"))


async def test_many_writers_at_once_all_succeed(store: Store) -> None:
    rows = [sandbox() for _ in range(40)]
    await asyncio.gather(*(add(store, row) for row in rows))
    async with store.read() as tx:
        assert await tx.sandboxes.count_live("tna") == 40


async def test_a_cancelled_writer_lets_the_next_one_in(store: Store) -> None:
    entered = asyncio.Event()

    async def hang() -> None:
        async with store.write() as tx:
            await tx.sandboxes.add(sandbox())
            entered.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(hang())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await add(store, sandbox())
    async with store.read() as tx:
        assert await tx.sandboxes.count_live("tna") == 1


# --------------------------------------------------------------------------------------------------------- sandboxes


async def test_a_sandbox_comes_back_as_it_was_without_its_environment(store: Store) -> None:
    row = sandbox(
        at=NOW.astimezone(timezone(timedelta(hours=5))),
        template="base:v1",
        cpu=2,
        idle_timeout_ms=None,
        env={"A": "canary-value"},
        metadata={"k": "v", "snow \u2603": '"\\', "": "empty"},
    )
    await add(store, row)
    async with store.read() as tx:
        found = await tx.sandboxes.get(row.id)
        assert found == replace(row, spec=replace(row.spec, env={}))
        assert found.created_at.tzinfo is UTC
        dump = (await tx.connection.execute(text("SELECT * FROM sandboxes"))).all()
    assert "canary-value" not in repr(dump)


async def test_times_keep_their_microseconds_and_their_order(store: Store) -> None:
    times = [NOW.replace(microsecond=0) + timedelta(microseconds=n) for n in (0, 1, 10, 999_999, 1_000_000)]
    await add(store, *(sandbox(at=at) for at in times))
    async with store.read() as tx:
        page = await tx.sandboxes.page("tna")
    assert [item.created_at for item in page.items] == times[::-1]


async def test_naive_times_are_refused(store: Store) -> None:
    with pytest.raises(InternalError):
        await add(store, sandbox(at=NOW.replace(tzinfo=None)))


async def test_a_transition_is_compare_and_set(store: Store) -> None:
    row = sandbox()
    await add(store, row)
    async with store.write() as tx:
        running = await tx.sandboxes.apply(row, Event.STARTED, at=NOW, started_at=NOW, start_kind="boot")
        assert running is not None
        assert (running.state, running.started_at, running.start_kind) == (State.RUNNING, NOW, "boot")
        assert await tx.sandboxes.apply(row, Event.STARTED, at=NOW) is None
        assert await tx.sandboxes.get(row.id) == running
    async with store.write() as tx:
        killed = await tx.sandboxes.apply(running, Event.KILL, at=NOW, reason=EndReason.IDLE, error="e")
        assert killed is not None
        assert (killed.state, killed.ended_at, killed.end_reason, killed.error) == (
            State.KILLED,
            NOW,
            EndReason.IDLE,
            "e",
        )
    async with store.write() as tx:
        with pytest.raises(Conflict):
            await tx.sandboxes.apply(killed, Event.STARTED, at=NOW)
        assert await tx.sandboxes.get(row.id) == killed


async def test_of_racing_transitions_exactly_one_wins(store: Store) -> None:
    row = sandbox()
    await add(store, row)

    async def kill() -> bool:
        async with store.write() as tx:
            return await tx.sandboxes.apply(row, Event.KILL, at=NOW, reason=EndReason.KILLED) is not None

    assert sum(await asyncio.gather(*(kill() for _ in range(10)))) == 1


async def test_a_deadline_moves_only_while_the_state_is_the_same(store: Store) -> None:
    row = sandbox()
    await add(store, row)
    async with store.write() as tx:
        moved = await tx.sandboxes.set_expiry(row, timeout_ms=7, expires_at=NOW)
        assert moved is not None
        assert (moved.expires_at, moved.spec.timeout_ms) == (NOW, 7)
        await tx.sandboxes.apply(row, Event.KILL, at=NOW, reason=EndReason.KILLED)
        assert await tx.sandboxes.set_expiry(row, timeout_ms=8, expires_at=NOW) is None


HOSTILE = ["a", "a b", "a.b", 'q"q', "q'q", "$", "$.a", "[0]", "\\", "snow \u2603", "%", "", "a\nb", "\U0001f600"]


@pytest.mark.parametrize("key", HOSTILE)
async def test_metadata_is_data(store: Store, key: str) -> None:
    wanted = sandbox(metadata={key: f"v{key}", "other": "1"})
    await add(store, wanted, sandbox(metadata={key: "else"}), sandbox(metadata={"other": "1"}), sandbox())
    async with store.read() as tx:
        for given in ({key: f"v{key}"}, {key: f"v{key}", "other": "1"}):
            page = await tx.sandboxes.page("tna", metadata=given)
            assert [item.id for item in page.items] == [wanted.id]
        assert (await tx.sandboxes.page("tna", metadata={key: f"v{key}", "other": "2"})).items == ()


async def test_filters_and_tenants(store: Store) -> None:
    mine, foreign = sandbox(template="x"), sandbox("b", template="x")
    other = sandbox(template="y")
    await add(store, mine, foreign, other)
    async with store.write() as tx:
        await tx.sandboxes.apply(other, Event.KILL, at=NOW, reason=EndReason.KILLED)

    async def found(**given: object) -> set[str]:
        async with store.read() as tx:
            return {s.id for s in (await tx.sandboxes.page("tna", **given)).items}  # type: ignore[arg-type]

    assert await found() == {mine.id, other.id}
    assert await found(template="x") == {mine.id}
    assert await found(states=[State.KILLED]) == {other.id}
    assert await found(states=[State.KILLED, State.CREATING]) == {mine.id, other.id}
    assert await found(project_id="pja") == {mine.id, other.id}
    assert await found(project_id="pjb") == set()


async def test_pages_are_stable_while_rows_come_and_go(store: Store) -> None:
    # Times collide on purpose: the id decides then.
    rows = [sandbox(at=NOW + timedelta(seconds=n // 5)) for n in range(23)]
    await add(store, *rows)
    seen: list[str] = []
    cursor = None
    pages = 0
    while True:
        async with store.read() as tx:
            page = await tx.sandboxes.page("tna", limit=5, cursor=cursor)
        seen += [item.id for item in page.items]
        pages += 1
        await add(store, sandbox(at=NOW + timedelta(hours=pages)))  # newer ones come meanwhile
        async with store.write() as tx:  # and the last one that was seen goes
            await tx.connection.execute(text("DELETE FROM sandboxes WHERE id = :id"), {"id": seen[-1]})
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [row.id for row in sorted(rows, key=lambda r: (r.created_at, r.id), reverse=True)]
    assert pages == 5


@pytest.mark.parametrize(
    "cursor", ["x", "", "W10", "WzEsMl0", "bnVsbA", "WyJhIiwiYiJd", "WzFlOTk5LCJhIl0", "é", "[" * 50]
)
async def test_a_made_up_cursor_is_refused(store: Store, cursor: str) -> None:
    async with store.read() as tx:
        with pytest.raises(InvalidRequest) as refused:
            await tx.sandboxes.page("tna", cursor=cursor)
    assert refused.value.problems[0].field == "cursor"


# ------------------------------------------------------------------------------------------------------- idempotency


async def test_an_idempotency_key_is_claimed_once_for_a_day(store: Store) -> None:
    first, second = sandbox(), sandbox()
    await add(store, first, second)
    key, body = b"k" * 32, b"b" * 32
    async with store.write() as tx:
        assert await tx.idempotency.claim("tna", key, body, first.id, NOW) is None
        taken = await tx.idempotency.claim("tna", key, b"c" * 32, second.id, NOW + timedelta(hours=23))
        assert taken is not None
        assert (taken.subject, taken.made, taken.body_hash) == (first.id, (first.id,), body)
        assert await tx.idempotency.find("tna", key, NOW) == taken
        assert await tx.idempotency.find("tnb", key, NOW) is None
        assert await tx.idempotency.find("tna", key, NOW + timedelta(hours=24)) is None
        assert await tx.idempotency.claim("tna", key, body, second.id, NOW + timedelta(hours=24)) is None
        await tx.idempotency.release(second.id)
        assert await tx.idempotency.claim("tna", key, body, first.id, NOW) is None
        assert await tx.idempotency.purge(NOW + timedelta(hours=25)) == 1
        assert await tx.idempotency.claim("tna", key, body, "fk1", NOW, made=[first.id, second.id]) is None
        found = await tx.idempotency.find("tna", key, NOW)
        assert found is not None
        assert (found.subject, found.made) == ("fk1", (first.id, second.id))


# -------------------------------------------------------------------------------------------------------------- keys


async def test_keys(store: Store) -> None:
    key = ApiKey("key1", "tna", "pja", "n", "skerryabcdef", frozenset({"b", "a"}), NOW, None, None)
    async with store.write() as tx:
        await tx.keys.add(key, b"h" * 32)
    async with store.write() as tx:
        assert await tx.keys.by_hash(b"h" * 32) == key
        assert await tx.keys.by_hash(b"x" * 32) is None
        assert await tx.keys.list("tna") == [key]
        assert await tx.keys.list("tnb") == []
        later = NOW + timedelta(hours=1)
        await tx.keys.touch(["key1"], later)
        await tx.keys.touch(["key1"], NOW)
        with pytest.raises(NotFound):
            await tx.keys.revoke("tnb", "key1", NOW)
        assert (await tx.keys.revoke("tna", "key1", NOW)).revoked_at == NOW
        again = await tx.keys.revoke("tna", "key1", later)
        assert (again.revoked_at, again.last_used_at) == (NOW, later)


async def test_the_oldest_project(store: Store) -> None:
    async with store.write() as tx:
        await tx.tenants.add_project(Project("pj0", "tna", "older", NOW - timedelta(days=1)))
        assert (await tx.tenants.oldest_project()).id == "pj0"


# ------------------------------------------------------------------------------------------------------------- audit


def event(n: int, subject: str = "sb1") -> AuditEvent:
    return AuditEvent(
        f"ev{n}", NOW, "tna", None, "system", "a.b", subject, Outcome.OK, {"n": n, "deep": {"list": [1, None, "é"]}}
    )


async def test_audit_keeps_order_and_never_doubles(store: Store) -> None:
    await store.append_audit([event(n) for n in range(5)])
    await store.append_audit([event(n) for n in range(3, 8)])  # a batch that was retried
    await store.append_audit([event(100, "sb2")])
    await store.append_audit([])
    seen: list[AuditEvent] = []
    cursor = None
    while True:
        async with store.read() as tx:
            page = await tx.audit.of_subject("sb1", limit=3, cursor=cursor)
        seen += page.items
        if (cursor := page.next_cursor) is None:
            break
    assert seen == [event(n) for n in range(8)]


async def test_audit_belongs_to_its_transaction(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await tx.audit.append([event(1)])
            raise Conflict("no")
    async with store.read() as tx:
        assert (await tx.audit.of_subject("sb1", limit=3)).items == ()


# --------------------------------------------------------------------------------------------------------- snapshots


def snapshot(of: Sandbox, name: str | None = None, at: datetime = NOW) -> Snapshot:
    return Snapshot(
        id=ids.new_id(ids.SNAPSHOT),
        tenant_id=of.tenant_id,
        project_id=of.project_id,
        name=name,
        sandbox_id=of.id,
        template="base",
        memory=True,
        cpu=1,
        memory_mb=512,
        disk_mb=8192,
        state=SnapshotState.CREATING,
        error=None,
        size_bytes=None,
        stood_still_ms=None,
        node_id="nd1",
        created_at=at,
    )


async def test_a_snapshot_comes_back_as_it_was_and_settles_once(store: Store) -> None:
    box = sandbox()
    await add(store, box)
    made = snapshot(box, "first")
    async with store.write() as tx:
        await tx.snapshots.add(made)
    async with store.write() as tx:
        assert await tx.snapshots.find("tna", made.id) == made == await tx.snapshots.find_named("pja", "first")
        assert await tx.snapshots.find("tnb", made.id) is None
        ready = await tx.snapshots.settle(made, SnapshotState.READY, size_bytes=2**40, stood_still_ms=12.5)
        assert await tx.snapshots.settle(made, SnapshotState.FAILED, error="late") is None
    async with store.write() as tx:
        assert await tx.snapshots.find("tna", made.id, lock=True) == ready
        assert await tx.snapshots.everything() == [ready]
        assert await tx.snapshots.remove(made.id)
        assert not await tx.snapshots.remove(made.id)


async def test_a_name_stands_for_the_newest_snapshot_that_is_ready(store: Store) -> None:
    box, other = sandbox(), sandbox("b")
    await add(store, box, other)
    first, second = snapshot(box, "n"), snapshot(box, "n", NOW + timedelta(seconds=1))
    third = snapshot(box, "n", NOW + timedelta(seconds=2))
    async with store.write() as tx:
        for each in (first, second, snapshot(other, "n"), snapshot(box), snapshot(box)):
            await tx.snapshots.add(each)
        assert await tx.snapshots.find_named("pja", "n") == second  # none is ready: the newest
        ready = await tx.snapshots.settle(first, SnapshotState.READY)
        assert await tx.snapshots.find_named("pja", "n") == ready
        await tx.snapshots.settle(second, SnapshotState.FAILED, error="full")
        assert await tx.snapshots.find_named("pja", "n") == ready
        await tx.snapshots.add(third)
        assert await tx.snapshots.find_named("pja", "n") == ready
        newest = await tx.snapshots.settle(third, SnapshotState.READY)
        assert await tx.snapshots.find_named("pja", "n") == newest
        assert {s.id for s in await tx.snapshots.all_named("pja", "n")} == {first.id, second.id, third.id}
        assert await tx.snapshots.count_kept("tna") == 4
        assert await tx.snapshots.count_kept("tnb") == 1


async def test_snapshots_are_listed_newest_first_in_pages(store: Store) -> None:
    box, other = sandbox(), sandbox()
    await add(store, box, other)
    made = [snapshot(box, f"n{i}", NOW + timedelta(seconds=i // 2)) for i in range(5)]
    async with store.write() as tx:
        for each in (*made, snapshot(other)):
            await tx.snapshots.add(each)
        seen, cursor = [], None
        while True:
            page = await tx.snapshots.page("tna", sandbox_id=box.id, limit=2, cursor=cursor)
            seen += page.items
            if (cursor := page.next_cursor) is None:
                break
        assert sorted(seen, key=lambda s: s.id) == sorted(made, key=lambda s: s.id)
        assert [s.created_at for s in seen] == sorted((s.created_at for s in seen), reverse=True)
        assert (await tx.snapshots.page("tna", name="n3")).items == (made[3],)
        assert (await tx.snapshots.page("tna", project_id="pjb")).items == ()


async def test_a_pause_is_recorded_and_comes_back(store: Store) -> None:
    box = sandbox(auto_pause=True, auto_pause_memory=False)
    await add(store, box)
    async with store.write() as tx:
        row = await tx.sandboxes.apply(box, Event.STARTED, at=NOW, started_at=NOW)
        assert row is not None
        row = await tx.sandboxes.apply(row, Event.PAUSE, at=NOW, paused_at=NOW)
        assert row is not None
        row = await tx.sandboxes.apply(row, Event.PAUSE_DONE, at=NOW, remaining_ms=5)
        assert row is not None
        row = await tx.sandboxes.set_remaining(row, timeout_ms=70_000, remaining_ms=70_000)
    async with store.read() as tx:
        assert await tx.sandboxes.get(box.id) == row
    assert row is not None
    assert (row.paused_at, row.remaining_ms, row.spec.timeout_ms, row.spec.auto_pause) == (NOW, 70_000, 70_000, True)


async def test_sandboxes_in_either_order_by_time_and_by_what_they_are_made_of(store: Store) -> None:
    rows = [replace(sandbox(at=NOW + timedelta(seconds=n)), id=f"sb{n}") for n in range(5)]
    rows[3] = replace(rows[3], snapshot_id="snp1")
    rows[4] = replace(rows[4], spec=replace(rows[4].spec, template="other"))
    await add(store, *rows)

    async def ids(**given: object) -> list[str]:
        found: list[str] = []
        cursor = None
        async with store.read() as tx:
            while True:
                page = await tx.sandboxes.page("tna", limit=2, cursor=cursor, **given)  # type: ignore[arg-type]
                found += [row.id for row in page.items]
                cursor = page.next_cursor
                if cursor is None:
                    return found

    assert await ids() == ["sb4", "sb3", "sb2", "sb1", "sb0"]
    assert await ids(oldest_first=True) == ["sb0", "sb1", "sb2", "sb3", "sb4"]
    assert await ids(created_after=NOW + timedelta(seconds=2)) == ["sb4", "sb3"]
    assert await ids(oldest_first=True, created_after=NOW) == ["sb1", "sb2", "sb3", "sb4"]
    assert await ids(made_of=MadeOf(template="base")) == ["sb2", "sb1", "sb0"]
    assert await ids(made_of=MadeOf(snapshot_ids=("snp1", "snp2"))) == ["sb3"]
    assert await ids(template="base") == ["sb3", "sb2", "sb1", "sb0"]
    async with store.read() as tx:
        assert await tx.sandboxes.uses("tna") == {
            "base": (3, NOW + timedelta(seconds=2)),
            "other": (1, NOW + timedelta(seconds=4)),
        }
        assert await tx.sandboxes.uses("tna", project_id="pjb") == {}


async def test_snapshots_by_name_with_any_tag_and_only_the_newest_of_each(store: Store) -> None:
    box, other = sandbox(), sandbox("b")
    await add(store, box, other)
    names = ("n", "n", "n", "n:v_1", "nx", "n:v.1", None, None)
    made = [snapshot(box, name, NOW + timedelta(seconds=n)) for n, name in enumerate(names)]
    async with store.write() as tx:
        for one in (*made, snapshot(other, "n")):
            await tx.snapshots.add(one)
        ready = [await tx.snapshots.settle(one, SnapshotState.READY) for one in made[:2]]
        await tx.snapshots.settle(made[2], SnapshotState.FAILED, error="full")
    async with store.read() as tx:
        assert await tx.snapshots.find_named("pja", "n") == ready[1]
        assert set(await tx.snapshots.ids_named("pja", "n")) == {made[0].id, made[1].id}
        page = await tx.snapshots.page("tna", name="n", any_tag=True)
        assert [one.name for one in page.items] == ["n:v.1", "n:v_1", "n", "n", "n"]
        page = await tx.snapshots.page("tna", states=[SnapshotState.READY], newest_of_name=True)
        assert page.items == (ready[1],)
        page = await tx.snapshots.page("tna", states=[SnapshotState.CREATING], newest_of_name=True)
        assert [one.name for one in page.items] == [None, None, "n:v.1", "nx", "n:v_1"]


async def test_records_of_a_sandbox_in_either_order_and_by_time(store: Store) -> None:
    events = [replace(event(n), at=NOW + timedelta(seconds=n), action=f"n{n}") for n in range(5)]
    async with store.write() as tx:
        await tx.audit.append(events)

    async def actions(**given: object) -> list[str]:
        found: list[str] = []
        cursor = None
        async with store.read() as tx:
            while True:
                page = await tx.audit.of_subject("sb1", limit=2, cursor=cursor, **given)  # type: ignore[arg-type]
                found += [one.action for one in page.items]
                if (cursor := page.next_cursor) is None:
                    return found

    assert await actions(newest_first=True) == ["n4", "n3", "n2", "n1", "n0"]
    assert await actions(since=NOW + timedelta(seconds=2)) == ["n2", "n3", "n4"]
    assert await actions(until=NOW + timedelta(seconds=2), newest_first=True) == ["n2", "n1", "n0"]
    assert await actions(since=NOW + timedelta(seconds=1), until=NOW + timedelta(seconds=3)) == ["n1", "n2", "n3"]
