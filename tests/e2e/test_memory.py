"""Pause, resume, snapshot, fork and their timeouts through the SDK. Cases BUG-08, BUG-29 to BUG-31, BUG-36."""

import concurrent.futures
import threading
import time
import uuid
from datetime import UTC, datetime

import pytest

from skerry import Client, Conflict, NotFound, Sandbox, SkerryError
from support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def timed(client: dict[str, str]) -> Sandbox:
    """One whose minute passes while the other tests run."""
    sandbox = Sandbox.create(memory_mb=256, timeout=60, idle_timeout=None, auto_pause=True, auto_resume=True, **client)
    sandbox.files.write("/dev/shm/x", "kept")
    return sandbox


@pytest.fixture(scope="module", autouse=True)
def idle(client: dict[str, str]) -> Sandbox:
    """And one that nobody uses meanwhile."""
    return Sandbox.create(memory_mb=256, idle_timeout=60, auto_pause=True, **client)


@pytest.fixture(scope="module", autouse=True)
def disk_alone(client: dict[str, str]) -> tuple[Sandbox, str]:
    """And one whose disk alone is kept at its timeout, with the id of its boot."""
    sandbox = Sandbox.create(
        memory_mb=256, timeout=60, idle_timeout=None, auto_pause=True, auto_pause_memory=False, **client
    )
    boot = sandbox.run("cat /proc/sys/kernel/random/boot_id").stdout
    sandbox.commands.start("while :; do date > /tmp/alive; sleep 1; done")
    sandbox.run("echo unsynced > /home/user/f")
    return sandbox, boot


