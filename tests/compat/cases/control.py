"""The public methods of `Sandbox` that speak to the control API, blocking, with their error cases."""

import os
import time
from datetime import UTC, datetime, timedelta

import e2b
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState
from runner import Skipped, at_end

NEW = os.environ["SKERRY_COMPAT_CLIENT"] == "python-2.63"
NOWHERE = "sb00000000000000000000"
kept = {}


def box() -> Sandbox:
    """One for the cases that do not end theirs."""
    if "box" not in kept:
        kept["box"] = Sandbox.create("base", timeout=900, metadata={"case": "control", "k y": "v/1"}, envs={"A": "1"})
        at_end.append(kept["box"].kill)
    return kept["box"]


def raises(kind, act, text=""):
    try:
        act()
    except kind as error:
        assert text in str(error), str(error)
        return error
    raise AssertionError(f"nothing was raised; {kind.__name__} was expected")


def ids(paginator) -> list[str]:
    return [one.sandbox_id for one in paginator.next_items()]


def test_create_and_look():
    before = datetime.now(UTC) - timedelta(seconds=2)
    sandbox = box()
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.template_id == "base"
    assert info.name == "base"
    assert info.state == SandboxState.RUNNING
    assert info.metadata == {"case": "control", "k y": "v/1"}
    assert info.started_at > before
    assert timedelta(seconds=880) < info.end_at - info.started_at < timedelta(seconds=1000)
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert Sandbox.get_info(sandbox.sandbox_id).end_at == info.end_at
    here = os.environ["E2B_API_URL"].rpartition(":")[2]
    assert sandbox.get_host(80) == f"80-{sandbox.sandbox_id}.localhost:{here}"


def test_refused_options():
    refused = raises(SandboxException, lambda: Sandbox.create("no-such-template"), "no-such-template")
    assert str(refused).startswith("404: ")
    raises(SandboxException, lambda: Sandbox.create("base", timeout=99_999), "400: timeout: must be from 0 to 14400")
    raises(SandboxException, lambda: Sandbox.create("base", network={"allow_out": ["1.1.1.1"]}), "network.allowOut")
    raises(e2b.AuthenticationException, lambda: Sandbox.create("base", api_key=f"e2b_{'0' * 40}"), "401")


def test_a_short_timeout_is_kept_to():
    sandbox = Sandbox.create("base", timeout=5)
    info = sandbox.get_info()
    assert info.end_at - info.started_at < timedelta(seconds=60)
    gone_by(sandbox.sandbox_id, info.end_at)
    raises(NotFoundException, sandbox.get_info)


def gone_by(sandbox_id, end):
    """It is there until `end`, and not much longer."""
    while datetime.now(UTC) < end - timedelta(seconds=1):
        Sandbox.get_info(sandbox_id)
        time.sleep(0.2)
    for _ in range(300):
        try:
            Sandbox.get_info(sandbox_id)
        except NotFoundException:
            return
        time.sleep(0.2)
    raise AssertionError("it has outlived its timeout")


def test_set_timeout():
    sandbox = box()
    sandbox.set_timeout(1200)
    later = sandbox.get_info().end_at
    assert later - datetime.now(UTC) > timedelta(seconds=1100)
    Sandbox.set_timeout(sandbox.sandbox_id, 600)
    assert sandbox.get_info().end_at < later
    raises(NotFoundException, lambda: Sandbox.set_timeout(NOWHERE, 60))
    brief = Sandbox.create("base", timeout=60)
    brief.set_timeout(0)
    gone_by(brief.sandbox_id, datetime.now(UTC))


def test_connect_only_extends():
    sandbox = box()
    end = sandbox.get_info().end_at
    same = Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert same.sandbox_id == sandbox.sandbox_id
    assert same.get_info().end_at == end
    Sandbox.connect(sandbox.sandbox_id, timeout=1800)
    assert sandbox.get_info().end_at > end
    raises(NotFoundException, lambda: Sandbox.connect(NOWHERE))


def test_list_filters_and_pages():
    mark = f"list-{time.time_ns()}"
    made = [Sandbox.create("base", timeout=120, metadata={"mark": mark, "n": f"{n} é&=%"}) for n in range(3)]
    try:
        newest_first = [one.sandbox_id for one in reversed(made)]
        query = SandboxQuery(metadata={"mark": mark})
        assert ids(Sandbox.list(query=query)) == newest_first
        assert ids(Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "n": "1 é&=%"}))) == [newest_first[1]]
        pages = Sandbox.list(query=query, limit=2)
        assert ids(pages) == newest_first[:2]
        assert pages.has_next
        assert pages.next_token
        made[0].kill()
        assert ids(pages) == []
        assert not pages.has_next
        assert made[1].pause()
        paused = SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])
        (info,) = Sandbox.list(query=paused).next_items()
        assert (info.sandbox_id, info.state) == (made[1].sandbox_id, SandboxState.PAUSED)
        if NEW:
            assert ids(Sandbox.list(query=query, order="asc")) == [made[1].sandbox_id, made[2].sandbox_id]
            started = made[1].get_info().started_at
            after = SandboxQuery(metadata={"mark": mark}, started_after=started, template="base")
            assert ids(Sandbox.list(query=after)) == [made[2].sandbox_id]
            elsewhere = SandboxQuery(metadata={"mark": mark}, template="another")
            assert ids(Sandbox.list(query=elsewhere)) == []
        raises(SandboxException, lambda: Sandbox.list(limit=101).next_items(), "400: limit")
        raises(SandboxException, lambda: Sandbox.list(next_token="x").next_items(), "400: nextToken")
    finally:
        for one in made:
            one.kill()


