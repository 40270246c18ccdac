"""`skerry cp`: files and trees between this machine and a sandbox."""

# ruff: noqa: FBT002 - a flag of the command line is a parameter with a default

import os
import re
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from skerry.cli.output import JsonOption, write_json
from skerry.core.errors import InvalidRequest, NotFound
from skerry.sdk import Sandbox

REMOTE = re.compile(r"(sb[0-9a-z]{20}):(.*)", re.DOTALL)


def split(text: str) -> tuple[str | None, str]:
    """SANDBOX:PATH as its two parts; a path of this machine with None. `./` before it makes any name a local one."""
    match = REMOTE.fullmatch(text)
    return (match[1], match[2]) if match else (None, text)


def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path, or SANDBOX:PATH.")],
    user: Annotated[str | None, typer.Option("--user", "-u", help="User in the sandbox.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a file or a tree into a sandbox or out of one. Into a directory that is there, under its own name."""
    from_id, from_path = split(source)
    to_id, to_path = split(target)
    if (from_id is None) == (to_id is None):
        raise InvalidRequest(
            "one of SOURCE and TARGET must be SANDBOX:PATH, the other a path of this machine", code="usage"
        )
    with Sandbox.connect(from_id or to_id or "") as box:
        if to_id is not None:
            final = _remote_target(box, from_path, to_path or ".", user)
            count = box.files.upload(from_path, final, user=user)
        else:
            final = _local_target(from_path, to_path)
            count = box.files.download(from_path, final, user=user)
    if as_json:
        write_json({"source": source, "target": final, "entries": count})


def _remote_target(box: Sandbox, source: str, target: str, user: str | None) -> str:
    name = Path(os.path.abspath(source)).name  # noqa: PTH100 - resolve() would follow a link that is to be copied
    try:
        is_dir = box.files.stat(target, user=user).is_dir
    except NotFound as error:
        if error.code == "sandbox_not_found":
            raise
        is_dir = target.endswith("/")
    return f"{target.rstrip('/')}/{name}" if is_dir else target


def _local_target(source: str, target: str) -> str:
    name = PurePosixPath(source).name
    if target.endswith("/") or Path(target).is_dir():
        if name in ("", ".", ".."):
            raise InvalidRequest.of("SOURCE", "has no name of its own; name the target in full", given=source)
        return str(Path(target) / name)
    return target
