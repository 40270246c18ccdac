"""Step tokens over a real database: who mints them, what they are traded for, what ends them, what is on record."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.control.step_tokens import GRANTS_MAX
from skerry.core.errors import Forbidden, InvalidRequest, LimitExceeded, NotFound
from skerry.core.models import Sandbox
from skerry.core.step_tokens import StepScope, Use
from support.house import House, opened

VALUE = "ghp-Xq7-marker-credential"
SCOPE = StepScope("git.example", frozenset({"GET", "POST"}), repository="acme/app", budget=3)
FETCH = Use("git.example", "GET", "/acme/app.git/info/refs")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(f"sqlite:///{tmp_path}/skerry.db") as made:
        await made.services.secrets.put(made.me, "git", VALUE)
        yield made


@pytest.fixture
async def box(house: House) -> Sandbox:
    return await house.create()


async def mint(house: House, box: Sandbox, scope: StepScope = SCOPE, secret: str = "git") -> tuple[str, str]:
    grant, token = await house.services.step_tokens.mint(house.me, box.id, secret, scope, "review")
    return grant.id, token


async def trade(house: House, box: Sandbox, token: str, use: Use = FETCH) -> str:
    """The credential, or why there is none."""
    try:
        return (await house.services.step_tokens.trade(box.id, token, use)).decode()
    except Forbidden as refused:
        assert refused.code == "step_token_refused"
        return str(refused.context["reason"])


async def test_a_token_is_traded_within_its_scope_and_budget(house: House, box: Sandbox) -> None:
    _, token = await mint(house, box)
    assert [await trade(house, box, token) for _ in range(5)] == [VALUE] * 3 + ["budget", "revoked"]


async def test_a_use_outside_ends_it_at_once_and_is_on_record(house: House, box: Sandbox) -> None:
    token_id, token = await mint(house, box)
    assert await trade(house, box, token) == VALUE
    assert await trade(house, box, token, Use("evil.example", "GET", "/acme/app.git")) == "host"
    assert await trade(house, box, token) == "revoked"
    with pytest.raises(Forbidden):
        await house.services.step_tokens.renew(house.me, box.id, token)
    page = await house.services.sandboxes.events(house.me, box.id)
    said = [(event.action, event.outcome.value) for event in page.items if event.action.startswith("step")]
    assert said == [
        ("step_token.minted", "ok"), ("step_token.traded", "ok"), ("step_token.revoked", "refused"),
        ("step_token.refused", "refused"), ("step_token.renewed", "refused"),
    ]  # fmt: skip
    assert {event.detail["token_id"] for event in page.items if event.action.startswith("step")} == {token_id}
    assert "marker" not in repr(page.items)
    assert token not in repr(page.items)


async def test_a_minute_and_renewals(house: House, box: Sandbox) -> None:
    _, token = await mint(house, box)
    house.clock.skip(50)
    _, new = await house.services.step_tokens.renew(house.me, box.id, token)
    assert [await trade(house, box, each) for each in (token, new)] == [VALUE, VALUE]
    house.clock.skip(10.1)
    assert [await trade(house, box, each) for each in (token, new)] == ["expired", VALUE]
    house.clock.skip(50)
    assert await trade(house, box, new) == "expired"
    house.clock.skip(10)
    with pytest.raises(Forbidden):
        await house.services.step_tokens.renew(house.me, box.id, new)
    assert await house.services.step_tokens.list(house.me, box.id) == []
    assert await trade(house, box, new) == "unknown"


async def test_it_is_dead_with_its_sandbox_and_no_copy_has_it(house: House, box: Sandbox) -> None:
    _, token = await mint(house, box)
    (copy,) = await house.services.forks.fork(house.me, box.id)
    assert isinstance(copy, Sandbox)
    other = await house.create()
    for foreign in (copy, other):
        assert await trade(house, foreign, token) == "unknown"
    await house.services.sandboxes.kill(house.me, box.id)
    assert await trade(house, box, token) == "unknown"


async def test_a_newer_version_counts_and_a_deleted_secret_gives_nothing(house: House, box: Sandbox) -> None:
    _, token = await mint(house, box)
    await house.services.secrets.put(house.me, "git", f"{VALUE}-2")
    assert await trade(house, box, token) == f"{VALUE}-2"
    await house.services.secrets.delete(house.me, "git")
    with pytest.raises(NotFound):
        await trade(house, box, token)


async def test_who_may_mint_what(house: House, box: Sandbox) -> None:
    tokens = house.services.step_tokens
    poor = replace(house.me, scopes=frozenset({"sandboxes:use", "sandboxes:read"}))
    with pytest.raises(Forbidden, match="secrets:use"):
        await tokens.mint(poor, box.id, "git", SCOPE)
    with pytest.raises(NotFound):
        await tokens.mint(await house.other_tenant(), box.id, "git", SCOPE)
    with pytest.raises(NotFound) as missing:
        await mint(house, box, secret="nope")
    assert missing.value.code == "secret_not_found"
    with pytest.raises(InvalidRequest) as wrong:
        await mint(house, box, replace(SCOPE, host="", budget=0), secret=f"{VALUE} pasted")
    assert [problem.field for problem in wrong.value.problems] == ["secret", "host", "budget"]
    assert "marker" not in repr(wrong.value.problems)
    for _ in range(GRANTS_MAX):
        await mint(house, box)
    with pytest.raises(LimitExceeded) as full:
        await mint(house, box)
    assert full.value.code == "step_token_limit"
    house.clock.skip(71)
    await mint(house, box)


async def test_who_revokes_it_ends_it(house: House, box: Sandbox) -> None:
    token_id, token = await mint(house, box)
    for _ in range(2):
        await house.services.step_tokens.revoke(house.me, box.id, token_id)
    assert await trade(house, box, token) == "revoked"
    with pytest.raises(NotFound) as missing:
        await house.services.step_tokens.revoke(house.me, box.id, "stpnone")
    assert missing.value.code == "step_token_not_found"
