"""Snapshots: take and list. They are deleted as the templates that they can be used as."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from skerry.api import requests, wire
from skerry.api.e2b.control import models, pages, views
from skerry.api.e2b.control.context import Context
from skerry.api.e2b.control.names import resolve
from skerry.core.errors import NotFound
from skerry.core.models import SnapshotState


async def take(request: Request) -> Response:
    """A name that is there already goes over to the new one."""
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.TakeSnapshot, optional=True)
    name = resolve("name", wanted.name, asked.principal).native if wanted.name else None
    kept = await asked.services.snapshots.take(
        asked.principal, asked.sandbox_id, name, memory=wanted.memory is not False
    )
    return wire.Json(views.snapshot(kept), 201)


async def list_(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.ListSnapshots)
    filters: dict[str, Any] = {}
    if query.name:
        try:
            name = resolve("name", query.name, asked.principal)
        except NotFound:
            return wire.Json([])
        filters = {"name": name.native, "any_tag": name.tag is None}
    page = await asked.services.snapshots.list(
        asked.principal,
        **filters,
        sandbox_id=query.sandbox_id or None,
        states=[SnapshotState.READY],
        newest_of_name=True,
        limit=query.limit,
        cursor=pages.cursor_of(query),
    )
    headers = pages.headers_of(query, page.next_cursor)
    return wire.Json([views.snapshot(kept) for kept in page.items], headers=headers)
