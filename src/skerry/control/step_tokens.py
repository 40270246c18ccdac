"""Step tokens of sandboxes: minted, renewed, revoked, and traded by what passes requests on.

They are in memory alone: they die with their sandbox, and with the server, whose callers mint new ones. A copy of a
sandbox has none, though the text may be in its memory.
"""

from dataclasses import replace
from typing import Any, Final

from skerry.audit import Outcome
from skerry.control.access import Access
from skerry.control.delivery import Delivery
from skerry.control.live import Live
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import text
from skerry.control.service import Context, Service
from skerry.core import ids
from skerry.core.errors import Forbidden, LimitExceeded, NotFound, Problem
from skerry.core.limits import refuse
from skerry.core.models import Bindings
from skerry.core.secrets import parse_reference
from skerry.core.step_tokens import (
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
    owns,
    renewed,
)

GRANTS_MAX: Final = 256
"""Of one sandbox at a time."""
STEP_MAX: Final = 200


class StepTokens(Service):
    def __init__(self, context: Context, access: Access, delivery: Delivery) -> None:
        super().__init__(context)
        self._access = access
        self._delivery = delivery

    async def mint(
        self, principal: Principal, sandbox_id: str, secret: str, scope: StepScope, step: str | None = None
    ) -> tuple[Grant, str]:
        """A grant that stands for a secret (NAME or NAME@VERSION), and its token, which is told this once.

        Takes the scope `secrets:use`. Raises InvalidRequest, NotFound `secret_not_found`, LimitExceeded
        `step_token_limit`.
        """
        async with self._recorder.act(principal, "step_token.minted", sandbox_id) as act:
            principal.require(Scope.SECRETS_USE)
            live = await self._access.present(principal, sandbox_id, Scope.USE)
            refuse([*_check_secret(secret), *check_scope(scope), *_check_step(step)])
            act.detail |= {"secret": secret, "step": step, **_said(scope)}
            async with self._store.read() as tx:
                await self._delivery.check(tx, live.record.project_id, Bindings({"secret": secret}))
            now = self._config.clock()
            self._forget(live)
            if len(live.grants) >= GRANTS_MAX:
                raise LimitExceeded(
                    f"sandbox {sandbox_id} has {GRANTS_MAX} step tokens", code="step_token_limit", limit=GRANTS_MAX
                )
            token = new_token()
            grant = Grant(
                ids.new_id(ids.STEP), scope, secret, step, principal.key_id, now, now + TTL, digest(token), scope.budget
            )
            live.grants[grant.id] = grant
            act.detail["token_id"] = grant.id
        return grant, token

    async def renew(self, principal: Principal, sandbox_id: str, token: str) -> tuple[Grant, str]:
        """Another token for the same grant, good for a minute from now; the budget stays what is left of it.

        Only the current token does it. Raises Forbidden `step_token_refused`.
        """
        async with self._recorder.act(principal, "step_token.renewed", sandbox_id) as act:
            live = await self._access.present(principal, sandbox_id, Scope.USE)
            grant = self._grant_of(live, token)
            if grant is None:
                raise _refused(Refusal.UNKNOWN)
            act.detail["token_id"] = grant.id
            new = new_token()
            grant, refusal = renewed(grant, token, new, self._config.clock())
            if refusal is not None:
                raise _refused(refusal)
            live.grants[grant.id] = grant
        return grant, new

    async def list(self, principal: Principal, sandbox_id: str) -> list[Grant]:
        """Those that can still be renewed, or were revoked a moment ago; the oldest first."""
        live = await self._access.present(principal, sandbox_id, Scope.USE)
        self._forget(live)
        return sorted(live.grants.values(), key=lambda grant: grant.minted_at)

    async def revoke(self, principal: Principal, sandbox_id: str, token_id: str) -> None:
        """Nothing is traded for it from now on. NotFound `step_token_not_found`; twice is no error."""
        async with self._recorder.act(principal, "step_token.revoked", sandbox_id, token_id=text(token_id, 40)):
            live = await self._access.present(principal, sandbox_id, Scope.USE)
            grant = live.grants.get(token_id)
            if grant is None:
                raise NotFound(f"there is no step token {text(token_id, 40)}", code="step_token_not_found")
            live.grants[grant.id] = replace(grant, revoked=grant.revoked or Refusal.REVOKED)

    async def trade(self, sandbox_id: str, token: str, use: Use) -> bytes:
        """The credential, for a request that a sandbox is about to make. For what passes requests on, outside the
        sandbox: no face gives it to a caller.

        A use outside the scope revokes the grant before this raises. Raises Forbidden `step_token_refused`, and what
        opening the secret does: a use that was not refused is counted all the same.
        """
        live = self._live.get(sandbox_id)
        grant = None if live is None else self._grant_of(live, token)
        if live is None or grant is None:
            raise _refused(Refusal.UNKNOWN)
        grant, refusal = judge(grant, token, use, self._config.clock())
        live.grants[grant.id] = grant
        said: dict[str, Any] = {"token_id": grant.id, "host": text(use.host, 300), "method": text(use.method, 20)}
        said["path"] = text(use.path, 300)
        if refusal is not None:
            action = "step_token.revoked" if refusal.revokes else "step_token.refused"
            event = self._recorder.on(live.record, action, Outcome.REFUSED, **said, reason=refusal.value)
            await self._recorder.write(event)
            raise _refused(refusal)
        await self._recorder.write(self._recorder.on(live.record, "step_token.traded", **said, left=grant.left))
        return await self._delivery.value(live.record.project_id, grant.secret)

    def _grant_of(self, live: Live, token: str) -> Grant | None:
        if not is_token(token):
            return None
        return next((grant for grant in live.grants.values() if owns(grant, token)), None)

    def _forget(self, live: Live) -> None:
        now = self._config.clock()
        for grant in [grant for grant in live.grants.values() if forgotten(grant, now)]:
            del live.grants[grant.id]


def _said(scope: StepScope) -> dict[str, Any]:
    return {
        "host": scope.host,
        "methods": sorted(scope.methods),
        "path_prefix": scope.path_prefix,
        "repository": scope.repository,
        "budget": scope.budget,
    }


def _refused(refusal: Refusal) -> Forbidden:
    return Forbidden(f"the step token is not taken: {refusal.value}", code="step_token_refused", reason=refusal.value)


def _check_secret(secret: str) -> list[Problem]:
    try:
        parse_reference(secret)
    except ValueError:  # it may be a value that somebody has put there: it is not repeated
        return [Problem("secret", "is not a reference to a secret", None, "NAME or NAME@VERSION")]
    return []


def _check_step(step: str | None) -> list[Problem]:
    fits = step is None or (0 < len(step) <= STEP_MAX and step.isprintable())
    return [] if fits else [Problem("step", "must be printable and not too long", None, f"1..{STEP_MAX} characters")]
