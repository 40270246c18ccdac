"""What projects, templates and sandboxes may say about what leaves, and the layers that come of it. Pure.

A project's mode is one of

    deny     what nothing allows is refused; allowed are the curated list and the project's own rules. The default
    allow    the project's own rules alone
    open     every public address, but for what the project's `deny` names

A template's (within a project) and a sandbox's own are `allow` (its rules alone) or `open` (whatever is allowed around
it, but for its `deny`). They are layers inside the project's, so that they can only narrow it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from skerry.core.errors import InvalidRequest, Problem
from skerry.core.models import CuratedRule, EgressLayer, NetworkRules
from skerry.core.policy import Mode, parse_rules, policy_of

DENY: Final = "deny"
ALLOW: Final = "allow"
OPEN: Final = "open"
PROJECT_MODES: Final = (DENY, ALLOW, OPEN)
INNER_MODES: Final = (ALLOW, OPEN)

DEFAULT: Final = NetworkRules(DENY)
"""Of a project that has said nothing."""
NOTHING: Final = NetworkRules(ALLOW)
"""Nothing leaves."""


def inner_rules(mode: str | None, allow: Iterable[str] | None, deny: Iterable[str]) -> NetworkRules:
    """What a sandbox or a template says: with `allow`, even an empty one, those alone, unless `mode` says otherwise."""
    return NetworkRules(mode or (OPEN if allow is None else ALLOW), tuple(allow or ()), tuple(deny))


def checked(rules: NetworkRules, modes: Collection[str], field: str = "", *, tunnels: bool = False) -> NetworkRules:
    """The same with each rule in its one form and doubles gone. `field`: what the fields are called before their own
    names, such as "network.". Raises InvalidRequest that names each entry that is no rule."""
    if rules.mode not in modes:
        raise InvalidRequest.of(f"{field}mode", "is not a mode", given=rules.mode, allowed=", ".join(modes))
    allow = parse_rules(f"{field}allow", rules.allow, tunnels=tunnels)
    deny = parse_rules(f"{field}deny", rules.deny)
    return NetworkRules(rules.mode, tuple(rule.text for rule in allow), tuple(rule.text for rule in deny))


def project_layer(rules: NetworkRules, curated: Sequence[CuratedRule]) -> EgressLayer:
    """The outermost."""
    listed = tuple(found.rule for found in curated) if rules.mode == DENY else ()
    return EgressLayer("project", _mode(rules), tuple(dict.fromkeys((*rules.allow, *listed))), rules.deny)


def inner_layer(origin: str, rules: NetworkRules) -> EgressLayer:
    """`origin`: "template" or "sandbox"."""
    return EgressLayer(origin, _mode(rules), rules.allow, rules.deny)


def check_within(rules: NetworkRules, outer: Sequence[EgressLayer], field: str = "") -> None:
    """Raises InvalidRequest `beyond_policy` that names each entry of `allow` that could never allow anything."""
    around = policy_of(outer)
    problems = [
        Problem(f"{field}allow.{index}", "is beyond what the layers around it allow", text, "what they allow")
        for index, (text, rule) in enumerate(zip(rules.allow, parse_rules("allow", rules.allow), strict=True))
        if not around.could_allow(rule)
    ]
    if problems:
        said = "; ".join(f"{p.field}: {p.given} {p.message}" for p in problems[:5])
        raise InvalidRequest(said, problems=problems, code="beyond_policy")


def _mode(rules: NetworkRules) -> str:
    return Mode.OPEN.value if rules.mode == OPEN else Mode.DENY.value
