"""The checks name the field, and never repeat a value of the environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core import limits
from skerry.core.errors import InvalidRequest


@given(st.integers(), st.integers(-5, 5), st.integers(6, 20))
def test_a_range_includes_its_ends(value: int, low: int, high: int) -> None:
    assert bool(list(limits.check_range("f", value, low, high))) == (not low <= value <= high)


@pytest.mark.parametrize("name", ["BAD NAME", "A=B", "1A", "", "A-B", "A\n", "\u00c4"])
def test_bad_names_are_named(name: str) -> None:
    (problem,) = limits.check_env("env", {name: "hunter2"})
    assert problem.field == f"env.{name}"
    assert "hunter2" not in repr(problem)


def test_a_value_with_nul_or_too_long_is_not_repeated() -> None:
    problems = list(limits.check_env("env", {"A": "hunter2\0", "B": "hunter2" * 20_000}))
    assert [p.field for p in problems] == ["env.A", "env.B"]
    assert "hunter2" not in repr(problems)


@pytest.mark.parametrize("value", ["", "a\nb", "$(x)`y`'\"\\", "=x=y", "\u2603", "\udcff"])
def test_values_are_data(value: str) -> None:
    assert list(limits.check_env("env", {"A": value})) == []


def test_the_environment_as_a_whole_is_bounded() -> None:
    many = {f"A{n}": "" for n in range(limits.ENV_ENTRIES_MAX + 1)}
    assert [p.field for p in limits.check_env("env", many)] == ["env"]
    large = {f"A{n}": "x" * 100_000 for n in range(11)}
    assert [p.field for p in limits.check_env("env", large)] == ["env"]


def test_metadata_is_bounded() -> None:
    assert list(limits.check_metadata("metadata", {"k": "v", "empty": ""})) == []
    bad = {"": "v", "k" * 129: "v", "long": "v" * 1025}
    assert len(list(limits.check_metadata("metadata", bad))) == 3
    assert len(list(limits.check_metadata("metadata", {str(n): "" for n in range(65)}))) == 1


def test_refuse_raises_all_at_once_or_nothing() -> None:
    limits.refuse([])
    with pytest.raises(InvalidRequest) as refused:
        limits.refuse([*limits.check_range("a", 9, 1, 8), *limits.check_range("b", 0, 1, 8)])
    assert [p.field for p in refused.value.problems] == ["a", "b"]
    assert refused.value.problems[0].as_dict() == {
        "field": "a",
        "message": "must be from 1 to 8",
        "given": 9,
        "allowed": "1..8",
    }
