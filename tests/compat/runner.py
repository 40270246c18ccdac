"""Runs the cases of one file with the client that is installed beside this interpreter; see tests/support/clients.py.

Argument: the file. Reads names of cases, a line each; answers each with a line of JSON on what was standard output.
At the end of the input every `close` that the file registered in `at_end` is called.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path


class Skipped(Exception):
    """Raised by a case that does not apply to this generation of the client."""


def main(file: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases print goes to the log
    sys.path.insert(0, str(Path(file).parent))
    sys.modules["runner"] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location("cases", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with asyncio.Runner() as loop:
        for line in sys.stdin:
            print(json.dumps(answer(loop, getattr(module, line.strip()))), file=answers, flush=True)
        for close in reversed(at_end):
            done = close()
            if inspect.isawaitable(done):
                loop.run(waited(done))


at_end = []


def answer(loop: asyncio.Runner, case) -> dict[str, str]:
    try:
        done = case()
        if inspect.isawaitable(done):
            loop.run(waited(done))
    except Skipped as why:
        return {"result": "skipped", "text": str(why)}
    except BaseException:
        return {"result": "failed", "text": traceback.format_exc()}
    return {"result": "passed", "text": ""}


async def waited(done) -> None:
    await done


if __name__ == "__main__":
    main(sys.argv[1])
