"""Files over HTTP: ranges, headers, odd names, uploads that break."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import pytest_asyncio

from support.api_server import Api, lines, running_api


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path, keepalive_s=0.1) as found:
        yield found


@pytest_asyncio.fixture
async def box(api: Api) -> str:
    return await api.sandbox()


def path(box: str, name: str, rest: str = "") -> str:
    return f"/v1/sandboxes/{box}/files{rest}?path={quote(name, safe='', errors='surrogateescape')}"


async def test_what_is_written_is_read(api: Api, box: str) -> None:
    for data in (b"", b"x", bytes(range(256)) * 4096):
        written = await api.http.put(path(box, "/tmp/f"), content=data)
        assert written.status_code == 200
        assert written.json()["size"] == len(data)
        found = await api.http.get(path(box, "/tmp/f"))
        assert found.content == data
        assert found.headers["content-length"] == str(len(data))
        assert found.headers["accept-ranges"] == "bytes"
        assert json.loads(found.headers["x-skerry-file"])["path"] == "/tmp/f"
        head = await api.http.head(path(box, "/tmp/f"))
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(data))


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        ("bytes=0-0", b"0", "bytes 0-0/10"),
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=-30", b"0123456789", "bytes 0-9/10"),
        ("bytes=5-99", b"56789", "bytes 5-9/10"),
        ("bytes=5-99999999999999999999999", b"56789", "bytes 5-9/10"),
        ("Bytes=0-0", b"0", "bytes 0-0/10"),
    ],
)
async def test_ranges(api: Api, box: str, asked: str, given: bytes, said: str) -> None:
    await api.http.put(path(box, "/f"), content=b"0123456789")
    found = await api.http.get(path(box, "/f"), headers={"Range": asked})
    assert found.status_code == 206
    assert (found.content, found.headers["content-range"]) == (given, said)
    assert found.headers["content-length"] == str(len(given))


async def test_ranges_outside(api: Api, box: str) -> None:
    await api.http.put(path(box, "/f"), content=b"0123456789")
    await api.http.put(path(box, "/empty"), content=b"")
    for name, asked, size in (("/f", "bytes=10-", 10), ("/f", "bytes=-0", 10), ("/empty", "bytes=-1", 0)):
        refused = await api.http.get(path(box, name), headers={"Range": asked})
        assert (refused.status_code, refused.json()["code"]) == (416, "range_not_satisfiable")
        assert refused.headers["content-range"] == f"bytes */{size}"
    refused = await api.http.get(path(box, "/f"), headers={"Range": "bytes=0-1,3-4"})
    assert refused.status_code == 400


NAMES = [
    "/tmp/a b.txt", "/tmp/ lead", "/tmp/q'\"q", "/tmp/$(id)", "/tmp/-rf", "/tmp/new\nline", "/tmp/日本語",
    "/tmp/👩‍🚀", "/tmp/%2e%2e", "/tmp/%20", "/tmp/+", "/tmp/#", "/tmp/a&b=c", "/tmp/...", "/tmp/a\udcff\udc80b",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_any_name_survives(api: Api, box: str, name: str) -> None:
    written = await api.http.put(path(box, name), content=b"1")
    assert written.json()["path"] == name
    assert set(api.guest(box).files) == {name}
    found = await api.http.get(path(box, name))
    assert json.loads(found.headers["x-skerry-file"])["path"] == name
    listed = lines((await api.http.get(path(box, "/tmp", "/list"))).text)
    assert [e.get("path") for e in listed[:-1]] == [name]
    assert listed[-1] == {"type": "end", "count": 1}
    body = json.dumps({"source": name, "target": name + "2"})
    moved = await api.http.post(
        f"/v1/sandboxes/{box}/files/move", content=body, headers={"Content-Type": "application/json"}
    )
    assert moved.json()["path"] == name + "2"
    assert (await api.http.delete(path(box, name + "2"))).status_code == 204


async def test_a_missing_file_is_a_problem_with_its_path(api: Api, box: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/stat"), ("GET", "/list")):
        refused = await api.http.request(method, path(box, "/no", rest))
        assert (refused.status_code, refused.json()["code"]) == (404, "path_not_found")
        assert refused.json()["context"]["path"] == "/no"
    assert (await api.http.head(path(box, "/no"))).status_code == 404


@pytest.mark.parametrize("name", ["", "a\0b", "/" + "x" * 256, "/x" * 2100])
async def test_paths_that_cannot_be(api: Api, box: str, name: str) -> None:
    refused = await api.http.put(path(box, name), content=b"")
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == "path"


@pytest.mark.parametrize("mode", ["9", "0o644", "-1", "12345", ""])
async def test_modes_are_octal(api: Api, box: str, mode: str) -> None:
    refused = await api.http.put(path(box, "/f") + f"&mode={mode}", content=b"")
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == "mode"


async def test_a_broken_upload_leaves_what_was_there(api: Api, box: str) -> None:
    await api.http.put(path(box, "/f"), content=b"old")
    where = urlsplit(api.url)

    def half() -> None:
        with socket.create_connection((where.hostname or "", where.port or 0)) as line:
            line.sendall(
                f"PUT {path(box, '/f')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {api.key}\r\nContent-Length: 1000\r\n\r\n"
                "new".encode()
            )

    await asyncio.to_thread(half)
    async with asyncio.timeout(60):
        while True:
            page = await api.http.get(f"/v1/sandboxes/{box}/logs")
            written = [e for e in page.json()["items"] if e["action"] == "file.written"]
            if len(written) == 2:
                break
            await asyncio.sleep(0.02)
    assert written[1]["outcome"] == "refused"
    assert written[1]["detail"]["code"] == "upload_aborted"
    assert (await api.http.get(path(box, "/f"))).content == b"old"


async def test_an_upload_is_streamed(api: Api, box: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    written = await api.http.put(path(box, "/f"), content=pieces())
    assert written.json()["size"] == 1_000_000


async def test_directories_links_and_modes(api: Api, box: str) -> None:
    base = f"/v1/sandboxes/{box}/files"
    made = await api.http.post(f"{base}/mkdir", json={"path": "/d", "mode": "0750"})
    assert made.json()["created"] is True
    assert made.json()["entry"]["kind"] == "directory"
    assert (await api.http.post(f"{base}/mkdir", json={"path": "/d"})).json()["created"] is False
    linked = await api.http.post(f"{base}/symlink", json={"target": "/d", "path": "/l"})
    assert (linked.json()["kind"], linked.json()["target"]) == ("symlink", "/d")
    changed = await api.http.post(f"{base}/chmod", json={"path": "/d", "mode": "4755"})
    assert changed.json()["mode"] == "4755"
    assert lines((await api.http.get(path(box, "/empty", "/list"))).text) == [{"type": "end", "count": 0}]


async def test_a_watch_is_armed_lives_and_says_why_it_ends(api: Api, box: str) -> None:
    async with api.http.stream("GET", path(box, "/tmp", "/watch")) as answer:
        source = answer.aiter_lines()
        begun = json.loads(await anext(source))
        assert (begun["type"], begun["offset"], begun["watch_id"][:2]) == ("watching", 0, "wt")
        assert json.loads(await anext(source)) == {"type": "keepalive"}
        await api.http.delete(f"/v1/sandboxes/{box}")
        rest = [json.loads(line) async for line in source]
    assert rest[-1]["error"]["code"] == "sandbox_killed"


async def test_a_watch_goes_on_over_a_pause_and_wakes_nothing(api: Api) -> None:
    box = await api.sandbox(auto_resume=True, auto_pause=True)
    sandbox = f"/v1/sandboxes/{box}"

    async def event(source: AsyncIterator[str]) -> dict[str, Any]:
        while (found := json.loads(await anext(source)))["type"] == "keepalive":
            continue
        return found

    async with asyncio.timeout(30), api.http.stream("GET", path(box, "/tmp", "/watch")) as answer:
        source = answer.aiter_lines()
        watch_id = (await event(source))["watch_id"]
        for n in range(3):
            api.node.vms[box].see(f"f{n}")
            assert await event(source) == {
                "type": "create", "path": f"f{n}", "is_dir": False, "cookie": 0, "offset": n,
            }  # fmt: skip
            await api.http.post(f"{sandbox}/pause")
            for _ in range(3):
                assert json.loads(await anext(source)) == {"type": "keepalive"}
            assert (await api.http.get(sandbox)).json()["state"] == "paused"
            if n < 2:
                await api.http.post(f"{sandbox}/resume")
    watch = f"{sandbox}/files/watch"
    async with asyncio.timeout(30), api.http.stream("GET", f"{watch}?watch_id={watch_id}&offset=2") as answer:
        source = answer.aiter_lines()
        assert await event(source) == {"type": "watching", "watch_id": watch_id, "offset": 2}
        refused = await api.http.delete(watch, params={"watch_id": watch_id})
        assert (refused.status_code, refused.json()["code"]) == (409, "sandbox_paused")
        await api.http.post(f"{sandbox}/resume")
        assert (await event(source))["path"] == "f2"
        assert (await api.http.delete(watch, params={"watch_id": watch_id})).status_code == 204
        assert (await event(source))["error"]["code"] == "watch_not_found"
    for query in (
        "", "watch_id=wt0", f"watch_id={watch_id}&path=/tmp", "path=/tmp&offset=1", "offset=1",
        f"watch_id={watch_id}&recursive=true", f"watch_id={watch_id}&offset=-1",
    ):  # fmt: skip
        assert (await api.http.get(f"{watch}?{query}")).status_code == 400, query
    assert (await api.http.get(f"{watch}?watch_id={watch_id}")).status_code == 404
