"""Rules, policies and what counts as public."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.errors import InvalidRequest
from skerry.core.netaddr import is_public, parse_address
from skerry.core.policy import Layer, Mode, Policy, parse_name, parse_rule, parse_rules


def layer(*allow: str, deny: tuple[str, ...] = (), mode: Mode = Mode.DENY, origin: str = "project") -> Layer:
    return Layer(origin, mode, parse_rules("allow", allow, tunnels=True), parse_rules("deny", deny))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("example.org", "example.org"),
        ("Example.org.", "example.org"),
        ("example.org:80,443", "example.org"),
        ("*.Test", "*.test"),
        ("github.com:22", "github.com:22"),
        ("a.test:8000-8010,22", "a.test:22,8000-8010"),
        ("a.test:*", "a.test:*"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("1.2.3.4", "1.2.3.4"),
        ("10.9.0.0/24:5432", "10.9.0.0/24:5432"),
        ("[::1]:80", "[::1]:80"),
        ("fe80::/10", "fe80::/10"),
        ("db.internal:5432->10.0.0.7:5433", "db.internal:5432 -> 10.0.0.7:5433"),
    ],
)
def test_a_rule_is_shown_in_one_way(given: str, shown: str) -> None:
    rule = parse_rule(given)
    assert rule.text == shown
    assert parse_rule(shown) == rule


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "",
            "*",
            "*.",
            "a..b",
            "-a.test",
            "http://x",
            "a.test/path",
            "a b.test",
            "a.test:",
            "a.test:0",
            "a.test:70000",
        ),
        *("a.test:80-22", "1.2.3.4/33", "::1/129", "::1/64", "10.9.0.5/24", "010.0.0.1", "2852039166", "0xA9FEA9FE"),
        *(
            "0251.0376.0251.0376",
            "169.254.43518",
            "127.1",
            "a.test/24",
            "[1.2.3.4]:80",
            "fe80::1%eth0",
            "x." * 127 + "xx",
        ),
        *(
            "db.internal -> 10.0.0.7:5432",
            "db.internal:5432 -> 10.0.0.7",
            "db.internal:1-2 -> a.test:1",
            "*.a.test:1 -> b:1",
        ),
    ],
)
def test_what_is_no_rule_is_refused_by_name(bad: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_rules("network.allow", ["ok.test", bad], tunnels=True)
    assert [problem.field for problem in caught.value.problems] == ["network.allow.1"]
    assert caught.value.problems[0].given == bad


def test_only_a_project_may_lead_to_private_services() -> None:
    with pytest.raises(InvalidRequest, match="only a project"):
        parse_rules("allow", ["db.internal:1 -> 10.0.0.7:1"])


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("test", False), ("a.test", True), ("a.b.test", True), ("eviltest", False), ("x.test.evil", False)],
)
def test_a_wildcard_covers_what_is_below_the_name(name: str, allowed: bool) -> None:
    assert Policy((layer("*.test"),)).look_up(name).allowed is allowed


def test_names_are_for_web_ports_unless_they_say_more() -> None:
    policy = Policy((layer("a.test", "b.test:22"),))
    assert policy.connect("a.test", 443).allowed
    assert policy.connect("a.test", 80).allowed
    assert not policy.connect("a.test", 22).allowed
    assert policy.connect("b.test", 22).allowed
    assert not policy.connect("b.test", 443).allowed


def test_without_a_policy_nothing_is_allowed() -> None:
    assert not Policy(()).look_up("a.test").allowed
    assert not Policy((layer(),)).connect_address(ip_address("1.1.1.1"), 443).allowed


def test_an_inner_layer_only_narrows() -> None:
    outer = layer("a.test", "b.test")
    inner = layer("b.test", "c.test", origin="sandbox")
    policy = Policy((outer, inner))
    assert policy.look_up("b.test").allowed
    assert policy.look_up("a.test").rule == "sandbox: no rule allows it"
    assert policy.look_up("c.test").rule == "project: no rule allows it"


def test_a_tunnel_leads_where_the_outermost_layer_says() -> None:
    policy = Policy((layer("db.internal:5432 -> 10.0.0.7:5433"), layer(mode=Mode.OPEN, origin="sandbox")))
    verdict = policy.connect("db.internal", 5432)
    assert (verdict.allowed, verdict.target) == (True, ("10.0.0.7", 5433))
    assert not policy.connect("db.internal", 5433).allowed
    assert not policy.connect_address(ip_address("10.0.0.7"), 5433).allowed


def test_allow_wins_over_deny_and_deny_over_open() -> None:
    policy = Policy((layer("a.test", "9.9.9.9", deny=("9.0.0.0/8",), mode=Mode.OPEN),))
    assert policy.connect("a.test", 443, ip_address("9.1.1.1")).allowed
    assert not policy.connect("b.test", 443, ip_address("9.1.1.1")).allowed
    assert policy.connect("b.test", 443, ip_address("8.8.8.8")).allowed
    assert policy.connect_address(ip_address("9.9.9.9"), 53).allowed
    assert not policy.connect_address(ip_address("9.9.9.8"), 53).allowed


@given(st.lists(st.sampled_from(["a.test", "*.test", "b.test:22", "9.0.0.0/8"]), max_size=3), st.booleans(), st.data())
def test_no_inner_layer_ever_widens(rules: list[str], is_open: bool, data: st.DataObject) -> None:
    outer = Policy((layer("a.test", "*.b.test", "9.9.9.0/24"),))
    inner = layer(*rules, mode=Mode.OPEN if is_open else Mode.DENY, origin="sandbox")
    both = Policy((*outer.layers, inner))
    name = data.draw(st.sampled_from(["a.test", "x.b.test", "evil.test", "b.test"]))
    port = data.draw(st.sampled_from([22, 80, 443, 8080]))
    address = ip_address(data.draw(st.sampled_from(["9.9.9.9", "9.1.1.1", "127.0.0.1"])))
    assert both.look_up(name).allowed <= outer.look_up(name).allowed
    assert both.connect(name, port).allowed <= outer.connect(name, port).allowed
    assert both.connect_address(address, port).allowed <= outer.connect_address(address, port).allowed


@given(st.text(max_size=300))
def test_a_name_is_a_name_or_none(text: str) -> None:
    name = parse_name(text)
    if name is not None:
        assert parse_name(name) == name
        assert name == name.lower()
        assert parse_address(name) is None


@pytest.mark.parametrize("text", ["1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_public(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "0.1.2.3"),
        *(
            "198.18.0.1",
            "192.0.2.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "192.0.0.192",
            "::",
            "::1",
            "fe80::1",
        ),
        *(
            "fc00::1",
            "fd00:ec2::254",
            "fec0::1",
            "ff02::1",
            "2001:db8::1",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
        ),
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:a9fe:a9fe::", "2001:0:1::5601:5601"),
        "2606:4700::5efe:a9fe:a9fe",
    ],
)
def test_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
