"""What is held open over a rest: watches, terminals, commands, connections within the guest. Cases BUG-27, BUG-36."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry import Conflict, NotFound, Sandbox, SkerryError
from support.server import Server

SKERRY = str(Path(sys.executable).parent / "skerry")


class Followed:
    """What a watch tells, read in a thread."""

    def __init__(self, sandbox: Sandbox, path: str) -> None:
        self.created: list[str] = []
        self.error: SkerryError | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._watch = sandbox.watch(path, recursive=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._watch:
                if event.type == "create" and not event.is_dir:
                    self.created.append(event.path)
                self._news.put(None)
        except SkerryError as error:
            self.error = error
            self._news.put(None)

    def until(self, path: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while path not in self.created:
            assert self.error is None, repr(self.error)
            self._news.get(timeout=max(0.01, deadline - time.monotonic()))

    def ended(self) -> SkerryError:
        self._thread.join(60)
        assert self.error is not None
        return self.error


def wait_for(sandbox: Sandbox, state: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (now := sandbox.info().state) != state:
        assert time.monotonic() < deadline, f"it is {now}, not {state}"
        time.sleep(0.2)


@contextmanager
def sandbox_of(client: dict[str, str], **options: object) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(memory_mb=256, idle_timeout=None, **options, **client)  # type: ignore[arg-type]
    try:
        yield sandbox
    finally:
        sandbox.kill()


def error_of(act: Callable[[], object]) -> SkerryError:
    try:
        found = act()
    except SkerryError as error:
        return error
    raise AssertionError(f"it gave {found!r}")


MAKER = "n=0; while :; do : > /home/user/w/in/$n; n=$((n + 1)); sleep 0.05; done"


def test_a_watch_sees_all_over_five_rests_and_a_killed_server(server: Server, client: dict[str, str]) -> None:
    with sandbox_of(client, timeout=3600) as sandbox:
        sandbox.files.mkdir("/home/user/w/in")
        watch = Followed(sandbox, "/home/user/w")
        maker = sandbox.commands.start(MAKER)  # it goes on to the moment of each pause, and from it
        for n in range(5):
            sandbox.files.write(f"/home/user/w/before{n}", "")
            sandbox.pause()
            if n == 2:
                server.kill()
                server.start()
            time.sleep(1)
            sandbox.resume()
            sandbox.files.mkdir(f"/home/user/w/dir{n}")
            sandbox.run(f": > /home/user/w/dir{n}/after")  # the new directory is watched by now, or told of
            watch.until(f"dir{n}/after")
        assert maker.kill()
        sandbox.run(": > /home/user/w/last")
        watch.until("last")
        made = [int(path.removeprefix("in/")) for path in watch.created if path.startswith("in/")]
        assert made == list(range(len(sandbox.files.list("/home/user/w/in"))))
        assert len(made) > 5
        sandbox.pause(memory=False)
        sandbox.resume()
        error = watch.ended()
        assert isinstance(error, NotFound)
        assert error.code == "watch_not_found"  # it was booted anew: nothing is missed without a word


def test_a_watch_neither_holds_up_a_timeouts_pause_nor_wakes_what_rests(client: dict[str, str]) -> None:
    with sandbox_of(client, timeout=60, auto_pause=True, auto_resume=True) as sandbox:
        sandbox.files.mkdir("/home/user/w")
        watch = Followed(sandbox, "/home/user/w")
        wait_for(sandbox, "paused", 90)
        time.sleep(3)
        assert sandbox.info().state == "paused"
        sandbox.files.write("/home/user/w/woken", "")  # this wakes it
        sandbox.run(": > /home/user/w/seen")
        watch.until("seen")
    assert watch.ended().code == "sandbox_killed"


def test_terminals_and_commands_say_that_it_rests_and_go_on_where_they_were(client: dict[str, str]) -> None:
    with sandbox_of(client, timeout=3600) as sandbox:
        counter = sandbox.commands.start("n=0; while :; do echo $((n += 1)); sleep 0.05; done")
        terminal = sandbox.pty(cols=100)
        terminal.send("N=0; while :; do echo =$((N += 1))=; sleep 0.1; done\n")
        screen, process_id = b"", terminal.process.process_id
        exec_ = [SKERRY, "exec", sandbox.id, "--", "sh", "-c", "while :; do echo x; sleep 0.1; done"]
        environment = {"SKERRY_API_URL": client["url"], "SKERRY_API_KEY": client["api_key"]}
        for _ in range(2):
            line = subprocess.Popen(exec_, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert line.stdout and line.stdout.readline() == b"x\n"
            caught: list[SkerryError] = []

            thread = threading.Thread(target=lambda told=caught: told.append(error_of(counter.wait)))
            thread.start()
            while b"=3=" not in screen:
                screen += terminal.recv(timeout=30) or b""
            time.sleep(0.5)
            sandbox.pause()
            thread.join(60)
            assert [(type(error), error.code, error.retry) for error in caught] == [
                (Conflict, "sandbox_paused", "never")
            ]
            with pytest.raises(Conflict) as rests:
                while True:
                    screen += terminal.recv(timeout=30) or b""
            assert rests.value.code == "sandbox_paused"
            _, said = line.communicate(timeout=60)
            assert (line.returncode, b"is paused" in said) == (125, True), said
            sandbox.resume()
            terminal = sandbox.pty(process=process_id, stdout_offset=len(screen))
        while b"=40=" not in screen:
            screen += terminal.recv(timeout=30) or b""
        numbers = [int(n) for n in screen.decode().replace("\r", "").split("=")[1::2] if n.isdigit()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert counter.kill()
        lines = counter.wait().stdout.split()
        assert lines == [str(n) for n in range(1, len(lines) + 1)]


TALK = """
import socket, time, threading
listening = socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(listening.getsockname())
other, _ = listening.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0)); udp.settimeout(20)
threading.Thread(target=lambda: [other.sendall(d) for d in iter(lambda: other.recv(100), b"")], daemon=True).start()
mine.settimeout(20)
mine.sendall(b"half")
for n in range(10**6):
    mine.sendall(b" %d;half" % n)
    answer = b""
    while not answer.endswith(b";half"):
        answer += mine.recv(100)
    udp.sendto(b"%d" % n, udp.getsockname())
    assert udp.recv(100) == b"%d" % n
    print(n, flush=True)
    time.sleep(0.02)
