"""Where address and key come from."""

import json
import ssl
from pathlib import Path

import pytest

from skerry import InvalidRequest
from skerry.sdk.config import discover
from skerry.sdk.errors import NotConfigured
from skerry.sdk.http import client_options


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config/skerry").mkdir(parents=True)
    return tmp_path


def write(path: Path, url: str | None, key: str | None) -> Path:
    path.write_text(json.dumps({k: v for k, v in (("url", url), ("api_key", key)) if v}))
    return path


def test_the_order(home: Path) -> None:
    system = write(home / "system.json", "http://system", "ksystem")
    environ = {"HOME": str(home)}

    def ask(url: str | None = None, key: str | None = None) -> tuple[str, str]:
        target = discover(url, key, environ=environ, system_file=system)
        return target.url, target.api_key

    assert ask() == ("http://system", "ksystem")
    write(home / ".config/skerry/client.json", "http://home/", "khome")
    assert ask() == ("http://home", "khome")
    environ["SKERRY_CLIENT_FILE"] = str(write(home / "named.json", "http://named", "knamed"))
    assert ask() == ("http://named", "knamed")
    environ["SKERRY_API_KEY"] = "kenv"
    assert ask() == ("http://named", "kenv")
    environ["SKERRY_API_URL"] = "http://env/"
    assert ask() == ("http://env", "kenv")
    assert ask("http://argument", "kargument") == ("http://argument", "kargument")
    assert ask("http://argument") == ("http://argument", "kenv")


def test_a_files_key_is_not_sent_to_another_server(home: Path) -> None:
    system = write(home / "system.json", "http://system", "ksystem")
    environ = {"SKERRY_API_URL": "http://elsewhere"}
    with pytest.raises(NotConfigured, match="is for http://system"):
        discover(environ=environ, system_file=system)
    with pytest.raises(NotConfigured):
        discover("http://elsewhere", environ={}, system_file=system)
    assert discover("http://system/", environ={}, system_file=system).api_key == "ksystem"


def test_nothing_found_says_all_that_was_tried(home: Path) -> None:
    (home / "bad.json").write_text("{")
    (home / ".config/skerry/client.json").write_text("[]")
    environ = {"HOME": str(home), "SKERRY_CLIENT_FILE": str(home / "bad.json")}
    with pytest.raises(NotConfigured) as caught:
        discover(environ=environ, system_file=home / "none.json")
    message = str(caught.value)
    for part in ("SKERRY_API_URL", "bad.json (cannot be read", "client.json (holds no", "none.json (is not there)"):
        assert part in message
    assert caught.value.code == "not_configured"


def test_the_configuration_directory_may_be_elsewhere(home: Path) -> None:
    write(home / ".config/skerry/client.json", "http://xdg", "k")
    assert discover(environ={"XDG_CONFIG_HOME": str(home / ".config")}, system_file=home / "no").url == "http://xdg"


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://", "127.0.0.1:80"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        discover(url, "k", environ={})


def test_a_key_never_shows_and_must_be_a_header() -> None:
    assert "secret" not in repr(discover("http://x", "secret", environ={}))
    with pytest.raises(InvalidRequest) as caught:
        discover("http://x", "line\nbreak", environ={})
    assert "break" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_loopback"), [("http://127.0.0.1:1", True), ("http://[::1]:1", True), ("http://x", False)]
)
def test_loopback(url: str, is_loopback: bool) -> None:
    assert discover(url, "k", environ={}).is_loopback is is_loopback


def test_authorities_are_read_once_and_not_for_a_line_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = client_options(discover("http://x", "k", environ={}))["verify"]
    assert (plain.verify_mode, plain.get_ca_certs()) == (ssl.CERT_REQUIRED, [])  # it believes nobody
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    secure = discover("https://x", "k", environ={})
    usual = client_options(secure)["verify"]
    assert usual.get_ca_certs() != []
    assert client_options(secure)["verify"] is usual
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert client_options(secure)["verify"].get_ca_certs() == []  # whom the environment names, and nobody else
