"""Run by the environment of a released E2B client: does what it is told by name, and tells how long it took.

Reads `NAME COUNT` lines, answers each with a line of JSON: milliseconds of each run. Of `create` those are two: until
the sandbox was there, and until its first command's output was.
"""

import json
import os
import sys
import time

from e2b import Sandbox
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

BLOCK = os.urandom(1 << 20)


def created() -> tuple[float, float]:
    start = time.perf_counter()
    sandbox = Sandbox.create("base", timeout=120)
    there = time.perf_counter()
    sandbox.commands.run("true")
    first = time.perf_counter()
    sandbox.kill()
    return (there - start) * 1000, (first - start) * 1000


def main(sandbox_id: str, token: str) -> None:
    routing = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
    sandbox = Sandbox(
        sandbox_id=sandbox_id,
        envd_version=Version("0.6.13"),
        envd_access_token=token,
        sandbox_domain=None,
        connection_config=ConnectionConfig(extra_sandbox_headers=routing),
    )
    acts = {
        "command": lambda: sandbox.commands.run("true"),
        "write": lambda: sandbox.files.write("/home/user/e2b-block", BLOCK),
        "read": lambda: sandbox.files.read("/home/user/e2b-block", format="bytes"),
    }
    for line in sys.stdin:
        name, count = line.split()
        if name == "create":
            print(json.dumps([created() for _ in range(int(count))]), flush=True)
            continue
        took = []
        for _ in range(int(count)):
            start = time.perf_counter()
            acts[name]()
            took.append((time.perf_counter() - start) * 1000)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
