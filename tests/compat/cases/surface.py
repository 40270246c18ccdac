"""Every public method and option of the Python client, blocking and async.

What there is is read from the installed package, so that nothing can be forgotten. Each has to be in the tables of
docs/howto/e2b.md and e2b-inside.md; what is said there to work is used here once (what comes of it is looked at
closely in the other files).
"""

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import time
import typing
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import e2b
from proxy import Proxy
from runner import Skipped  # noqa: F401 - the runner looks for it

TABLE = json.loads(Path(os.environ["SKERRY_COMPAT_TABLE"]).read_text())
"""Method → option ("" for the method itself) → what is said of it."""
EVERYWHERE = "any call"
CONNECTION = {*e2b.ApiParams.__annotations__, "request_timeout", "logger"}
"""What all calls take: the client's own, told apart once."""
WORKS = {"yes", "differs"}


class Walk:
    """Calls methods by the names that the tables give them, and notes what was used."""

    def __init__(self, kind: type) -> None:
        self.used: set[tuple[str, str]] = set()
        more = "Async" if kind is e2b.AsyncSandbox else ""
        self.kinds: dict[str, type] = {
            "Sandbox": kind, **{name: getattr(e2b, f"{more}{name}") for name in ("Template", "Volume", "Secret")}
        }  # fmt: skip
        self.at: dict[str, object] = dict(self.kinds)

    def enter(self, where: str, target: object) -> None:
        self.at[where], self.kinds[where] = target, type(target)

    def here(self, method: str) -> bool:
        where, _, name = method.partition(".")
        return hasattr(self.at[where], name)

    async def __call__(self, method: str, *given, **options):
        """Leaves out the options that this generation does not have; None where it has not the method."""
        where, _, name = method.partition(".")
        if not self.here(method):
            return None
        known = [name for form in forms_of(self.kinds[where], name) for name in inspect.signature(form).parameters]
        options = {
            key: value for key, value in options.items() if value is not None and (key in known or key in CONNECTION)
        }
        self.used.add((method, ""))
        for key, value in options.items():
            self.used.add((EVERYWHERE, key) if key in CONNECTION else (method, key))
            inner = vars(value) if dataclasses.is_dataclass(value) else value if isinstance(value, dict) else {}
            self.used |= {(method, f"{key}.{part}") for part, what in inner.items() if what is not None}
        return await settled(getattr(self.at[where], name)(*given, **options))

    def missing(self) -> Iterator[str]:
        for where, kind in self.kinds.items():
            for name in methods_of(kind):
                method = f"{where}.{name}"
                for option, inner in {"": [], **options_of(kind, name)}.items():
                    yield from self._look(method, option)
                    if set(said(method, option)) & WORKS:
                        for part in inner:
                            yield from self._look(method, f"{option}.{part}")
        for option in sorted(CONNECTION):
            yield from self._look(EVERYWHERE, option)

    def _look(self, method: str, option: str) -> Iterator[str]:
        verdicts = said(method, option)
        if not verdicts:
            yield f"{method} {option}: is not in the tables"
        elif WORKS & set(verdicts) and (method, option) not in self.used:
            yield f"{method} {option}: is said to work ({', '.join(verdicts)}), and was not used"


def said(method: str, option: str) -> list[str]:
    """What the tables say of it; a row for all methods of a class (`git.*`) counts where none is for this one."""
    for name in (method, f"{method.partition('.')[0]}.*"):
        options = TABLE.get(name, {})
        found = options.get(option) or options.get(option.rpartition(".")[2])
        if found or (option and options.get("") == ["no"] * len(options.get("", []))):
            return found or options[""]
    return []


def methods_of(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]


def forms_of(kind: type, name: str) -> list:
    """Called on the class, a method can be another function than on an instance."""
    static = inspect.getattr_static(kind, name)
    if hasattr(static, "class_method_name"):
        return [static.method, getattr(kind, static.class_method_name)]
    return [getattr(kind, name)]


def options_of(kind: type, name: str) -> dict[str, list[str]]:
    """What may be left out in a call, and the parts of each where they have names."""
    found: dict[str, list[str]] = {}
    for form in forms_of(kind, name):
        hints = typing.get_type_hints(inspect.unwrap(form))
        for parameter in inspect.signature(form).parameters.values():
            named = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
            if named and parameter.default is not parameter.empty and parameter.name not in CONNECTION:
                found[parameter.name] = list(parts(hints.get(parameter.name)))
    return found


def parts(hint) -> Iterator[str]:
    if inspect.isclass(hint) and (typing.is_typeddict(hint) or dataclasses.is_dataclass(hint)):
        yield from hint.__annotations__
    for inner in typing.get_args(hint):
        yield from parts(inner)


