"""Every documented operation under generated requests: no 5xx, and no answer that OpenAPI does not tell of."""

import asyncio
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from skerry.api.app import create_app
from skerry.control import Services
from support.api_server import Api, running_api

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 15
ENDLESS = {"/v1/sandboxes/{sandbox_id}/files/watch"}
"""Streams that end by an error only: their own tests read them."""


class Background:
    """The server in a loop of its own: schemathesis is not asynchronous."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.api: Api | None = None
        self.sandbox = ""
        self.process = ""
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with running_api(self._folder, keepalive_s=1) as api:
            self.api = api
            self.sandbox = await api.sandbox(idle_timeout_ms=None, auto_resume=True)
            started = await api.http.post(f"/v1/sandboxes/{self.sandbox}/processes", json={"command": "x"})
            self.process = started.json()["process_id"]
            self._ready.set()
            await self._stop.wait()

    @property
    def url(self) -> str:
        assert self.api is not None
        return self.api.url

    @property
    def key(self) -> str:
        assert self.api is not None
        return self.api.key

    def aim(self, case: Any) -> None:
        """Send most requests to a sandbox and a process that are there, with a good key; deleting the sandbox would
        leave nothing to ask."""
        case.headers = {n: v for n, v in (case.headers or {}).items() if n.lower() != "authorization"}
        case.headers["X-API-Key"] = self.key
        if case.operation.path in ENDLESS:
            case.path_parameters["sandbox_id"] = "sb00000000000000000000"
            return
        asked = repr((case.query, case.body)).encode("utf-8", "replace")
        if "sandbox_id" not in (case.path_parameters or {}) or not zlib.crc32(asked) % 4:
            return
        if case.method.upper() == "DELETE" and case.operation.path.endswith("{sandbox_id}"):
            return
        case.path_parameters["sandbox_id"] = self.sandbox
        if "process" in case.path_parameters:
            case.path_parameters["process"] = self.process

    def __enter__(self) -> "Background":
        self._thread.start()
        self._ready.wait(30)
        assert self.api is not None
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    with Background(tmp_path_factory.mktemp("api")) as found:
        yield found


# Only the document is needed to know the operations: no service is asked.
SCHEMA = schemathesis.openapi.from_dict(create_app(cast("Services", None)).openapi())
OPERATIONS = {f"{o.method.upper()} {o.path}": o for o in (r.ok() for r in SCHEMA.get_all_operations())}
CASES = [
    (name, mode)
    for name, operation in OPERATIONS.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # What takes nothing cannot be asked wrongly.
    if mode is GenerationMode.POSITIVE or operation.body or list(operation.iter_parameters())
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_answer_that_is_not_documented(name: str, mode: GenerationMode, background: Background) -> None:
    operation = OPERATIONS[name]
    cases = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        background.aim(case)
        case.call_and_validate(base_url=background.url, checks=CHECKS, timeout=20)

    ask()
