"""What package managers say of themselves, from what they print."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from skerry.egress import discover as found_by
from skerry.egress.discover import Found, Unknown, discover, rule_of

SAID = {
    "python3 -m pip config": "global.index-url='https://u:secret@mirror.test/simple'\n:env:.find-links='/opt/wheels'\n"
    "global.extra-index-url='file:///x http://more.test:8080/simple'\n",
    "npm config get": "https://npm.test/\n",
    "npm config list": json.dumps({"@acme:registry": "https://acme.test/npm/", "cache": "/root/.npm"}),
    "apt-get indextargets": "http://deb.test/debian/\nhttp://deb.test/debian/\nfile:/cdrom\nhttps://[fd00::1]/apt\n",
    "go env": "https://go.test,direct\nsum.test\n",
}


def answers(said: dict[str, str]) -> found_by.Run:
    def run(argv: Sequence[str]) -> str:
        line = " ".join(argv)
        for begin, text in said.items():
            if line.startswith(begin):
                return text
        raise Unknown(f"there is no {argv[0]} on this machine")

    return run


def test_configured_registries_are_found_with_their_sources() -> None:
    found = discover(answers(SAID))
    assert {(rule.tool, rule.rule) for rule in found.rules} == {
        ("pip", "mirror.test:443"),
        ("pip", "more.test:8080"),
        ("npm", "npm.test:443"),
        ("npm", "acme.test:443"),
        ("apt", "deb.test:80"),
        ("apt", "[fd00::1]:443"),
        ("go", "go.test:443"),
        ("go", "sum.test:443"),
    }
    assert "npm config: @acme:registry" in {rule.source for rule in found.rules}
    assert [note for note in found.notes if note.startswith("cargo")] == ["cargo: there is no cargo on this machine"]
    assert "secret" not in repr(found)


def test_without_a_setting_it_is_what_the_program_has_built_in() -> None:
    said = {
        "python3 -m pip config": "global.timeout='3'\n",
        "python3 -c": "https://index.test/simple\nhttps://files.test\n",
    }
    found = discover(answers(said))
    assert [rule.rule for rule in found.rules] == ["index.test:443", "files.test:443"]
    assert discover(answers({"python3 -m pip config": "install.no-index='True'\n"})).rules == []


def test_this_machines_own_pip_says_something() -> None:
    said = list(found_by.pip(found_by.run))
    assert said
    assert all(rule_of(url) for url, _ in said)


def test_cargos_configuration_and_what_its_index_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(
        '[source.crates-io]\nreplace-with = "mirror"\n[source.mirror]\nregistry = "sparse+https://crates.test/index/"\n'
    )
    kept = tmp_path / "registry/index/crates.test-1949cf8c6b5b557f"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text('{"dl": "https://files.test/api"}')
    found = discover(answers({"cargo --version": "cargo 1.80"}))
    assert [rule.rule for rule in found.rules] == ["crates.test:443", "files.test:443"]
    (tmp_path / "config.toml").unlink()
    program = tmp_path / "cargo"
    program.write_bytes(b"\0\1sparse+https://built-in.test/\0")
    found = discover(answers({"cargo --version": "cargo 1.80", "rustup which cargo": f"{program}\n"}))
    assert [rule.rule for rule in found.rules] == ["built-in.test:443", "files.test:443"]
    program.write_bytes(b"nothing")
    found = discover(answers({"cargo --version": "cargo 1.80", "rustup which cargo": f"{program}\n"}))
    assert any("does not say" in note for note in found.notes)


@pytest.mark.parametrize("url", ["ftp://x.test/", "https://", "git@x.test:y", "https://x.test:99999/", "", "/srv"])
def test_what_is_no_address_of_the_web_makes_no_rule(url: str) -> None:
    assert rule_of(url) is None


def test_it_survives_being_kept() -> None:
    found = discover(answers(SAID))
    assert found_by.decode(found_by.encode(found)) == found
    for damaged in (b"", b"[]", b'{"rules": 1}', b'{"rules": [{}], "notes": []}'):
        with pytest.raises(ValueError, match=""):
            found_by.decode(damaged)
    assert found_by.decode(found_by.encode(Found())) == Found()