async def settled(done):
    """What a client of either kind gives."""
    return await done if inspect.isawaitable(done) else done


async def all_of(result) -> list:
    if hasattr(result, "__aiter__"):
        return [one async for one in result]
    return list(result)


async def test_sync():
    await whole(e2b.Sandbox)


async def test_async():
    await whole(e2b.AsyncSandbox)


async def whole(kind: type) -> None:
    do = Walk(kind)
    box = None
    try:
        box = await making(do)
        for where in ("files", "commands", "pty", "git"):
            do.enter(where, getattr(box, where))
        await commands(do)
        await terminals(do)
        await files(do, box)
        await repositories(do)
        await lifecycle(do, box)
        await others(do)
    finally:
        if box is not None:
            await do("Sandbox.kill")
    wrong = sorted(set(do.missing()))
    assert not wrong, "\n".join(wrong)


async def making(do: Walk):
    key = f"surface-{time.time_ns()}"
    box = await do(
        "Sandbox.create", template="base", timeout=900, metadata={"walk": key}, envs={"A": "1"}, secure=False,
        allow_internet_access=False, idempotency_key=key, logger=logging.getLogger("e2b"),
        network={
            "allow_public_traffic": False, "mask_request_host": "there.test:${PORT}",
            "deny_out": ["0.0.0.0/0"], "allow_out": [],
        },
        lifecycle={"on_timeout": "pause", "auto_resume": False},
    )  # fmt: skip
    url = os.environ["E2B_API_URL"]
    with Proxy() as proxy:
        info = await do(
            "Sandbox.get_info", box.sandbox_id, api_key=os.environ["E2B_API_KEY"], api_url=url, sandbox_url=url,
            domain="elsewhere.test", debug=False, validate_api_key=True, headers={"X-A": "1"}, api_headers={"X-B": "2"},
            retries=1, http_version="1.1", request_timeout=30, proxy=proxy.url,
        )  # fmt: skip
        assert info.sandbox_id == box.sandbox_id
        assert proxy.heads
        assert b"x-a: 1" in proxy.heads[0].lower()
    if hasattr(e2b, "E2B"):
        bound = getattr(e2b.E2B(api_key=os.environ["E2B_API_KEY"], api_url=url), do.kinds["Sandbox"].__name__)
        assert (await settled(bound.get_info(box.sandbox_id))).sandbox_id == box.sandbox_id
    query = e2b.SandboxQuery(
        metadata={"walk": key}, state=[e2b.SandboxState.RUNNING], **({"template": "base"} if newer() else {})
    )
    if newer():
        query.started_after = info.started_at.replace(year=2000)
    assert await page(do, "Sandbox.list", [box.sandbox_id], query=query, limit=1, order="asc") is None
    do.at["Sandbox"] = box
    return box


def newer() -> bool:
    return "template" in inspect.signature(e2b.SandboxQuery).parameters


