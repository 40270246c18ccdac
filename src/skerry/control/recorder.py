"""Making audit records of what the services do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from skerry.audit import SYSTEM, AuditEvent, AuditSink, Outcome
from skerry.control.config import ControlConfig
from skerry.control.live import LiveSandboxes
from skerry.control.principal import Principal
from skerry.control.redaction import clean
from skerry.core import ids
from skerry.core.errors import SkerryError, clip
from skerry.core.models import Sandbox

ARGUMENTS_KEPT = 32
ARGUMENT_KEPT = 300
NAMES_KEPT = 64


def outcome_of(error: SkerryError) -> Outcome:
    """What to write down for an act that raised this."""
    if error.retry == "unknown":
        return Outcome.UNKNOWN
    return Outcome.REFUSED if error.status < 500 else Outcome.FAILED


def clipped_argv(argv: tuple[str, ...]) -> list[str]:
    """argv as it is kept: enough to know what ran, never megabytes. Odd bytes are written out."""
    shown = [text(argument, ARGUMENT_KEPT) for argument in argv[:ARGUMENTS_KEPT]]
    return shown if len(argv) <= ARGUMENTS_KEPT else [*shown, f"… ({len(argv)} arguments)"]


def text(value: str, limit: int = 1000) -> str:
    """A text that any database takes: no NUL, no lone surrogates, not long."""
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        raw = value.encode("utf-8", "backslashreplace")
    clean = raw.decode("utf-8", "backslashreplace").replace("\0", "\\0")
    return str(clip(clean, limit))


@dataclass(slots=True)
class Act:
    """What an act adds to its record while it goes on."""

    detail: dict[str, Any]


class Recorder:
    """No record of a sandbox holds a secret that it was given."""

    def __init__(self, sink: AuditSink, config: ControlConfig, live: LiveSandboxes) -> None:
        self._sink = sink
        self._config = config
        self._live = live

    def now(self) -> datetime:
        return self._config.clock()

    def by(
        self, principal: Principal, action: str, subject: str | None, outcome: Outcome = Outcome.OK, **detail: Any
    ) -> AuditEvent:
        return AuditEvent(
            ids.new_id(ids.EVENT),
            self.now(),
            principal.tenant_id,
            principal.project_id,
            principal.key_id,
            action,
            subject,
            outcome,
            self.clean(subject, detail),
        )

    def on(
        self, sandbox: Sandbox, action: str, outcome: Outcome = Outcome.OK, *, actor: str = SYSTEM, **detail: Any
    ) -> AuditEvent:
        return AuditEvent(
            ids.new_id(ids.EVENT),
            self.now(),
            sandbox.tenant_id,
            sandbox.project_id,
            actor,
            action,
            sandbox.id,
            outcome,
            self.clean(sandbox.id, detail),
        )

    def clean(self, subject: str | None, detail: dict[str, Any]) -> dict[str, Any]:
        """Without the secrets that this sandbox was given, while it lives."""
        live = None if subject is None else self._live.get(subject)
        return detail if live is None or live.redactor is None else clean(detail, live.redactor)

    async def write(self, event: AuditEvent) -> None:
        await self._sink.append(event)

    @asynccontextmanager
    async def refusals(self, principal: Principal, action: str, subject: str | None) -> AsyncIterator[None]:
        """Record only if it fails: the success is recorded with the state change itself."""
        try:
            yield
        except SkerryError as error:
            await self.write(self.by(principal, action, subject, outcome_of(error), code=error.code))
            raise

    @asynccontextmanager
    async def act(self, principal: Principal, action: str, subject: str | None, **detail: Any) -> AsyncIterator[Act]:
        """Record how it went. An act whose caller went away in the middle is `unknown`."""
        act = Act(detail)
        try:
            yield act
        except SkerryError as error:
            await self.write(self.by(principal, action, subject, outcome_of(error), **act.detail, code=error.code))
            raise
        except BaseException:
            await self.write(self.by(principal, action, subject, Outcome.UNKNOWN, **act.detail))
            raise
        await self.write(self.by(principal, action, subject, Outcome.OK, **act.detail))
