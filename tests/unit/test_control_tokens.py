"""Tokens of single sandboxes: stable, apart from each other, and bound to one sandbox."""

import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.control.live import LiveSandboxes
from skerry.control.principal import Scope
from skerry.control.tokens import SandboxTokens
from skerry.core import ids
from skerry.core.lifecycle import State
from skerry.core.models import Sandbox, SandboxSpec

KEY = bytes(range(32))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def record(sandbox_id: str) -> Sandbox:
    return Sandbox(
        sandbox_id, "tn", "pj", SandboxSpec(), State.RUNNING, "nd", NOW, NOW, NOW + timedelta(hours=1), None, None,
        None, None,
    )  # fmt: skip


def tokens_of(*sandbox_ids: str, key: bytes = KEY) -> SandboxTokens:
    live = LiveSandboxes(lambda: NOW, 1)
    for sandbox_id in sandbox_ids:
        live.add(record(sandbox_id))
    return SandboxTokens(key, live)


def test_a_token_opens_its_own_sandbox_for_its_own_purpose_only() -> None:
    one, other = ids.new_id(ids.SANDBOX), ids.new_id(ids.SANDBOX)
    tokens = tokens_of()
    assert tokens.opens(one, tokens.access(one))
    assert tokens.opens_ports(one, tokens.traffic(one))
    for wrong in (None, "", tokens.access(other), tokens.traffic(one), tokens.access(one)[:-1], "é", "\udc80"):
        assert not tokens.opens(one, wrong)
    assert not tokens.opens_ports(one, tokens.access(one))


def test_a_token_is_the_same_after_a_restart_and_another_under_another_key() -> None:
    one = ids.new_id(ids.SANDBOX)
    assert tokens_of().access(one) == tokens_of().access(one)
    assert tokens_of().access(one) != tokens_of(key=bytes(32)).access(one)
    with pytest.raises(ValueError, match="32"):
        tokens_of(key=b"short")


def test_a_holder_sees_this_sandbox_and_may_only_use_it() -> None:
    one, other = record(ids.new_id(ids.SANDBOX)), record(ids.new_id(ids.SANDBOX))
    for holder in (tokens_of().principal_of(one), tokens_of().visitor_of(one)):
        assert holder.sees(one)
        assert not holder.sees(other)
        assert holder.scopes == {Scope.USE.value}
        assert holder.key_id.endswith(one.id)
        assert len(holder.key_id) <= 32  # what the audit record's column takes


@given(TEXT, st.sampled_from(["read", "write"]), TEXT, st.none() | st.integers(0, 2**40))
def test_a_signature_is_e2bs_and_finds_its_sandbox(path: str, operation: str, user: str, expires: int | None) -> None:
    one, other = "sb" + "1" * 20, "sb" + "2" * 20
    tokens = tokens_of(one, other)
    said = f"{path}:{operation}:{user}:{tokens.access(one)}" + ("" if expires is None else f":{expires}")
    expected = "v1_" + base64.b64encode(hashlib.sha256(said.encode()).digest()).decode().rstrip("=")
    assert tokens.signature(one, path, operation, user, expires) == expected
    found = tokens.find_signed(expected, path, operation, user, expires)
    assert found is not None
    assert found.id == one
    assert tokens.find_signed(expected, path + "x", operation, user, expires) is None
    assert tokens.find_signed(expected, path, operation + "x", user, expires) is None
    assert tokens.find_signed(expected, path, operation, user, 2**41) is None