async def commands(do: Walk) -> None:
    got: list[str] = []
    done = await do(
        "commands.run", "echo $B; pwd; whoami; echo e >&2", background=False, envs={"B": "2"}, user="root", cwd="/tmp",
        on_stdout=got.append, on_stderr=got.append, stdin=False, timeout=30, retain_output=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2\n/tmp\nroot\n", "e\n")
    assert sorted("".join(got)) == sorted("2\n/tmp\nroot\ne\n")
    handle = await do("commands.run", "while read line; do echo got $line; done; exit 3", background=True, stdin=True)
    do.enter("handle", handle)
    assert handle.pid in [one.pid for one in await do("commands.list")]
    await do("commands.send_stdin", handle.pid, "one\n")
    await do("handle.send_stdin", "two\n")
    if do.here("commands.stream_input"):
        await streamed(do, "commands.stream_input", handle.pid, "three\n")
    await do("handle.close_stdin")
    heard: list[str] = []
    try:
        await do("handle.wait", on_stdout=heard.append, on_stderr=heard.append)
        raise AssertionError("it ends with 3")
    except e2b.CommandExitException as error:
        assert error.exit_code == 3
        assert "got one\ngot two\n" in error.stdout
    sleeper = await do("commands.run", "echo here; exec sleep 300", background=True, stdin=True)
    await do("commands.close_stdin", sleeper.pid)
    do.at["handle"] = await do(
        "commands.connect", sleeper.pid, timeout=60, on_stdout=got.append, on_stderr=got.append, retain_output=False
    )
    await do("handle.disconnect")
    assert await do("commands.kill", sleeper.pid)
    assert not await do("commands.kill", sleeper.pid)
    do.at["handle"] = await do("commands.run", "sleep 300", background=True)
    assert await do("handle.kill")


async def streamed(do: Walk, method: str, pid: int, data) -> None:
    """Blocking clients take an iterator; async ones give a handle."""
    if "data" in inspect.signature(getattr(do.at[method.partition(".")[0]], method.partition(".")[2])).parameters:
        await do(method, pid, iter([data]), timeout=30)
        return
    stream = await do(method, pid, timeout=30)
    do.enter("stream", stream)
    await do("stream.send", data)
    await do("stream.close")


async def terminals(do: Walk) -> None:
    size = e2b.PtySize(rows=24, cols=80)
    got: list[bytes] = []
    terminal = await do("pty.create", size, on_data=got.append, user="root", cwd="/tmp", envs={"C": "3"}, timeout=60)
    await do("pty.resize", terminal.pid, e2b.PtySize(rows=30, cols=101))
    again = await do("pty.connect", terminal.pid, on_data=got.append, timeout=60)
    await do("pty.send_stdin", terminal.pid, b"echo $C $(stty size)\n")
    if do.here("pty.stream_input"):
        await streamed(do, "pty.stream_input", terminal.pid, b"true\n")
    await do("pty.send_stdin", terminal.pid, b"exit\n")
    do.at["handle"] = again
    if inspect.iscoroutinefunction(type(again).wait):
        await again.wait()
    else:
        await do("handle.wait", on_pty=got.append)
    assert b"3 30 101" in b"".join(got)
    terminal = await do("pty.create", size, on_data=got.append)
    assert await do("pty.kill", terminal.pid)


async def files(do: Walk, box) -> None:
    common = {"user": "root"}
    await do("files.write", "/tmp/w/a", "text", gzip=True, use_octet_stream=True, metadata={"k": "v"}, **common)
    await do(
        "files.write_files", [{"path": "/tmp/w/b", "data": b"bytes"}], gzip=True, use_octet_stream=True,
        metadata={"k": "v"}, **common,
    )  # fmt: skip
    assert await do("files.read", "/tmp/w/a", format="text", gzip=True, **common) == "text"
    pieces = await do("files.read", "/tmp/w/b", format="stream", stream_idle_timeout=30)
    assert b"".join(await all_of(pieces)) == b"bytes"
    assert [one.name for one in await do("files.list", "/tmp/w", depth=2, **common)] == ["a", "b"]
    assert await do("files.exists", "/tmp/w/a", **common)
    assert (await do("files.get_info", "/tmp/w/a", **common)).metadata == {"k": "v"}
    assert await do("files.make_dir", "/tmp/w/d", **common)
    await watch(do)
    assert (await do("files.rename", "/tmp/w/a", "/tmp/w/c", **common)).name == "c"
    await do("files.remove", "/tmp/w", **common)
    do.at["Sandbox"] = box
    assert "/files?" in await do("Sandbox.download_url", "a", user="root", use_signature_expiration=60)
    assert "/files?" in await do("Sandbox.upload_url", "a", user="root", use_signature_expiration=60)


async def watch(do: Walk) -> None:
    events: list = []
    handle = await do(
        "files.watch_dir", "/tmp/w", on_event=events.append, on_exit=lambda _: None, user="root", timeout=60,
        recursive=True, include_entry=True, allow_network_mounts=True,
    )  # fmt: skip
    do.enter("watch", handle)
    await do("files.write", "/tmp/w/d/new", "x")
    for _ in range(300):
        events += (await do("watch.get_new_events")) or []
        if any(event.name == "d/new" for event in events):
            break
        await asyncio.sleep(0.1)
    assert any(event.name == "d/new" for event in events), events
    await do("watch.stop")


SERVE = """
mkdir -p srv/cgi-bin && cd srv && git init -q --bare -b main origin.git
git -C origin.git config http.receivepack true
printf '#!/bin/sh\\nexec git http-backend\\n' > cgi-bin/git && chmod +x cgi-bin/git
export GIT_PROJECT_ROOT=$PWD GIT_HTTP_EXPORT_ALL=1
nohup python3 -m http.server --cgi --bind 127.0.0.1 8418 > log 2>&1 &
for n in $(seq 100); do curl -sf http://127.0.0.1:8418/ > /dev/null && exit 0; sleep 0.1; done; cat log; exit 1
"""
ORIGIN = "http://127.0.0.1:8418/cgi-bin/git/origin.git"


async def repositories(do: Walk) -> None:
    """Against a server in the sandbox itself."""
    await do("commands.run", SERVE)
    how = {"envs": {"X": "1"}, "user": "user", "cwd": "/home/user", "timeout": 60}
    who = {"username": "me", "password": "secret"}
    await do("git.configure_user", "Me", "me@boxes.test", scope="global", **how)
    await do("git.dangerously_authenticate", **who, host="boxes.test", protocol="https", **how)
    await do("git.init", "r", bare=False, initial_branch="main", **how)
    here = {**how, "scope": "local", "path": "r"}
    await do("git.set_config", "core.editor", "true", **here)
    assert await do("git.get_config", "core.editor", **here) == "true"
    await do("git.configure_user", "Me", "me@boxes.test", **here)
    await do("git.remote_add", "r", "origin", ORIGIN, fetch=False, overwrite=True, **how)
    assert await do("git.remote_get", "r", "origin", **how) == ORIGIN
    await do("files.write", "r/a", "1\n")
    await do("git.add", "r", files=["a"], all=False, **how)
    await do("git.commit", "r", "one", author_name="A", author_email="a@boxes.test", allow_empty=True, **how)
    await do("git.push", "r", remote="origin", branch="main", set_upstream=True, **who, **how)
    await do("git.clone", ORIGIN, path="c", branch="main", depth=1, **who, dangerously_store_credentials=False, **how)
    await do("git.pull", "c", remote="origin", branch="main", **who, **how)
    await do("git.create_branch", "r", "side", **how)
    await do("git.checkout_branch", "r", "main", **how)
    assert (await do("git.branches", "r", **how)).current_branch == "main"
    await do("git.delete_branch", "r", "side", force=True, **how)
    await do("files.write", "r/a", "2\n")
    await do("git.add", "r")
    await do("git.reset", "r", target="HEAD", paths=["a"], **how)
    await do("git.reset", "r", mode="soft")
    await do("git.restore", "r", paths=["a"], staged=False, worktree=True, source="HEAD", **how)
    assert (await do("git.status", "r", **how)).is_clean


async def lifecycle(do: Walk, box) -> None:
    do.at["Sandbox"] = box
    assert await do("Sandbox.is_running", request_timeout=30)
    assert (await do("Sandbox.get_host", 80)).startswith(f"80-{box.sandbox_id}.")
    await do("Sandbox.set_timeout", 800)
    await do("Sandbox.update_network", {"deny_out": ["0.0.0.0/0"], "allow_internet_access": False})
    assert (await do("Sandbox.get_metrics", start=datetime(2000, 1, 1, tzinfo=UTC), end=datetime.now(UTC))) is not None
    name = f"surface-{time.time_ns()}"
    one, two = [await do("Sandbox.create_snapshot", name=f"{name}:{tag}", mode="full") for tag in ("one", "two")]
    do.at["Sandbox"] = do.kinds["Sandbox"]
    of_it = {"sandbox_id": box.sandbox_id, "limit": 1}
    token = await page(do, "Sandbox.list_snapshots", [two.snapshot_id], **of_it)
    await page(do, "Sandbox.list_snapshots", [one.snapshot_id], **of_it, next_token=token)
    await page(do, "Sandbox.list_snapshots", [two.snapshot_id], name=f"{name}:two")
    for taken in (one, two):
        assert await do("Sandbox.delete_snapshot", taken.snapshot_id)
    do.at["Sandbox"] = box
    (fork,) = await do("Sandbox.fork", count=1, timeout=60)
    query = e2b.SandboxQuery(metadata=(await do("Sandbox.get_info")).metadata)
    token = await page(do, "Sandbox.list", [fork.sandbox_id], query=query, limit=1)
    await page(do, "Sandbox.list", [box.sandbox_id], query=query, limit=1, next_token=token)
    assert await settled(fork.kill())
    assert await do("Sandbox.pause", keep_memory=True, strict=True)
    await do("Sandbox.connect", timeout=600, on_resume="restore")
    assert await do("Sandbox.beta_pause", mode="full")
    await do("Sandbox.connect")
    assert await do("Sandbox.beta_pause", keep_memory=True, strict=True)
    await do("Sandbox.connect")
    assert await do("Sandbox.pause", mode="filesystem")
    await do("Sandbox.connect", timeout=600, on_resume="reboot")


async def page(do: Walk, method: str, ids: list[str], **options) -> str | None:
    """These are on it, and no others; the token of the next."""
    pages = await do(method, **options)
    do.enter("pages", pages)
    found = [getattr(one, "sandbox_id", None) or one.snapshot_id for one in await do("pages.next_items")]
    assert found == ids, (method, options, found, ids)
    return pages.next_token


async def others(do: Walk) -> None:
    assert await do("Template.exists", "base")
    assert await do("Template.alias_exists", "base")
    assert [one.tag for one in await do("Template.get_tags", "base")] == ["default"]
