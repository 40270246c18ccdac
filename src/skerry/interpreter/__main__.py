"""`python -m skerry.interpreter`: serve until the process is ended."""

import argparse
import asyncio
import signal
import tempfile

from aiohttp import web

from skerry.interpreter import bash
from skerry.interpreter.contexts import HOME, Contexts
from skerry.interpreter.jupyter import DENO, Kernels
from skerry.interpreter.kernels import PYTHON, Zygote
from skerry.interpreter.life import FILE, Lives
from skerry.interpreter.server import Server

PORT = 49999


async def serve(options: argparse.Namespace) -> None:
    kernels = Kernels(Zygote(options.python), options.deno)
    launches = {
        "python": kernels.python,
        "javascript": kernels.javascript,
        "typescript": kernels.javascript,
        "bash": bash.launch,
    }
    contexts = Contexts(launches, Lives(options.life), options.home)
    runner = web.AppRunner(Server(contexts).app(), handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        await contexts.default()
        await asyncio.Event().wait()
    finally:
        await contexts.close()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(prog="skerry.interpreter", description="Run code in kernels that keep their state")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--home", default=HOME, help="where contexts are that were given no directory")
    parser.add_argument("--python", default=PYTHON, help="the Python that code runs on")
    parser.add_argument("--deno", default=DENO)
    parser.add_argument("--life", default=FILE, help="what the guest's agent writes down")
    tempfile.tempdir = "/tmp"  # noqa: S108 - directories of its own in it, by mkdtemp: paths of sockets have to be short
    signal.signal(signal.SIGINT, signal.default_int_handler)  # were it ignored, so would it be by all that is run
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
