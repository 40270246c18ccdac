"""Run by the environment of a released E2B client: everything that it sees of commands that say a secret, as text."""

import sys
import time

from e2b import PtySize, Sandbox


def main(sandbox_id: str) -> None:
    sandbox = Sandbox.connect(sandbox_id)
    seen: list[object] = []
    seen.append(sandbox.commands.run('echo "out $S"; echo "err $S" >&2'))
    slow = sandbox.commands.run('printf "%s" "${S:0:9}"; sleep 0.3; echo "${S:9}"; sleep 600', background=True)
    again = sandbox.commands.connect(slow.pid)
    sandbox.commands.run("sleep 0.6; echo $S", on_stdout=seen.append)
    seen.append(sandbox.commands.list())
    slow.kill()
    for handle in (slow, again):
        try:
            handle.wait(on_stdout=seen.append)
        except Exception as error:
            seen.append(error)
    terminal = sandbox.pty.create(PtySize(rows=24, cols=500))
    sandbox.pty.send_stdin(terminal.pid, b"echo term$S; exit\n")
    terminal.wait(on_pty=lambda data: seen.append(data.decode("utf-8", "replace")))
    time.sleep(0)
    print(seen, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
