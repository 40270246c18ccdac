"""What projects, templates and sandboxes may say, and the layers that come of it."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.errors import InvalidRequest
from skerry.core.models import CuratedRule, NetworkRules
from skerry.core.network import (
    DEFAULT,
    INNER_MODES,
    NOTHING,
    PROJECT_MODES,
    check_within,
    checked,
    inner_layer,
    inner_rules,
    project_layer,
)
from skerry.core.policy import Policy, parse_rule, policy_of

CURATED = [CuratedRule("index.test:443", "pip", "a test")]


def policy(project: NetworkRules, *inner: NetworkRules) -> Policy:
    return policy_of([project_layer(project, CURATED), *(inner_layer("sandbox", rules) for rules in inner)])


@pytest.mark.parametrize(
    ("rules", "listed", "own", "other"),
    [
        (DEFAULT, True, False, False),
        (NetworkRules("deny", ("own.test",)), True, True, False),
        (NetworkRules("allow", ("own.test",)), False, True, False),
        (NetworkRules("allow"), False, False, False),
        (NetworkRules("open"), True, True, True),
    ],
)
def test_what_a_mode_lets_through(rules: NetworkRules, listed: bool, own: bool, other: bool) -> None:
    found = policy(rules)
    names = ("index.test", "own.test", "other.test")
    assert [found.connect(name, 443).allowed for name in names] == [listed, own, other]


def test_what_is_within_only_narrows() -> None:
    assert not policy(DEFAULT, NetworkRules("open")).connect("other.test", 443).allowed
    assert not policy(DEFAULT, NetworkRules("allow", ("other.test",))).connect("other.test", 443).allowed
    assert not policy(NetworkRules("open"), NOTHING).connect("index.test", 443).allowed
    assert policy(NetworkRules("open"), NetworkRules("allow", ("a.test",))).connect("a.test", 443).allowed


def test_a_list_that_is_given_is_all_there_is() -> None:
    assert inner_rules(None, None, ()) == NetworkRules("open")
    assert inner_rules(None, [], ()) == NOTHING
    assert inner_rules("open", ["192.0.2.1"], ["192.0.2.0/24"]).mode == "open"


def test_rules_are_kept_in_their_one_form() -> None:
    rules = checked(NetworkRules("allow", ("A.Test.", "a.test:80,443"), ("10.0.0.0/8",)), INNER_MODES)
    assert rules == NetworkRules("allow", ("a.test",), ("10.0.0.0/8",))
    tunnel = NetworkRules("deny", ("db.test:1->10.0.0.7:2",))
    assert checked(tunnel, PROJECT_MODES, tunnels=True).allow == ("db.test:1 -> 10.0.0.7:2",)
    for wrong, field in (
        (NetworkRules("deny"), "network.mode"),
        (NetworkRules("allow", ("ok.test", "http://x")), "network.allow.1"),
        (NetworkRules("open", (), ("*",)), "network.deny.0"),
        (NetworkRules("allow", ("db.test:1 -> 10.0.0.7:2",)), "network.allow.0"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            checked(wrong, INNER_MODES, "network.")
        assert [problem.field for problem in caught.value.problems] == [field]


@pytest.mark.parametrize("inside", ["index.test", "index.test:443", "*.test", "index.test:*"])
def test_an_entry_that_can_allow_something_is_taken(inside: str) -> None:
    check_within(NetworkRules("allow", (inside,)), [project_layer(DEFAULT, CURATED)])


@pytest.mark.parametrize("beyond", ["other.test", "index.test:80", "x.index.test", "*.index.test", "192.0.2.1"])
def test_an_entry_that_can_never_allow_anything_is_named(beyond: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_within(NetworkRules("allow", ("index.test", beyond)), [project_layer(DEFAULT, CURATED)], "network.")
    assert caught.value.code == "beyond_policy"
    assert [problem.field for problem in caught.value.problems] == ["network.allow.1"]


RULES = st.sampled_from(
    ["a.test", "*.a.test", "x.a.test:443", "*.test:22-90", "b.test:22", "10.0.0.0/8", "10.1.0.0/16:80", "10.1.2.3:22"]
)


@given(RULES, RULES, st.sampled_from(["a.test", "x.a.test", "y.x.a.test", "b.test"]), st.sampled_from([22, 80, 443]))
def test_what_both_cover_makes_them_overlap(left: str, right: str, name: str, port: int) -> None:
    one, other = parse_rule(left), parse_rule(right)
    assert one.overlaps(other) == other.overlaps(one)
    address = ip_address("10.1.2.3")
    for rule in (one, other):
        if not rule.covers_port(port) or not (rule.covers_name(name) or rule.covers_address(address)):
            return
    if (one.network is None) == (other.network is None):
        assert one.overlaps(other) or (one.network is None and not (one.covers_name(name) and other.covers_name(name)))