"""


def test_connections_within_the_guest_go_on_and_the_host_is_there_at_once(client: dict[str, str]) -> None:
    with sandbox_of(client, timeout=3600) as sandbox:
        talk = sandbox.commands.start(["python3", "-u", "-c", TALK])
        said = 0
        for _ in range(5):
            deadline = time.monotonic() + 60
            while True:
                assert talk.poll() is None, talk.stderr
                if len(talk.stdout.split()) > said + 5:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
            said = len(talk.stdout.split())
            sandbox.pause()
            sandbox.resume()
            assert sandbox.run("ip -4 -br addr show eth0 | grep -o 169.254.0.2", timeout=30).stdout == "169.254.0.2\n"
        assert talk.kill()
        numbers = talk.wait().stdout.split()
        assert numbers == [str(n) for n in range(len(numbers))]
        assert talk.stderr == ""


def test_rests_are_not_seen_by_the_guests_own_clock(client: dict[str, str]) -> None:
    """What is counted in time that the guest ran (a deadline, a watch that nobody reads) does not run out in a rest."""
    with sandbox_of(client, timeout=3600) as sandbox:
        begun = time.monotonic()
        first = float(sandbox.run("cut -d' ' -f1 /proc/uptime").stdout)
        sandbox.pause()
        time.sleep(8)
        sandbox.resume()
        last, wall = sandbox.run("cut -d' ' -f1 /proc/uptime; date +%s").stdout.split()
        assert float(last) - first < time.monotonic() - begun - 6
        assert abs(int(wall) - time.time()) < 5
