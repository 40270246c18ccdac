"""The claim: what a sandbox was lent is taken out of what its commands say, on every way out. Real VMs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from skerry import Client, Sandbox, secret
from skerry.core.errors import InvalidRequest
from support.clients import command
from support.server import Server

MARKER = f"Xq7-{uuid4().hex}"
VALUE = f'pg://app:{MARKER}/"x"&y@db'
STARS = "*" * len(VALUE)
E2B = "python-2.63"


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    with Client(**server.client) as client:
        name = f"redacted-{MARKER[4:12]}"
        client.secrets.set(name, VALUE)
        with Sandbox.create(env={"S": secret(name)}, timeout=1800, idle_timeout=None, client=client) as made:
            yield made


def clean(text: str) -> None:
    """Neither the marker nor half of it."""
    assert MARKER[: len(MARKER) // 2] not in text
    assert MARKER[len(MARKER) // 2 :] not in text


@pytest.mark.parametrize(
    "says",
    [
        'echo "$S"; echo "$S" >&2',
        "set -x; : $S",
        'printf %s "$S" | base64 -w0; printf "x%s" "$S" | base64; printf "xy%s" "$S" | base64 -w 20',
        """python3 -c 'import json, os, urllib.parse as u; s = os.environ["S"]
print(json.dumps([s]), u.quote(s, safe=""), u.quote_plus(s))'""",
        'for ((i=0; i<${#S}; i+=5)); do printf "%s" "${S:i:5}"; sleep 0.01; done',
        'cat "/proc/self/environ" | tr "\\0" "\\n"',
    ],
)
def test_whatever_form_it_is_printed_in(box: Sandbox, says: str) -> None:
    seen = box.run(says, check=True)
    clean(seen.stdout + seen.stderr)
    assert "***" in seen.stdout + seen.stderr
    hexed = box.run('printf %s "$S" | od -An -tx1', check=True).stdout
    assert bytes.fromhex("".join(hexed.split())).decode() == VALUE  # it is there: this is no wall


def test_a_stream_of_megabytes_is_whole_but_for_it(box: Sandbox) -> None:
    seen = box.run('for i in $(seq 1 40); do head -c 99999 /dev/zero | tr "\\0" x; echo "$S"; done', check=True)
    assert seen.stdout == (("x" * 99999) + STARS + "\n") * 40


def test_readers_that_come_back_anywhere_see_the_same(box: Sandbox) -> None:
    process = box.commands.start('echo "a $S b"; sleep 600')
    whole = f"a {STARS} b\n"
    while len(process.stdout) < len(whole):
        next(iter(process))
    for offset in (0, 2, 3, 2 + len(VALUE) // 2, 1 + len(VALUE), 2 + len(VALUE)):
        again = box.commands.attach(process.process_id, stdout_offset=offset)
        while offset + len(again.stdout) < len(whole):
            next(iter(again))
        assert again.stdout == whole[offset:]
    process.kill()


def test_a_terminal(box: Sandbox) -> None:
    with box.pty(cols=500) as terminal:
        terminal.send("echo term$S; exit\n")
        seen = b"".join(terminal).decode()
    assert f"term{STARS}" in seen
    clean(seen)


def test_lists_logs_and_errors(box: Sandbox) -> None:
    process = box.commands.start(["sleep", "600", VALUE], tag=VALUE)
    with pytest.raises(InvalidRequest) as wrong:
        box.run([VALUE])
    shown = repr([box.commands.list(), box.commands.get(process.pid), list(box.logs()), box.console()])
    process.kill()
    assert "command_not_found" in wrong.value.code
    clean(f"{wrong.value} {wrong.value.context} {shown}")


def test_e2bs_client_sees_none(server: Server, box: Sandbox) -> None:
    key = f"e2b_{server.api_key.encode('ascii').hex()}"
    env = {**os.environ, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": key}
    script = [*command(E2B, Path(__file__).with_name("e2b_sees.py")), box.id]
    seen = subprocess.run(script, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"out {STARS}" in seen
    assert f"err {STARS}" in seen
    assert f"term{STARS}" in seen
    clean(seen)
