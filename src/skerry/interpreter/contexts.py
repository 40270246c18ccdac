"""Which contexts there are: one of each language that was asked for without a context, and those that were made."""

import asyncio
import os
import uuid
from collections.abc import Mapping
from typing import Final

from skerry.interpreter.context import Context, Launch
from skerry.interpreter.life import Lives

HOME: Final = "/home/user"
CONTEXTS_MAX: Final = 64
NAMES: Final = {"py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}
ABSENT: Final = ("r", "java")
"""What E2B's template has and this one has not."""


class RefusedError(Exception):
    """What was asked for is not to be had. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Contexts:
    def __init__(self, launches: Mapping[str, Launch], lives: Lives, home: str = HOME) -> None:
        self._launches = launches
        self._lives = lives
        self._home = home
        self._contexts: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}
        self._turn = asyncio.Lock()

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    def get(self, context_id: str) -> Context:
        """Raises RefusedError."""
        try:
            return self._contexts[context_id]
        except KeyError:
            raise RefusedError(404, f"Context {context_id} not found") from None

    async def default(self, language: str | None = None) -> Context:
        """The language's own context, made when it is first wanted. Raises RefusedError."""
        language = self._language(language)
        async with self._turn:
            if language not in self._defaults:
                self._defaults[language] = await self._make(language, self._home)
            return self._defaults[language]

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """Raises RefusedError."""
        language, cwd = self._language(language), cwd or self._home
        if not os.path.isabs(cwd):
            raise RefusedError(400, f"cwd must be an absolute path, not {cwd[:200]!r}")
        if not os.path.isdir(cwd) or not os.access(cwd, os.X_OK):
            raise RefusedError(400, f"cwd {cwd[:200]!r} is not a directory that can be entered")
        if len(self._contexts) >= CONTEXTS_MAX:
            raise RefusedError(429, f"there are {CONTEXTS_MAX} contexts already: remove some")
        return await self._make(language, cwd)

    async def _make(self, language: str, cwd: str) -> Context:
        context = Context(str(uuid.uuid4()), language, cwd, self._launches[language], self._lives)
        await context.start()
        self._contexts[context.id] = context
        return context

    def _language(self, given: str | None) -> str:
        language = (given or "python").strip().lower()
        language = NAMES.get(language, language)
        if language in self._launches:
            return language
        known = ", ".join(sorted(self._launches))
        what = "is not part of this template" if language in ABSENT else "is not known"
        raise RefusedError(400, f"language {language[:60]!r} {what}; there is: {known}")

    async def remove(self, context_id: str) -> None:
        """Raises RefusedError."""
        context = self.get(context_id)
        del self._contexts[context_id]
        self._defaults = {language: c for language, c in self._defaults.items() if c is not context}
        await context.close()

    async def close(self) -> None:
        for context in self.all():
            await context.close()
