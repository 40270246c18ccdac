"""What a request must look like."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.control.checks import check_path, check_process, check_spec, check_user, refuse_paths, signal_name
from skerry.core import ids, limits
from skerry.core.errors import InvalidRequest
from skerry.core.models import ProcessSpec, PtySize, SandboxSpec

DAY = 86_400_000


def fields(spec: SandboxSpec, max_lifetime_ms: int = DAY) -> list[str]:
    return [problem.field for problem in check_spec(spec, max_lifetime_ms)]


def test_the_default_sandbox_is_fine() -> None:
    assert fields(SandboxSpec()) == []


def test_everything_that_is_wrong_is_said_at_once() -> None:
    bad = SandboxSpec("No Such!", 9, 1, 1, -1, 0, env={"A B": "x"}, metadata={"": "x"})
    assert fields(bad) == [
        "template",
        "cpu",
        "memory_mb",
        "disk_mb",
        "timeout_ms",
        "idle_timeout_ms",
        "env.A B",
        "metadata.",
    ]


@pytest.mark.parametrize(
    ("timeout", "good"), [(-1, False), (0, True), (1, True), (14_400_000, True), (14_400_001, False)]
)
def test_the_bounds_of_a_timeout(timeout: int, good: bool) -> None:
    assert (fields(SandboxSpec(timeout_ms=timeout)) == []) is good


def test_a_tenants_longest_life_bounds_the_timeout_and_is_named() -> None:
    (problem,) = check_spec(SandboxSpec(timeout_ms=120_000), 100_000)
    assert problem.allowed == "0..100000"


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_what_a_database_or_a_kernel_cannot_hold_is_refused(text: str) -> None:
    assert fields(SandboxSpec(metadata={"k": text})) == ["metadata.k"]
    assert fields(SandboxSpec(metadata={text: "v"})) != []
    assert fields(SandboxSpec(env={"A": text})) == ["env.A"]


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_any_metadata_and_environment_is_judged_not_crashed_on(entries: dict[str, str]) -> None:
    for problem in check_spec(SandboxSpec(env=entries, metadata=entries), DAY):
        problem.as_dict()


# ---------------------------------------------------------------------------------------------------------- commands

GOOD = ProcessSpec(ids.new_id(ids.PROCESS), argv=("true",))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"argv": None}, "command"),
        ({"shell": "x"}, "command"),
        ({"argv": ()}, "argv"),
        ({"argv": ("",)}, "argv"),
        ({"argv": ("a", "b\0")}, "argv"),
        ({"argv": None, "shell": "a\0b"}, "command"),
        ({"cwd": ""}, "cwd"),
        ({"cwd": "/" + "x" * 256}, "cwd"),
        ({"env": {"1": "x"}}, "env.1"),
        ({"user": ""}, "user"),
        ({"user": "a\nb"}, "user"),
        ({"timeout_ms": -1}, "timeout_ms"),
        ({"pty": PtySize(0, 10)}, "cols"),
        ({"tag": ""}, "tag"),
        ({"process_id": "x"}, "process_id"),
    ],
)
def test_a_wrong_command_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_process(replace(GOOD, **change))  # type: ignore[arg-type]
    assert field in [problem.field for problem in refused.value.problems]


def test_over_long_commands_have_their_own_code() -> None:
    for spec in (
        replace(GOOD, argv=("a", "x" * (limits.ARGUMENT_BYTES_MAX + 1))),
        replace(GOOD, argv=None, shell="x" * (limits.ARGUMENT_BYTES_MAX + 1)),
        replace(GOOD, argv=("x" * 100_000,) * 22),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_process(spec)
        assert refused.value.code == "command_too_long"
    check_process(replace(GOOD, argv=None, shell="x" * limits.ARGUMENT_BYTES_MAX))


def test_a_timeout_of_zero_is_none() -> None:
    assert check_process(replace(GOOD, timeout_ms=0)).timeout_ms is None
    assert check_process(replace(GOOD, timeout_ms=1)).timeout_ms == 1


def test_text_and_odd_bytes_pass_unchanged() -> None:
    for text in ("cat <<'EOF'\n\t$HOME\nEOF", "a # b", "printf '\udcff'", ""):
        spec = replace(GOOD, argv=None, shell=text)
        assert check_process(spec) == spec


# ------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["/a", "rel", "~", "~/x", "/", "a b", "\udcff", "x//y", "..", "n\nl", "/" + "x" * 255])
def test_good_paths(path: str) -> None:
    assert list(check_path("path", path)) == []


@pytest.mark.parametrize("path", ["", "a\0", "\ud800", "/" + "x" * 256, "/".join(["x" * 200] * 21), "\u2603" * 86])
def test_bad_paths(path: str) -> None:
    (problem,) = check_path("path", path)
    assert problem.field == "path"
    problem.as_dict()


def test_a_path_alone_has_its_own_code() -> None:
    for path, code in (("", "invalid_path"), ("a\0", "invalid_path"), ("/" + "x" * 256, "path_too_long")):
        with pytest.raises(InvalidRequest) as refused:
            refuse_paths(path=path)
        assert (refused.value.code, refused.value.problems[0].field) == (code, "path")
        with pytest.raises(InvalidRequest) as refused:
            refuse_paths(check_user(""), path=path)
        assert (refused.value.code, len(refused.value.problems)) == ("invalid_request", 2)
    refuse_paths(check_user("root"), path="/a", target="b")


def test_4095_bytes_fit_and_4096_do_not() -> None:
    whole = ("/" + "x" * 127) * 32
    assert len(whole) == 4096
    assert list(check_path("path", whole[:-1])) == []
    assert len(list(check_path("path", whole))) == 1


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("given", "name"),
    [("SIGINT", "SIGINT"), ("INT", "SIGINT"), ("2", "SIGINT"), ("9", "SIGKILL"), ("CHLD", "SIGCHLD"), ("40", "40")],
)
def test_signals(given: str, name: str) -> None:
    assert signal_name(given) == name


@pytest.mark.parametrize(
    "given", ["", "0", "65", "-1", "SIG", "int", "SIGNOPE", "9" * 5000, "0002" + "0" * 5000, "\u0661", "1 "]
)
def test_no_signals(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        signal_name(given)
    assert refused.value.code == "unknown_signal"
