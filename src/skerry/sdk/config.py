"""Where the server is and which key opens it.

Looked for in this order, address and key each on its own: the call's arguments; `SKERRY_API_URL` and
`SKERRY_API_KEY`; the file that `SKERRY_CLIENT_FILE` names; `~/.config/skerry/client.json`; `/run/skerry/client.json`
(written by a server on the same machine). A file is `{"url": "…", "api_key": "…"}`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from skerry.core.errors import InvalidRequest
from skerry.sdk.errors import NotConfigured

SYSTEM_FILE: Final = Path("/run/skerry/client.json")
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    """Without a slash at its end."""
    api_key: str = field(repr=False)

    @property
    def is_secure(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    @property
    def is_loopback(self) -> bool:
        return urlsplit(self.url).hostname in LOOPBACK


def discover(
    url: str | None = None,
    api_key: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    system_file: Path = SYSTEM_FILE,
) -> Target:
    """Address and key. Raises NotConfigured with all that was tried, InvalidRequest where the address is none."""
    tried = ["the arguments"]
    url, api_key = url or None, api_key or None
    for source, values in _sources(environ, system_file, tried):
        # A file's key belongs to the file's server: it is never sent to an address that came from elsewhere, and the
        # other way round, unless the file leaves the address or the key out.
        if source == "file" and url is not None and api_key is None and values.get("url", url).rstrip("/") != url:
            tried[-1] += f" (is for {values['url']})"
            continue
        url = url or values.get("url")
        api_key = api_key or values.get("api_key")
        url = url.rstrip("/") if url else None
        if url and api_key:
            break
    if not url or not api_key:
        missing = " and ".join(n for n, v in (("address", url), ("API key", api_key)) if not v)
        raise NotConfigured(f"no {missing} of a Skerry server is known; tried: {', '.join(tried)}")
    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest.of("url", "is not an http(s) address", given=url, allowed="http://HOST[:PORT]")
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidRequest.of("api_key", "holds characters that no key has")
    return Target(url, api_key)


def _sources(
    environ: Mapping[str, str], system_file: Path, tried: list[str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "arguments", {}
    tried.append("SKERRY_API_URL and SKERRY_API_KEY")
    yield (
        "environment",
        {
            k: v
            for k, v in (("url", environ.get("SKERRY_API_URL")), ("api_key", environ.get("SKERRY_API_KEY")))
            if v is not None and v
        },
    )
    files: list[Path] = []
    if environ.get("SKERRY_CLIENT_FILE"):
        files.append(Path(environ["SKERRY_CLIENT_FILE"]))
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home:
        files.append(Path(home) / "skerry" / "client.json")
    files.append(system_file)
    for path in files:
        values, note = _read(path)
        tried.append(f"{path} ({note})" if note else str(path))
        if values is not None:
            yield "file", values


def _read(path: Path) -> tuple[dict[str, str] | None, str]:
    """What a client file holds, or None and why not."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "is not there"
    except PermissionError:
        return None, "may not be read by this user"
    except (OSError, ValueError) as error:
        return None, f"cannot be read: {error}"
    if not isinstance(data, dict):
        return None, "holds no JSON object"
    return {k: v for k, v in data.items() if k in ("url", "api_key") and isinstance(v, str) and v}, ""
