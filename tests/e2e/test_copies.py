"""What a copy, and a sandbox that comes back, knows of itself: clock, environment, name. Cases BUG-17, -36, -38."""

import concurrent.futures
import time

from skerry import Client, Sandbox

VALUES = {"A": "create", "B": "line1\nline2", "C": "$(touch /tmp/pwned)`id`\"'\\", "D": "", "E": "=x=y", "F": "snow ☃"}
SHOW = "python3 -c 'import json, os; print(json.dumps({k: os.environ.get(k) for k in \"ABCDEF\"}))'"


def seen(sandbox: Sandbox) -> dict[str, str]:
    import json

    assert not sandbox.files.exists("/tmp/pwned")
    return json.loads(sandbox.run(SHOW).stdout)


def test_the_environment_is_the_same_after_every_kind_of_return(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, env=VALUES, **client) as sandbox:
        assert seen(sandbox) == VALUES
        for memory in (True, False):
            sandbox.pause(memory=memory)
            sandbox.resume()
            assert seen(sandbox) == VALUES
        (copy,) = sandbox.fork(env={"A": "fork"})
        with copy:
            assert seen(copy) == VALUES | {"A": "fork"}
        snapshot = sandbox.snapshot()
        with Sandbox.create(snapshot, env={"D": "made"}, **client) as made:
            assert seen(made) == VALUES | {"D": "made"}
            assert made.run(SHOW, env={"D": "call"}).stdout.count("call") == 1
        assert Client(**client).snapshots.delete(snapshot)


CLOCK = "import time\nwhile True:\n print(time.time(), flush=True)\n time.sleep(0.05)\n"


def test_no_process_of_a_copy_or_after_a_rest_reads_an_old_clock(client: dict[str, str]) -> None:
    """Not even one that was running in the image, at its first line."""
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        clock = sandbox.commands.start(["python3", "-c", CLOCK])
        while len(clock.stdout.split()) < 3:
            clock.poll()
        snapshot = sandbox.snapshot()
        sandbox.pause()
        rested_at = time.time()
        time.sleep(8)
        back_at = time.time()
        sandbox.resume()
        with Sandbox.create(snapshot, **client) as made:
            for box in (sandbox, made):
                process = box.commands.attach(clock.process_id)
                while process.poll() is None and float(process.stdout.split()[-1]) < back_at - 2:
                    time.sleep(0.2)
                told = [float(line) for line in process.stdout.split()]
                assert told == sorted(told)
                assert not [at for at in told if rested_at + 2 < at < back_at - 2], "it told a time of the rest"
                assert abs(float(box.run("date +%s.%N").stdout) - time.time()) < 5
        assert Client(**client).snapshots.delete(snapshot)


def test_many_at_once_are_each_their_own_and_come_back_as_themselves(client: dict[str, str]) -> None:
    """Networks that others had meanwhile, and warm clones that several ask for at the same moment."""

    def create(_: int) -> Sandbox:
        return Sandbox.create(memory_mb=256, **client)

    def who(sandbox: Sandbox) -> tuple[str, str, str]:
        hostname, machine_id = sandbox.run("hostname; cat /etc/machine-id").stdout.split()
        return hostname, machine_id, sandbox.files.read("/dev/shm/marker")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        boxes = list(pool.map(create, range(4)))
        try:
            list(pool.map(lambda box: box.files.write("/dev/shm/marker", box.id), boxes))
            before = list(pool.map(who, boxes))
            assert [(name, marker) for name, _, marker in before] == [(box.id, box.id) for box in boxes]
            assert len({machine for _, machine, _ in before}) == len(boxes)
            list(pool.map(lambda box: box.pause(), boxes))
            boxes += list(pool.map(create, range(3)))  # they take the networks that are free now
            list(pool.map(lambda box: box.resume(), boxes[:4]))
            assert list(pool.map(who, boxes[:4])) == before
        finally:
            list(pool.map(lambda box: box.kill(), boxes))
