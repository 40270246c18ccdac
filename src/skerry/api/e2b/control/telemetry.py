"""What sandboxes said of themselves (metrics), and what was done to them and in them (logs)."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from skerry.api import requests, wire
from skerry.api.e2b.control import models, views
from skerry.api.e2b.control.context import Context
from skerry.core.errors import InvalidRequest
from skerry.core.limits import check_range, refuse

IDS_MAX: Final = 100
LIMIT_MAX: Final = 1000


async def metrics(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.MetricsQuery)
    points = await asked.services.sampler.history(
        asked.principal, asked.sandbox_id, since=_moment("start", query.start), until=_moment("end", query.end)
    )
    return wire.Json([views.metric(point) for point in points])


async def metrics_of_many(request: Request) -> Response:
    asked = await Context.of(request)
    wanted = [one for one in requests.query(request, models.ManyMetricsQuery).sandbox_ids.split(",") if one]
    refuse(check_range("sandbox_ids", len(wanted), 1, IDS_MAX))
    found = await asked.services.sampler.latest(asked.principal, wanted)
    return wire.Json({"sandboxes": {sandbox_id: views.metric(point) for sandbox_id, point in found.items()}})


def _moment(field: str, seconds: float | None) -> datetime | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest.of(field, "is no time that a calendar has", given=seconds) from None


async def logs_v1(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.LogsV1)
    entries = await _entries(asked, query.limit, query.start, "forward")
    lines = [{"timestamp": entry["timestamp"], "line": entry["message"]} for entry in entries]
    return wire.Json({"logs": lines, "logEntries": entries})


async def logs_v2(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.LogsV2)
    least = views.LEVELS.index(query.level) if query.level is not None else 0

    def fits(entry: dict[str, Any]) -> bool:
        return views.LEVELS.index(entry["level"]) >= least and (not query.search or query.search in entry["message"])

    return wire.Json({"logs": await _entries(asked, query.limit, query.cursor, query.direction, fits)})


async def _entries(
    asked: Context,
    limit: int,
    from_ms: int | None,
    direction: str,
    fits: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> list[dict[str, Any]]:
    """At most `limit` entries from that time on, in that direction."""
    refuse(check_range("limit", limit, 0, LIMIT_MAX))
    moment = _moment("cursor", from_ms / 1000) if from_ms is not None else None
    backward = direction == "backward"
    found: list[dict[str, Any]] = []
    cursor = None
    while len(found) < limit:
        page = await asked.services.sandboxes.events(
            asked.principal,
            asked.sandbox_id,
            limit=LIMIT_MAX,
            cursor=cursor,
            since=None if backward else moment,
            until=moment if backward else None,
            newest_first=backward,
        )
        found += [entry for entry in map(views.log_entry, page.items) if fits(entry)]
        cursor = page.next_cursor
        if cursor is None:
            break
    return found[:limit]
