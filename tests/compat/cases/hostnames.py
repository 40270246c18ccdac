"""By names under TLS, as a user of the sync Python client whose environment holds a domain and no URL."""

import hashlib
import os
import random
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from e2b import NotFoundException, Sandbox
from shared import raises, sandbox, since

DOMAIN = os.environ["E2B_DOMAIN"]


def fetch(url, data=None, **headers):
    """Status and body, as a program that knows nothing of E2B gets them."""
    request = Request(url, data=data, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def serve(box, port, **headers):
    """Python's own server in the sandbox's home; its address once it answers to these headers."""
    box.commands.run(f"python3 -m http.server {port}", background=True, timeout=0)
    url = f"https://{box.get_host(port)}"
    deadline = time.monotonic() + 60
    while fetch(url, **headers)[0] == 502:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return url


def test_every_name_is_of_the_domain_and_no_url_was_given():
    assert not {"E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DEBUG"} & set(os.environ)
    box = sandbox()
    assert box.get_host(8000) == f"8000-{box.sandbox_id}.{DOMAIN}"
    assert box.connection_config.api_url == f"https://api.{DOMAIN}"


def test_the_control_api():
    box = sandbox()
    assert box.get_info().sandbox_id == box.sandbox_id
    assert box.sandbox_id in [one.sandbox_id for one in Sandbox.list().next_items()]
    same = Sandbox.connect(box.sandbox_id)
    assert same.get_host(1) == box.get_host(1)
    with raises(NotFoundException):
        Sandbox.get_info("sb00000000000000000000")


def test_commands_and_files():
    box = sandbox()
    done = box.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout == "x" * 3_000_000
    blob = random.Random(1).randbytes(20 << 20)
    box.files.write("blob", blob)
    assert box.commands.run("sha256sum blob").stdout.split()[0] == hashlib.sha256(blob).hexdigest()
    assert box.files.read("blob", format="bytes") == blob


def test_a_stream_is_left_and_found_again():
    box = sandbox()
    handle = box.commands.run("echo before; read line; echo got $line", background=True, stdin=True, timeout=0)
    assert next(iter(handle))[0] == "before\n"
    handle.disconnect()
    again = box.commands.connect(handle.pid, timeout=0)
    box.commands.send_stdin(handle.pid, "it\n")
    assert again.wait().stdout == "got it\n"


def test_input_is_streamed():
    since(2, 63)
    box = sandbox()
    handle = box.commands.run("wc -c", background=True, stdin=True, timeout=0)
    box.commands.stream_input(handle.pid, (b"x" * 100_000 for _ in range(20)))
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "2000000"


def test_a_watch_is_polled():
    box = sandbox()
    box.files.make_dir("watched")
    watch = box.files.watch_dir("watched")
    box.files.write("watched/new", "x")
    assert "new" in [event.name for event in watch.get_new_events()]
    watch.stop()


def test_signed_urls_name_the_sandbox():
    box = sandbox()
    up = box.upload_url("signed.txt", use_signature_expiration=60)
    assert up.startswith(f"https://49983-{box.sandbox_id}.{DOMAIN}/files?")
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n\r\nby URL\r\n--b--\r\n'
    status, answer = fetch(up, form, Content_Type="multipart/form-data; boundary=b")
    assert status == 200, answer
    down = box.download_url("signed.txt", use_signature_expiration=60)
    assert fetch(down) == (200, b"by URL")
    other = Sandbox.create(timeout=120)
    try:  # what is signed for one opens no other
        elsewhere = down.replace(box.sandbox_id, other.sandbox_id)
        assert fetch(elsewhere)[0] == 401
    finally:
        other.kill()


def test_a_server_in_the_sandbox():
    box = sandbox()
    box.files.write("page.txt", "served")
    url = serve(box, 8000)
    assert fetch(f"{url}/page.txt") == (200, b"served")
    status, answer = fetch(f"https://{box.get_host(8001)}/")
    assert (status, b"The sandbox is running but port is not open" in answer) == (502, True), answer


def test_a_port_that_is_not_public():
    box = Sandbox.create(timeout=300, network={"allow_public_traffic": False})
    try:
        box.files.write("page.txt", "for some")
        token = box.traffic_access_token
        url = serve(box, 8000, e2b_traffic_access_token=token) + "/page.txt"
        status, answer = fetch(url)
        assert (status, b"'e2b-traffic-access-token' is missing" in answer) == (403, True), answer
        status, answer = fetch(url, e2b_traffic_access_token="wrong")
        assert (status, b"is invalid" in answer) == (403, True), answer
        assert fetch(url, e2b_traffic_access_token=token) == (200, b"for some")
    finally:
        box.kill()


def test_one_that_rests_or_is_over_is_not_running():
    box = Sandbox.create(timeout=300)
    host = box.get_host(8000)
    assert box.is_running() is True
    box.pause()
    assert box.is_running() is False
    box.connect()
    assert box.commands.run("echo back").stdout == "back\n"
    box.kill()
    assert box.is_running() is False
    status, answer = fetch(f"https://{host}/")
    assert (status, b"The sandbox was not found" in answer) == (502, True), answer


def test_a_request_to_a_port_wakes_what_rests():
    box = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        box.files.write("page.txt", "awake")
        url = serve(box, 8000)
        for fetched in (lambda: fetch(f"{url}/page.txt"), lambda: (200, box.files.read("page.txt").encode())):
            assert box.pause() is True
            assert fetched() == (200, b"awake")
            assert box.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
            assert box.is_running() is True
    finally:
        box.kill()
