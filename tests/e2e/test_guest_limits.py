"""What a guest's own limits and oddities do to commands: memory, processes, disk, missing files, many at once."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skerry import CommandDeadline, Sandbox, SkerryError

pytestmark = pytest.mark.vm


@pytest.mark.parametrize("disk_mb", [3000, 12_288])
def test_the_root_filesystem_is_as_large_as_asked(client: dict[str, str], disk_mb: int) -> None:
    with Sandbox.create(disk_mb=disk_mb, memory_mb=256, **client) as sandbox:
        size = int(sandbox.run("df -m --output=size / | tail -1").stdout)
        assert 0.95 * disk_mb < size <= disk_mb
        usable = int(sandbox.run("df -m --output=avail / | tail -1").stdout) - 16
        filled = sandbox.run(f"fallocate -l {usable}M big && stat -c %s big", user="root", cwd="/root")
        assert filled.stdout == f"{usable << 20}\n", filled


def test_a_command_is_born_in_its_cgroup(sandbox: Sandbox) -> None:
    # The leader is gone after one fork: nobody could move what it left in time.
    leave = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(open('/proc/self/cgroup').read(), end='')"
    for user in ("user", "root"):
        groups = {sandbox.run(["python3", "-S", "-c", leave], user=user).stdout for _ in range(5)}
        for _ in range(20):  # an output that comes after the end is nobody's
            groups.add(sandbox.run("cat /proc/self/cgroup & wait", user=user).stdout)
        assert all(g.startswith("0::/skerry/c") for g in groups - {""}), groups
        assert len(groups - {""}) >= 20


def test_a_user_is_not_given_roots_files_while_starting(sandbox: Sandbox) -> None:
    sandbox.run("printf '#!/bin/sh\\nid -u\\n' > /opt/secret && chmod 700 /opt/secret", user="root", check=True)
    with pytest.raises(SkerryError) as refused:
        sandbox.run(["/opt/secret"])
    assert refused.value.code == "command_not_executable"
    sandbox.run("printf '#!/opt/secret\\n' > /opt/through && chmod 755 /opt/through", user="root", check=True)
    with pytest.raises(SkerryError) as refused:
        sandbox.run(["/opt/through"])
    assert refused.value.code == "command_not_executable"
    status = sandbox.run("grep -E '^(Uid|Cap(Prm|Eff)):' /proc/self/status").stdout.split()
    assert status == ["Uid:", *["1000"] * 4, "CapPrm:", "0" * 16, "CapEff:", "0" * 16]


def test_a_full_process_table_is_named_and_passes(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        before = sandbox.run("cat /proc/sys/kernel/pid_max", user="root").stdout
        sandbox.run("echo 400 > /proc/sys/kernel/pid_max", user="root", check=True)
        # A shell gives up when it cannot fork, and leaves its own place free.
        hoarder = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        time.sleep(0.001)
"""
        hoard = sandbox.commands.start(["python3", "-c", hoarder], user="root", timeout=None)
        refusals = set()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                sandbox.run("sleep 0.2")
            except SkerryError as error:
                refusals.add(error.code)
                break
        hoard.kill()
        assert refusals == {"process_limit"}
        sandbox.run(f"echo {before.strip()} > /proc/sys/kernel/pid_max", user="root", check=True)
        assert sandbox.run("echo again").stdout == "again\n"


def test_a_fork_bomb_ends_at_its_deadline(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        with pytest.raises(CommandDeadline):
            sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 600", timeout=4)
        assert sandbox.run("echo alive", timeout=50).stdout == "alive\n"
        assert sandbox.run("pgrep -u user -c sleep").stdout == "0\n"


def test_out_of_memory_ends_the_hog_and_not_the_machine(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        hog = "b = []\nwhile True: b.append(bytearray(10**7))"
        with ThreadPoolExecutor(4) as pool:
            ends = list(pool.map(lambda _: sandbox.run(["python3", "-c", hog]), range(4)))
        assert [(end.signal, end.exit_code) for end in ends] == [("SIGKILL", None)] * 4
        assert sandbox.run("echo alive").stdout == "alive\n"


def test_the_guest_goes_on_without_what_it_usually_has(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=256, **client) as sandbox:
        sandbox.run("chmod 000 /tmp; mv /bin/bash /bin/elsewhere; date -s 1999-01-01", user="root", check=True)
        assert sandbox.run("cat <<E\nheredoc\nE").stdout == "heredoc\n"
        with pytest.raises(CommandDeadline):
            sandbox.run("sleep 60", timeout=1)
        sandbox.run("mv /etc/passwd /etc/elsewhere", user="root", check=True)
        with pytest.raises(SkerryError) as refused:
            sandbox.run("true")
        assert refused.value.code == "user_not_found"
        sandbox.run("mv /etc/elsewhere /etc/passwd", user="0", check=True)
        assert sandbox.run("id -un").stdout == "user\n"


def test_two_hundred_long_commands_all_tell_their_end(client: dict[str, str]) -> None:
    with Sandbox.create(memory_mb=512, **client) as sandbox:
        with ThreadPoolExecutor(16) as pool:
            started = list(pool.map(lambda n: sandbox.commands.start(f"sleep 5; echo {n}; exit {n % 50}"), range(200)))
            ends = list(pool.map(lambda process: process.wait(), started))
        assert [(end.exit_code, end.stdout) for end in ends] == [(n % 50, f"{n}\n") for n in range(200)]
