"""Settings: where they come from, what is refused, and that the page about them is complete."""

import re
from pathlib import Path

import pytest

from skerry.cli import serve
from skerry.cli.settings import Settings, load_settings
from skerry.core.errors import InvalidRequest

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/settings.md"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of the machine the tests run on; a file that is empty."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SKERRY_{name.upper()}", raising=False)
    file = tmp_path / "skerry.toml"
    file.write_text("")
    monkeypatch.setenv("SKERRY_CONFIG", str(file))
    return file


def test_the_page_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.read_text(), flags=re.MULTILINE))
    assert set(rows) == set(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        if field.default is not None:
            shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert rows[name] == f"`{shown}`", name


def test_the_page_lists_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| .*?(?:\((.*)\))? \|$", PAGE.read_text(), flags=re.MULTILINE)
    said = {code: int(number) for number, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert said == serve.EXIT_CODES


def test_flags_win_over_the_environment_and_that_over_the_file(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean.write_text('port = 1\nlog_level = "debug"\nmax_sandboxes = 3\n')
    monkeypatch.setenv("SKERRY_PORT", "2")
    monkeypatch.setenv("SKERRY_LOG_LEVEL", "error")
    settings = load_settings(port=3, host=None)
    assert (settings.port, settings.log_level, settings.max_sandboxes) == (3, "error", 3)


def test_an_unknown_name_in_the_file_is_refused(clean: Path) -> None:
    clean.write_text("prot = 1\n")
    with pytest.raises(InvalidRequest, match="prot: is not a setting") as caught:
        load_settings()
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize("text", ["port = ", "port = 'x'", "port = 70000", "accelerator = 'xen'"])
def test_a_wrong_file_is_refused_in_one_line(clean: Path, text: str) -> None:
    clean.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load_settings()
    assert "\n" not in str(caught.value)


def test_a_file_that_was_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_CONFIG", "/does/not/exist.toml")
    with pytest.raises(InvalidRequest, match="SKERRY_CONFIG") as caught:
        load_settings()
    assert caught.value.code == "invalid_settings"


def test_a_password_in_the_database_url_is_not_shown() -> None:
    settings = load_settings(database_url="postgresql+psycopg://u:hunter2@h/d")
    assert "hunter2" not in repr(settings)


def test_where_the_client_file_is(tmp_path: Path) -> None:
    assert load_settings(data_dir=tmp_path).client_path == tmp_path / "client.json"
    assert load_settings(data_dir=tmp_path, client_file=tmp_path / "x").client_path == tmp_path / "x"


def test_the_database_is_in_the_data_directory(tmp_path: Path) -> None:
    assert load_settings(data_dir=tmp_path).database == f"sqlite:///{tmp_path}/skerry.db"
    assert load_settings(data_dir=tmp_path).database.startswith("sqlite:////")


def test_a_certificate_and_its_key_go_together() -> None:
    with pytest.raises(InvalidRequest, match="go together"):
        load_settings(tls_cert="/x")


def test_how_ports_are_called_by_name() -> None:
    assert load_settings().port_url(7070) == "http://{port}-{id}.localhost:7070"
    assert load_settings(domain="Boxes.test:8080").port_url(1) == "http://{port}-{id}.boxes.test:8080"
    assert load_settings(domain="a.b", tls_cert="/c", tls_key="/k").port_url(1) == "https://{port}-{id}.a.b"
    assert load_settings(domain="a.b", domain_scheme="https").port_url(1) == "https://{port}-{id}.a.b"
    for wrong in ("a b", "https://a.b", "*.a.b", "a.b:x", ".a"):
        with pytest.raises(InvalidRequest, match="domain"):
            load_settings(domain=wrong)


def test_the_token_key_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "token-key"
    made = serve.token_key(path)
    assert len(made) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert serve.token_key(path) == made
    assert list(tmp_path.glob(".token-key*")) == []
    for wrong in ("", "xyz", "ab" * 31, "ab" * 32 + "c"):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest, match="no token key"):
            serve.token_key(path)
