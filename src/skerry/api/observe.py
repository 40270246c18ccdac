"""What is seen of every request: its id, its line in the access log, its numbers, and its failure if it has one.

Pure ASGI, outermost. Keys and queries are never logged (a query may hold file names and environment).
"""

import secrets
import time
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.api import problems
from skerry.api.problems import ClientGone
from skerry.control import PoolStatus
from skerry.core.errors import SkerryError

log = structlog.get_logger("skerry.api")

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class PoolNumbers(Collector):
    """What the nodes counted of their warm clones."""

    SHAPE = ("template", "cpu", "memory_mb")

    def __init__(self) -> None:
        self.found: Sequence[PoolStatus] = ()

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("skerry_pool_ready", "Warm clones that stand ready", labels=self.SHAPE)
        wanted = GaugeMetricFamily("skerry_pool_wanted", "Warm clones that are to stand ready", labels=self.SHAPE)
        oldest = GaugeMetricFamily("skerry_pool_oldest_seconds", "Age of the oldest of them", labels=self.SHAPE)
        hits = CounterMetricFamily("skerry_pool_hits", "Creates that a warm clone served", labels=self.SHAPE)
        misses = CounterMetricFamily("skerry_pool_misses", "Creates that found none", labels=self.SHAPE)
        for one in self.found:
            shape = (one.template, str(one.cpu), str(one.memory_mb))
            ready.add_metric(shape, one.ready)
            wanted.add_metric(shape, one.wanted)
            oldest.add_metric(shape, one.oldest_s)
            hits.add_metric(shape, one.hits)
            misses.add_metric(shape, one.misses)
        yield from (ready, wanted, oldest, hits, misses)


class Metrics:
    """The server's numbers, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "skerry_http_requests",
            "Requests by route and status",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "skerry_http_request_seconds",
            "From a request's first byte to its answer's last",
            ("method", "route"),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.sandboxes = Gauge("skerry_sandboxes", "Sandboxes by state", ("state",), registry=self.registry)
        self.create_seconds = Histogram(
            "skerry_sandbox_create_seconds", "Creating a sandbox that runs", buckets=BUCKETS, registry=self.registry
        )
        self.pause_seconds = Histogram(
            "skerry_sandbox_pause_seconds", "Pauses that were asked for", buckets=BUCKETS, registry=self.registry
        )
        self.resume_seconds = Histogram(
            "skerry_sandbox_resume_seconds", "Resumes that were asked for", buckets=BUCKETS, registry=self.registry
        )
        self.snapshot_seconds = Histogram(
            "skerry_snapshot_seconds", "Taking a snapshot", buckets=BUCKETS, registry=self.registry
        )
        self.pool = PoolNumbers()
        self.registry.register(self.pool)
        self.start_seconds = Histogram(
            "skerry_process_start_seconds", "Starting a process in a guest", buckets=BUCKETS, registry=self.registry
        )
        self.run_seconds = Histogram(
            "skerry_run_seconds", "Blocking runs, from request to exit", buckets=BUCKETS, registry=self.registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Observe:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = secrets.token_hex(10)
        scope["skerry.request_id"] = request_id
        began = time.perf_counter()
        seen = _Seen(send, request_id)
        try:
            await self.app(scope, receive, seen)
        except ClientGone:
            scope["skerry.client_gone"] = True
        except Exception as error:  # noqa: BLE001  (this is where the unexpected ends)
            await self._failed(scope, receive, seen, error, request_id)
        finally:
            self._note(scope, seen, time.perf_counter() - began, request_id)

    async def _failed(self, scope: Scope, receive: Receive, seen: "_Seen", error: Exception, request_id: str) -> None:
        if isinstance(error, SkerryError):
            told = error
            log.warning("answer broke off", request_id=request_id, code=error.code, detail=error.message)
        else:
            told = problems.unexpected()
            log.error("unexpected exception", request_id=request_id, path=printable(scope), exc_info=error)
        if seen.status is not None:
            return  # Under way: ending here without the last piece makes the server cut the line.
        if scope["type"] == "websocket":
            await deny(problems.response(told, request_id), seen)
        else:
            await problems.response(told, request_id)(scope, receive, seen)

    def _note(self, scope: Scope, seen: "_Seen", seconds: float, request_id: str) -> None:
        method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
        status = 499 if scope.get("skerry.client_gone") else (seen.status or 500)
        route = getattr(scope.get("route"), "path", None) or scope.get("skerry.face", "none")
        self.metrics.requests.labels(_known(method), route, str(status)).inc()
        self.metrics.request_seconds.labels(_known(method), route).observe(seconds)
        log.info(
            "request",
            request_id=request_id,
            method=method,
            path=printable(scope),
            **named(scope),
            status=status,
            ms=round(seconds * 1000, 1),
            sent=seen.sent,
        )


class _Seen:
    """`send`, with the request's id put into what begins an answer, and a note of what was sent."""

    __slots__ = ("_header", "_send", "sent", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode("ascii"))
        self.status: int | None = None
        self.sent = 0

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            self.sent += len(message.get("body", b""))
        elif kind in {"http.response.start", "websocket.http.response.start", "websocket.accept"}:
            self.status = 101 if kind == "websocket.accept" else message["status"]
            headers = message.get("headers", ())
            if all(name != b"x-request-id" for name, _ in headers):  # a sandbox's server may have its own
                message["headers"] = [*headers, self._header]
        await self._send(message)


async def deny(response: Any, send: Send) -> None:
    """Refuse a WebSocket handshake with an HTTP answer."""
    await send(
        {"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    await send({"type": "websocket.http.response.body", "body": response.body, "more_body": False})


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})


def _known(method: str) -> str:
    """Methods are the client's to invent: a label must not be."""
    return method if method in _METHODS else "OTHER"


def named(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """The sandbox that is meant, where its host or headers say so and its path does not."""
    found = scope.get("skerry.sandbox_id")
    return {} if found is None else {"sandbox_id": found, "port": scope["skerry.route"].port}


def printable(scope: MutableMapping[str, Any]) -> str:
    path: str = scope.get("path", "")
    return path.encode("utf-8", "backslashreplace").decode("utf-8")[:500]
