"""The curated list: what this machine's package managers use, and what the operator has added.

Asking them takes seconds, so what they said is kept in the data directory: a server starts with that, and asks anew
behind its back.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from skerry.cli.settings import Settings
from skerry.control import Services
from skerry.core.models import CuratedRule
from skerry.core.policy import parse_rules
from skerry.egress.discover import Found, asked, decode, encode

FILE: Final = "curated.json"
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class CuratedList:
    settings: Settings
    found: Found
    kept: bool
    """It is what an earlier server was told."""

    def rules(self) -> tuple[CuratedRule, ...]:
        """What was found, and before it the operator's own."""
        own = parse_rules("egress_allow", self.settings.egress_allow or (), tunnels=True)
        return (*(CuratedRule(rule.text, "settings", "egress_allow") for rule in own), *self.found.rules)


async def curated_list(settings: Settings) -> CuratedList:
    """As it was last found; the first time they are asked and waited for."""
    if not settings.egress_discover:
        return CuratedList(settings, Found(notes=["package managers are not asked (egress_discover)"]), kept=False)
    found = await asyncio.to_thread(_read, settings.data_dir / FILE)
    if found is not None:
        return CuratedList(settings, found, kept=True)
    found = await asked()
    await asyncio.to_thread(_write, settings.data_dir / FILE, found)
    return CuratedList(settings, found, kept=False)


@asynccontextmanager
async def refreshed(curated: CuratedList, services: Services) -> AsyncIterator[None]:
    """Meanwhile: ask anew, and let the services know what has changed."""
    if not curated.kept:
        yield
        return
    task = asyncio.create_task(_refresh(curated, services), name="curated list")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _refresh(curated: CuratedList, services: Services) -> None:
    found = await asked()
    if found != curated.found:
        log.info("the package managers of this machine say something new", rules=len(found.rules))
        curated.found = found
        await asyncio.to_thread(_write, curated.settings.data_dir / FILE, found)
        await services.egress.learn(curated.rules(), found.notes)


def _read(path: Path) -> Found | None:
    """None where there is none that can be read."""
    try:
        return decode(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, found: Found) -> None:
    try:
        made = path.with_suffix(".new")
        made.write_bytes(encode(found))
        made.replace(path)
    except OSError as error:
        log.warning("the curated list could not be kept", error=str(error))
