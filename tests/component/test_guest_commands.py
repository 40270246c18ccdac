"""The agent's commands with a fault put in: what they do when looking after a process fails."""

import os
import socket
import threading

import pytest

from skerry.guest import birth
from skerry.guest.commands import Commands
from skerry.guest.conn import Conn
from skerry.guest.identity import Context
from skerry.guest.secret_files import SecretFiles
from skerry.guest.table import Table
from skerry.guest.tree import Cgroups
from support.guest_agent import compiled_half


def test_a_command_that_cannot_be_looked_after_is_ended_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: object) -> None:
        raise MemoryError

    monkeypatch.setattr("skerry.guest.commands.Pump.run", fail)
    table = Table()
    commands = Commands(Context(frozenset()), table, Cgroups(None), SecretFiles(None))
    raised: list[type] = []

    def start(conn: Conn) -> None:
        try:
            commands.start(conn, {"process_id": "pr1", "argv": ["/bin/sleep", "600"], "user": "0", "cwd": "/"})
        except MemoryError as error:
            raised.append(type(error))

    birth.load(str(compiled_half()))
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=start, args=(Conn(here),))
        thread.start()
        thread.join(20)
    assert raised == [MemoryError]
    process = table.get("pr1")
    told = process.describe()["exit"]
    assert (told["reason"], told["signal"]) == ("killed", "SIGKILL")
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