def test_kill():
    sandbox = Sandbox.create("base", timeout=60)
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert Sandbox.kill(NOWHERE) is False
    raises(NotFoundException, sandbox.get_info)
    raises(NotFoundException, lambda: sandbox.set_timeout(30))
    raises(NotFoundException, lambda: sandbox.pause())
    raises(NotFoundException, lambda: sandbox.create_snapshot())
    raises(NotFoundException, lambda: Sandbox.connect(sandbox.sandbox_id))
    raises(NotFoundException, sandbox.fork)
    raises(NotFoundException, sandbox.get_metrics)


def test_pause_and_resume_by_connect():
    sandbox = Sandbox.create("base", timeout=600)
    try:
        assert sandbox.pause() is True
        assert sandbox.pause() is False
        info = sandbox.get_info()
        assert info.state == SandboxState.PAUSED
        assert info.end_at <= datetime.now(UTC)
        back = sandbox.connect(timeout=120)
        assert back.sandbox_id == sandbox.sandbox_id
        info = sandbox.get_info()
        assert info.state == SandboxState.RUNNING
        assert timedelta(seconds=60) < info.end_at - datetime.now(UTC) <= timedelta(seconds=121)
        assert sandbox.pause(keep_memory=False)
        sandbox.connect()
        assert sandbox.get_info().state == SandboxState.RUNNING
        if NEW:
            assert sandbox.pause(mode="full", strict=True)
            assert sandbox.connect(on_resume="reboot").get_info().state == SandboxState.RUNNING
    finally:
        assert sandbox.kill()


def test_a_paused_one_can_be_killed():
    sandbox = Sandbox.create("base", timeout=60)
    sandbox.pause()
    assert sandbox.kill() is True
    raises(NotFoundException, lambda: sandbox.connect())


def test_it_is_paused_at_its_timeout_if_that_was_asked_for():
    sandbox = Sandbox.create("base", timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": False})
    try:
        assert sandbox.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
        sandbox.set_timeout(0)
        for _ in range(300):
            if sandbox.get_info().state == SandboxState.PAUSED:
                break
            time.sleep(0.2)
        assert sandbox.get_info().state == SandboxState.PAUSED
        assert sandbox.connect().get_info().state == SandboxState.RUNNING
    finally:
        sandbox.kill()


def test_snapshots():
    sandbox = box()
    name = f"control-{time.time_ns()}"
    snapshot = sandbox.create_snapshot(name=name)
    assert any(name in each for each in snapshot.names)
    nameless = Sandbox.create_snapshot(sandbox.sandbox_id)
    try:
        found = [one.snapshot_id for one in Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()]
        assert found == [nameless.snapshot_id, snapshot.snapshot_id]
        assert nameless.snapshot_id in [one.snapshot_id for one in Sandbox.list_snapshots().next_items()]
        copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
        try:
            assert copy.get_info().state == SandboxState.RUNNING
            if NEW:
                of_it = Sandbox.list(query=SandboxQuery(template=snapshot.snapshot_id))
                assert ids(of_it) == [copy.sandbox_id]
        finally:
            copy.kill()
    finally:
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(nameless.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    raises(SandboxException, lambda: Sandbox.create(snapshot.snapshot_id), "404")
    raises(NotFoundException, lambda: Sandbox.create_snapshot(NOWHERE))


def test_fork():
    forks = box().fork(count=2, timeout=60)
    try:
        assert all(isinstance(one, Sandbox) for one in forks), forks
        assert len({box().sandbox_id, *(one.sandbox_id for one in forks)}) == 3
        assert all(one.get_info().state == SandboxState.RUNNING for one in forks)
    finally:
        for one in forks:
            one.kill()
    raises(NotFoundException, lambda: Sandbox.fork(NOWHERE))


def test_metrics():
    sandbox = box()
    metrics = sandbox.get_metrics()
    assert len(metrics) >= 1
    last = metrics[-1]
    assert last.cpu_count == 1
    assert 0 < last.mem_used < last.mem_total
    assert 0 < last.disk_used < last.disk_total
    assert abs((last.timestamp - datetime.now(UTC)).total_seconds()) < 60
    past = sandbox.get_metrics(end=datetime.now(UTC) - timedelta(hours=1))
    assert past == []
    raises(NotFoundException, lambda: Sandbox.get_metrics(NOWHERE))


def test_update_network():
    sandbox = box()
    sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    assert sandbox.get_info().allow_internet_access is False
    sandbox.update_network({})
    assert sandbox.get_info().allow_internet_access is True
    raises(SandboxException, lambda: sandbox.update_network({"allow_out": ["1.1.1.1"]}), "400: allowOut")
    raises(NotFoundException, lambda: Sandbox.update_network(NOWHERE, {}))


def test_an_idempotency_key():
    if not NEW:
        raise Skipped("this generation has none")
    key = f"case-{time.time_ns()}"
    one = Sandbox.create("base", timeout=60, idempotency_key=key)
    try:
        assert Sandbox.create("base", timeout=60, idempotency_key=key).sandbox_id == one.sandbox_id
        raises(SandboxException, lambda: Sandbox.create("base", timeout=61, idempotency_key=key), "422")
    finally:
        one.kill()


def test_is_running():
    sandbox = Sandbox.create("base", timeout=60)
    assert sandbox.is_running() is True
    sandbox.pause()
    assert sandbox.is_running() is False
    sandbox.connect()
    assert sandbox.is_running() is True
    sandbox.kill()
    assert sandbox.is_running() is False


def test_what_is_not_here_is_said():
    template = e2b.Template().from_image("debian")
    raises(Exception, lambda: e2b.Template.build(template, alias="x"), "501")
    assert e2b.Template.alias_exists("base") is True
    assert e2b.Template.alias_exists("never-was") is False
    raises(Exception, lambda: e2b.Volume.list(), "501")