def test_a_paused_sandbox_goes_on_where_it_was(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        counter = sandbox.commands.start("i=0; while :; do echo $((i += 1)); sleep 0.1; done")
        terminal = sandbox.pty()
        terminal.send("export KEPT=$((6 * 7))\n")
        process_id = terminal.process.process_id
        time.sleep(1)
        terminal.close()  # and not the end of a `with` block, which would kill it
        for n in range(3):
            sandbox.files.write(f"/dev/shm/{n}", f"{n}")
            sandbox.files.write(f"/home/user/{n}", f"{n}")
            assert sandbox.pause().state == "paused"
            assert sandbox.pause().state == "paused"
            with pytest.raises(Conflict) as paused:
                sandbox.run("true")
            assert paused.value.code == "sandbox_paused"
            assert Sandbox.resume(sandbox.id, **client).info().state == "running"
            assert [sandbox.files.read(f"{d}/{k}") for k in range(n + 1) for d in ("/dev/shm", "/home/user")] == [
                f"{k}" for k in range(n + 1) for _ in range(2)
            ]
        lines = sandbox.commands.attach(counter.process_id)
        seen = ""
        for event in lines:
            seen += event.text
            if seen.count("\n") > 20:
                break
        assert seen.splitlines()[:20] == [str(k) for k in range(1, 21)]
        with sandbox.pty(process=process_id) as terminal:
            terminal.send("echo =$KEPT=\n")
            text = b""
            while b"=42=" not in text:
                try:
                    text += terminal.recv(timeout=20) or b""
                except TimeoutError:
                    raise AssertionError(f"the terminal went on with {text!r}") from None
        assert counter.kill()


def test_what_was_killed_stays_dead_after_a_resume(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        process = sandbox.commands.start("sleep 500 & sleep 501 & wait")
        assert process.kill()
        sandbox.pause()
        sandbox.resume()
        assert sandbox.run("pgrep -fc '^sleep 50'").stdout == "0\n"


def test_a_disk_only_pause_means_what_it_says(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, env={"MINE": "1"}, **client) as sandbox:
        boot = sandbox.run("cat /proc/sys/kernel/random/boot_id").stdout
        sandbox.commands.start("while :; do date > /tmp/alive; sleep 1; done")
        sandbox.files.write("/home/user/unsynced", "here")
        sandbox.pause(memory=False)
        sandbox.resume()
        assert sandbox.run("cat /proc/sys/kernel/random/boot_id").stdout != boot
        assert sandbox.files.read("/home/user/unsynced") == "here"
        assert sandbox.run("pgrep -fc 'date > /tmp/[a]live'; echo $MINE").stdout == "0\n1\n"
        assert sandbox.commands.list() == [p for p in sandbox.commands.list() if p.state == "exited"]
        sandbox.pause()
        sandbox.resume()
        assert sandbox.files.read("/home/user/unsynced") == "here"


def test_snapshots_are_named_listed_used_and_deleted(client: dict[str, str]) -> None:
    name = f"s{uuid.uuid4().hex[:12]}"
    snapshots = Client(**client).snapshots
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        sandbox.files.write("/dev/shm/x", "memory")
        snapshot = sandbox.snapshot(name)
        assert (snapshot.name, snapshot.state, snapshot.memory_mb) == (name, "ready", 256)
        sandbox.files.write("/dev/shm/x", "later")
        earlier, snapshot = snapshot, sandbox.snapshot(name, idempotency_key=name)
        assert sandbox.snapshot(name, idempotency_key=name) == snapshot
        sandbox.files.write("/dev/shm/x", "last")
    assert [s.id for s in snapshots.list() if s.name == name] == [snapshot.id, earlier.id]
    with Sandbox.create(earlier, **client) as copy:
        assert copy.files.read("/dev/shm/x") == "memory"
    for template in (snapshot, snapshot.id, name):
        with Sandbox.create(template, **client) as copy:
            assert copy.files.read("/dev/shm/x") == "later"
            assert copy.run("hostname").stdout.strip() == copy.id
    with pytest.raises(SkerryError) as other_shape:
        Sandbox.create(name, cpu=4, **client)
    assert other_shape.value.problems[0].field == "cpu"
    snapshots.delete(name)
    for gone in (name, snapshot, earlier):
        with pytest.raises(NotFound):
            Sandbox.create(gone, **client)


def test_forks_are_running_copies(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        sandbox.files.write("/dev/shm/x", "mine")
        copies = sandbox.fork(3, metadata={"copy": "yes"})
        try:
            assert {c.files.read("/dev/shm/x") for c in copies} == {"mine"}
            assert len({c.run("cat /etc/machine-id").stdout for c in [sandbox, *copies]}) == 4
            copies[0].files.write("/dev/shm/x", "other")
            assert [c.files.read("/dev/shm/x") for c in copies[1:]] == ["mine", "mine"]
            assert sandbox.files.read("/dev/shm/x") == "mine"
            assert {c.info().metadata["copy"] for c in copies} == {"yes"}
        finally:
            for copy in copies:
                copy.kill()
        for bad in (0, 21):
            with pytest.raises(SkerryError) as refused:
                sandbox.fork(bad)
            assert refused.value.problems[0].field == "count"


def test_twenty_resumes_and_twenty_pauses_at_once(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox, concurrent.futures.ThreadPoolExecutor(20) as pool:
        sandbox.files.write("/dev/shm/x", "one")
        for _ in range(3):
            assert {i.state for i in pool.map(lambda _: sandbox.pause(), range(20))} == {"paused"}
            back = list(pool.map(lambda _: Sandbox.resume(sandbox.id, **client).id, range(20)))
            assert set(back) == {sandbox.id}
            assert sandbox.files.read("/dev/shm/x") == "one"


def test_pauses_and_requests_in_any_order_never_lose_anything(client: dict[str, str]) -> None:
    sandbox = Sandbox.create(memory_mb=256, auto_pause=True, auto_resume=True, **client)
    stop, pauses, written, wrong = threading.Event(), [0], [0], []

    def pauser() -> None:
        while not stop.is_set():
            try:
                sandbox.pause()
                pauses[0] += 1
            except SkerryError as error:
                if error.retry != "safe":
                    wrong.append(error)
            time.sleep(0.7)

    thread = threading.Thread(target=pauser)
    thread.start()
    try:
        while pauses[0] < 8 or written[0] < 8:
            try:
                sandbox.files.write(f"/home/user/{written[0]}", str(written[0]))
                written[0] += 1
            except SkerryError as error:
                if error.code not in {"sandbox_paused", "sandbox_state", "outcome_unknown", "guest_unreachable"}:
                    wrong.append(error)
    finally:
        stop.set()
        thread.join(60)
    assert wrong == []
    for n in range(written[0]):
        assert sandbox.files.read(f"/home/user/{n}") == str(n)
    sandbox.kill()


def test_killing_a_paused_sandbox_never_wakes_it(client: dict[str, str]) -> None:
    sandbox = Sandbox.create(memory_mb=256, auto_resume=True, auto_pause=True, **client)
    sandbox.pause()
    assert sandbox.kill().state == "killed"
    with pytest.raises(SkerryError) as over:
        sandbox.run("true")
    assert over.value.code == "sandbox_killed"


def test_a_persistent_sandbox_rests_at_its_timeout_and_wakes_at_the_first_request(timed: Sandbox) -> None:
    wait_until(lambda: timed.info().state == "paused", 120)
    assert timed.files.read("/dev/shm/x") == "kept"
    info = timed.info()
    assert (info.state, info.auto_pause, info.auto_resume) == ("running", True, True)
    assert info.expires_at > datetime.now(UTC)
    timed.pause()
    assert timed.run("cat /dev/shm/x").stdout == "kept"
    timed.kill()


def test_an_idle_persistent_sandbox_rests(idle: Sandbox) -> None:
    wait_until(lambda: idle.info().state == "paused", 120)
    idle.resume()
    assert idle.run("echo back").stdout == "back\n"
    idle.kill()


def test_a_deadline_may_keep_the_disk_alone_and_a_resume_may_drop_the_memory(disk_alone: tuple[Sandbox, str]) -> None:
    sandbox, boot = disk_alone
    boots = [boot]
    wait_until(lambda: sandbox.info().state == "paused", 120)
    for memory in (True, True, False):  # there is none to go back to the first time
        sandbox.resume(timeout=600, memory=memory)
        boots.append(sandbox.run("cat /proc/sys/kernel/random/boot_id").stdout)
        assert sandbox.files.read("/home/user/f") == "unsynced\n"
        assert sandbox.run("pgrep -fc 'date > /tmp/[a]live'").stdout == "0\n"
        sandbox.pause()
    assert boots[0] != boots[1] == boots[2] != boots[3]
    sandbox.kill()
