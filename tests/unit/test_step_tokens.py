"""What a step token may be traded for, when, and what ends it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.step_tokens import (
    GRACE,
    TTL,
    Grant,
    Refusal,
    StepScope,
    Use,
    check_scope,
    digest,
    forgotten,
    is_token,
    judge,
    new_token,
    outside,
    owns,
    renewed,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCOPE = StepScope("git.example", frozenset({"GET", "POST"}), repository="acme/app", budget=2)
FETCH = Use("git.example", "GET", "/acme/app.git/info/refs")
TOKEN = new_token()


def grant(**changes: object) -> Grant:
    made = Grant("st1", SCOPE, "git", "review", "key1", NOW, NOW + TTL, digest(TOKEN), SCOPE.budget)
    return replace(made, **changes)  # type: ignore[arg-type]


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_a_token_is_long_random_and_known_by_its_form() -> None:
    assert is_token(TOKEN)
    assert new_token() != TOKEN
    for other in ("", TOKEN[:-1], TOKEN + "x", "ghp_" + "a" * 40, TOKEN + "\n"):
        assert not is_token(other)
    assert TOKEN not in repr(grant())


@pytest.mark.parametrize(
    ("use", "refusal"),
    [
        (FETCH, None),
        (Use("GIT.Example.", "POST", "/acme/app/git-upload-pack"), None),
        (Use("git.example", "GET", "/repos/acme/app/pulls"), None),
        (Use("git.example", "GET", "/api/v3/repos/acme/app"), None),
        (Use("evil.example", "GET", "/acme/app.git"), Refusal.HOST),
        (Use("git.example.evil", "GET", "/acme/app.git"), Refusal.HOST),
        (Use("git.example", "DELETE", "/acme/app.git"), Refusal.METHOD),
        (Use("git.example", "get", "/acme/app.git"), Refusal.METHOD),
        (Use("git.example", "GET", "/acme/application"), Refusal.REPOSITORY),
        (Use("git.example", "GET", "/acme/app.github"), Refusal.REPOSITORY),
        (Use("git.example", "GET", "/acme/other.git"), Refusal.REPOSITORY),
        (Use("git.example", "GET", "/"), Refusal.REPOSITORY),
        (Use("git.example", "GET", "/acme/app/../other"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app/%2e%2e/other"), Refusal.PATH),
        (Use("git.example", "GET", "/repos/acme/app/branches/fix%2Fit%20now"), None),
        (Use("git.example", "GET", "/acme/app/..%2fother"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app/%252e%252e/other"), Refusal.PATH),
        (Use("git.example", "GET", "/acme%2Fapp/x"), Refusal.REPOSITORY),
        (Use("git.example", "GET", "/acme/app/x%0d%0aHost:%20evil"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app/\xa0"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app//x"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app/./x"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app\\..\\x"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app;x/y"), Refusal.PATH),
        (Use("git.example", "GET", "http://git.example/acme/app"), Refusal.PATH),
        (Use("git.example", "GET", "/acme/app/" + "x" * 9000), Refusal.PATH),
        (Use("git.example", "GET", ""), Refusal.PATH),
    ],
)
def test_what_is_outside_a_scope(use: Use, refusal: Refusal | None) -> None:
    assert outside(SCOPE, use) is refusal


def test_a_path_prefix_is_whole_segments() -> None:
    scope = StepScope("api.example", frozenset({"GET"}), path_prefix="/v1/items")
    said = {
        path: outside(scope, Use("api.example", "GET", path)) for path in ("/v1/items", "/v1/items/7", "/v1/items2")
    }
    assert list(said.values()) == [None, None, Refusal.PATH]


@given(st.text(max_size=60))
def test_no_path_leads_out_of_its_prefix(path: str) -> None:
    """However a server resolves what is let through: dots, escapes and double slashes are not among it."""
    if outside(StepScope("a", frozenset({"GET"}), path_prefix="/a/b"), Use("a", "GET", f"/a/b/{path}")) is None:
        assert ".." not in unquote(path).split("/")
        assert not set("\\;%") & set(unquote(path))


def test_each_trade_takes_of_the_budget_and_one_too_many_ends_it() -> None:
    left = grant()
    for _ in range(2):
        left, refusal = judge(left, TOKEN, FETCH, NOW)
        assert refusal is None
    left, refusal = judge(left, TOKEN, FETCH, NOW)
    assert (refusal, left.revoked) == (Refusal.BUDGET, Refusal.BUDGET)
    assert Refusal.BUDGET.revokes


def test_a_use_outside_the_scope_ends_it_for_good() -> None:
    left, refusal = judge(grant(), TOKEN, Use("evil.example", "GET", "/"), NOW)
    assert (refusal, left.revoked) == (Refusal.HOST, Refusal.HOST)
    assert judge(left, TOKEN, FETCH, NOW) == (left, Refusal.REVOKED)
    assert renewed(left, TOKEN, new_token(), NOW) == (left, Refusal.REVOKED)


def test_a_foreign_token_changes_nothing() -> None:
    assert judge(grant(), new_token(), Use("evil.example", "GET", "/"), NOW) == (grant(), Refusal.UNKNOWN)
    assert renewed(grant(), new_token(), new_token(), NOW) == (grant(), Refusal.UNKNOWN)


def test_it_lives_a_minute_and_can_be_renewed_a_little_longer() -> None:
    assert judge(grant(), TOKEN, FETCH, after(59.9))[1] is None
    assert judge(grant(), TOKEN, FETCH, after(60))[1] is Refusal.EXPIRED
    assert not forgotten(grant(), after(69.9))
    again, refusal = renewed(grant(), TOKEN, new := new_token(), after(69.9))
    assert refusal is None
    assert judge(again, new, FETCH, after(129.8))[1] is None
    assert judge(again, TOKEN, FETCH, after(69.95))[1] is Refusal.EXPIRED  # it had ended
    assert renewed(grant(), TOKEN, new_token(), NOW + TTL + GRACE)[1] is Refusal.EXPIRED
    assert forgotten(grant(), NOW + TTL + GRACE)


def test_what_is_under_way_is_not_cut_off_by_a_renewal() -> None:
    again, _ = renewed(grant(), TOKEN, new := new_token(), after(30))
    assert again.expires_at == after(90)
    assert owns(again, TOKEN)
    assert owns(again, new)
    assert judge(again, TOKEN, FETCH, after(39.9))[1] is None
    assert judge(again, TOKEN, FETCH, after(40))[1] is Refusal.EXPIRED
    assert renewed(again, TOKEN, new_token(), after(31))[1] is Refusal.UNKNOWN  # only the current one renews
    third, _ = renewed(again, new, new_token(), after(35))
    assert judge(third, TOKEN, FETCH, after(36))[1] is Refusal.UNKNOWN
    assert third.left == grant().left  # a renewal gives no new budget


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"host": "Git.example"}, "host"), ({"host": "a b"}, "host"), ({"host": ""}, "host"),
        ({"methods": frozenset()}, "methods"), ({"methods": frozenset({"TRACE"})}, "methods"),
        ({"path_prefix": "a"}, "path_prefix"), ({"path_prefix": "/a/../b"}, "path_prefix"),
        ({"path_prefix": "/a//b"}, "path_prefix"), ({"repository": "app"}, "repository"),
        ({"repository": "acme/../app"}, "repository"), ({"budget": 0}, "budget"), ({"budget": 10_001}, "budget"),
    ],
)  # fmt: skip
def test_a_scope_that_says_nothing_clear_is_refused(changes: dict[str, object], field: str) -> None:
    assert [problem.field for problem in check_scope(replace(SCOPE, **changes))] == [field]  # type: ignore[arg-type]
    assert list(check_scope(SCOPE)) == []
