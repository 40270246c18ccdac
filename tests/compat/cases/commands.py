"""Commands and terminals, as a user of the sync Python client calls them."""

import threading
import time

from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    TimeoutException,
)
from shared import raises, sandbox, since


def until(holds, seconds: float = 30):
    """Wait for what is true soon."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
    return found


def test_run_gives_output_and_exit_code():
    done = sandbox().commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("out\n", "err\n", 0, None)


def test_text_arrives_unchanged():
    text = "".join(chr(n) for n in (0x22, 0x27, 0x5C, 0x24, 0x60, 0xE9, 0x65E5, 0x1F469, 0x9, 0xA)) * 50
    done = sandbox().commands.run(f"cat <<'EOF'\n{text}\nEOF")
    assert done.stdout == f"{text}\n"


def test_a_command_that_fails_raises_with_its_output():
    with raises(CommandExitException, "exit") as caught:
        sandbox().commands.run("echo partial; echo why >&2; exit 3")
    error = caught.error
    assert (error.exit_code, error.stdout, error.stderr, error.error) == (3, "partial\n", "why\n", "exit status 3")


def test_callbacks_get_pieces_as_they_come():
    out, err = [], []
    sandbox().commands.run("echo 1; echo 2 >&2; sleep 0.2; echo 3", on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("1\n3\n", "2\n")


def test_large_output_is_whole():
    done = sandbox().commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert done.stdout == "x" * 3_000_000


def test_the_environment_has_the_users_and_then_the_callers():
    done = sandbox().commands.run('echo "$HOME $USER $LOGNAME $FOO"; pwd', envs={"FOO": "bar baz"})
    assert done.stdout == "/home/user user user bar baz\n/home/user\n"
    assert sandbox().commands.run("echo $HOME; whoami", user="root").stdout == "/root\nroot\n"


def test_the_working_directory_may_be_absolute_relative_or_of_home():
    box = sandbox()
    box.commands.run("mkdir -p ~/one/deep")
    for cwd in ("/home/user/one/deep", "one/deep", "~/one/deep"):
        assert box.commands.run("pwd", cwd=cwd).stdout == "/home/user/one/deep\n"
    with raises(InvalidArgumentException, "cwd '/no/such/place' does not exist"):
        box.commands.run("pwd", cwd="/no/such/place")


def test_an_unknown_user_is_named():
    with raises(AuthenticationException, "invalid username: 'nobody-here'"):
        sandbox().commands.run("true", user="nobody-here")


def test_a_command_in_the_background_is_listed_and_killed():
    box = sandbox()
    handle = box.commands.run("sleep 300", background=True, envs={"A": "b"})
    (listed,) = [p for p in box.commands.list() if p.pid == handle.pid]
    assert (listed.cmd, listed.args, listed.cwd) == ("/bin/bash", ["-l", "-c", "sleep 300"], "/home/user")
    assert listed.envs == {"A": "b"}
    assert handle.kill() is True
    with raises(CommandExitException) as caught:
        handle.wait()
    assert (caught.error.exit_code, caught.error.error) == (-1, "signal: killed")
    assert box.commands.kill(handle.pid) is False
    assert handle.pid not in [p.pid for p in box.commands.list()]


def test_a_pid_that_is_not_there_is_told():
    box = sandbox()
    assert box.commands.kill(99_999) is False
    with raises(NotFoundException, "process with pid 99999 not found"):
        box.commands.connect(99_999)
    with raises(NotFoundException, "process with pid 99999 not found"):
        box.commands.send_stdin(99_999, "x")


def test_a_handle_is_iterated():
    handle = sandbox().commands.run("echo 1; echo 2 >&2", background=True)
    pieces = list(handle)
    assert "".join(out for out, _, _ in pieces if out) == "1\n"
    assert "".join(err for _, err, _ in pieces if err) == "2\n"
    assert handle.wait().exit_code == 0


def test_connecting_again_gives_what_comes_from_then_on():
    box = sandbox()
    handle = box.commands.run("echo before; read line; echo got $line", background=True, stdin=True, timeout=0)
    first, _, _ = next(iter(handle))
    assert first == "before\n"
    handle.disconnect()
    again = box.commands.connect(handle.pid, timeout=0)
    other = box.commands.connect(handle.pid, timeout=0)
    box.commands.send_stdin(handle.pid, "it\n")
    assert again.wait().stdout == "got it\n"
    assert other.wait().stdout == "got it\n"  # every subscriber gets all of it


def test_an_exit_code_can_be_fetched_later():
    box = sandbox()
    handle = box.commands.run("echo said; exit 7", background=True)
    handle.disconnect()
    until(lambda: handle.pid not in [p.pid for p in box.commands.list()])
    with raises(CommandExitException) as caught:
        box.commands.connect(handle.pid).wait()
    assert (caught.error.exit_code, caught.error.stdout) == (7, "")


def test_a_client_that_leaves_does_not_end_a_command():
    box = sandbox()
    handle = box.commands.run("yes | head -c 8000000 >&2; sleep 0.2; touch /tmp/went-on", background=True, timeout=0)
    handle.disconnect()
    until(lambda: box.files.exists("/tmp/went-on"))


def test_stdin_is_sent_and_closed():
    box = sandbox()
    handle = box.commands.run("cat", background=True, stdin=True, timeout=0)
    box.commands.send_stdin(handle.pid, "one\n")
    box.commands.send_stdin(handle.pid, b"two\xff\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\ufffd\n"


def test_closing_stdin_twice_is_no_error_and_writing_to_it_then_is():
    box = sandbox()
    handle = box.commands.run("sleep 300", background=True, stdin=True, timeout=0)
    box.commands.close_stdin(handle.pid)
    box.commands.close_stdin(handle.pid)
    with raises(SandboxException):
        box.commands.send_stdin(handle.pid, "late")
    handle.kill()


def test_without_stdin_there_is_none_to_write_to():
    box = sandbox()
    assert box.commands.run("cat").stdout == ""
    handle = box.commands.run("sleep 300", background=True, stdin=False, timeout=0)
    with raises(SandboxException):
        box.commands.send_stdin(handle.pid, "x")
    handle.kill()


def test_handles_write_too():
    handle = sandbox().commands.run("head -n 1", background=True, stdin=True)
    if not hasattr(handle, "send_stdin"):
        since(2, 63)
    handle.send_stdin("through the handle\n")
    assert handle.wait().stdout == "through the handle\n"


def test_input_is_streamed():
    since(2, 63)
    box = sandbox()
    handle = box.commands.run("wc -c", background=True, stdin=True, timeout=0)
    box.commands.stream_input(handle.pid, (b"x" * 100_000 for _ in range(20)))
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "2000000"
    with raises(NotFoundException, "process with pid 99999 not found"):
        box.commands.stream_input(99_999, ["x"])


def test_the_deadline_ends_the_command():
    box = sandbox()
    for seconds in (1.5, 6, 20):  # a guest that is slow today may not even have begun
        with raises(TimeoutException):
            box.commands.run("echo $$ > /tmp/overdue; exec sleep 300", timeout=seconds)
        if box.files.exists("/tmp/overdue"):
            break
    pid = box.files.read("/tmp/overdue").strip()
    until(lambda: box.commands.run(f"kill -0 {pid} 2>/dev/null && echo there || echo gone").stdout == "gone\n")


def test_output_need_not_be_kept():
    since(2, 63)
    got = []
    done = sandbox().commands.run("echo much", retain_output=False, on_stdout=got.append)
    assert (done.stdout, done.exit_code, got) == (None, 0, ["much\n"])


# ---------------------------------------------------------------------------------------------------------- terminals


def test_a_terminal_is_used_resized_and_killed():
    box, got = sandbox(), bytearray()
    handle = box.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", envs={"FOO": "bar"})
    reading = threading.Thread(target=lambda: [got.extend(data) for _, _, data in handle if data])
    reading.start()
    box.pty.send_stdin(handle.pid, b"echo $FOO-$TERM; pwd; stty size\n")
    until(lambda: b"bar-xterm-256color\r\n/tmp\r\n24 80\r\n" in got)
    box.pty.resize(handle.pid, PtySize(rows=30, cols=100))
    box.pty.send_stdin(handle.pid, b"stty size\n")
    until(lambda: b"30 100\r\n" in got)
    with raises(SandboxException, "Ctrl+D"):
        box.commands.close_stdin(handle.pid)
    box.pty.send_stdin(handle.pid, b"exit\n")
    reading.join(30)
    assert not reading.is_alive()
    assert box.pty.kill(handle.pid) is False


def test_a_terminal_is_connected_to_again():
    box = sandbox()
    handle = box.pty.create(PtySize(rows=24, cols=80), timeout=0)
    handle.disconnect()
    again, got = box.pty.connect(handle.pid), bytearray()
    box.pty.send_stdin(handle.pid, b"echo $((6 * 7)); exit 5\n")
    with raises(CommandExitException) as caught:
        again.wait(on_pty=got.extend)
    assert caught.error.exit_code == 5
    assert b"42\r\n" in got
    with raises(NotFoundException):
        box.pty.resize(99_999, PtySize(rows=1, cols=1))
