"""Templates, as far as there are any: those of the server, and snapshots, which can be used like them."""

from typing import Final
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from skerry.api import requests, wire
from skerry.api.e2b.control import models, pages, views
from skerry.api.e2b.control.context import Context
from skerry.api.e2b.control.names import Name, is_snapshot_id, parse, resolve
from skerry.control import Template
from skerry.core.errors import Forbidden, NotFound, NotSupported
from skerry.core.limits import TAG_DEFAULT, check_range, refuse
from skerry.core.models import Snapshot, SnapshotState

TAGS: Final = 100
PAGE_MAX: Final = 100


async def list_(request: Request) -> Response:
    """By name."""
    asked = await Context.of(request)
    query = requests.query(request, models.ListTemplates)
    asked.require_team(query.team_id)
    refuse(check_range("limit", query.limit, 1, PAGE_MAX))
    after = pages.cursor_of(query) or ""
    found = sorted(await asked.services.templates.list(asked.principal), key=lambda one: one.name)
    rest = [one for one in found if one.name > after]
    page = rest[: query.limit]
    headers = pages.headers_of(query, page[-1].name if len(rest) > len(page) else None)
    return wire.Json([views.template(one) for one in page], headers=headers)


async def get(request: Request) -> Response:
    asked = await Context.of(request)
    query = requests.query(request, models.ListTemplates)
    refuse(check_range("limit", query.limit, 1, PAGE_MAX))
    pages.cursor_of(query)  # there is one build, so no token was given
    found = await asked.services.templates.get(asked.principal, _ref(asked, request).native)
    return wire.Json(views.with_builds(found))


async def alias(request: Request) -> Response:
    """Whether there is something of that name, and what its id is."""
    asked = await Context.of(request)
    requests.no_query(request)
    found = await _find(asked, _ref(asked, request, "alias"))
    if isinstance(found, Template):
        return wire.Json({"templateID": found.name, "public": True})
    return wire.Json({"templateID": found.id, "public": False})


async def delete(request: Request) -> Response:
    """A snapshot's end. The server's own templates are not a caller's to delete."""
    asked = await Context.of(request)
    requests.no_query(request)
    ref = _ref(asked, request)
    found = await _find(asked, ref)
    if isinstance(found, Template):
        raise Forbidden(f"template {found.name!r} belongs to the server", template=found.name)
    await asked.services.snapshots.delete(asked.principal, found.id if is_snapshot_id(ref) else found.name or found.id)
    return Response(status_code=204)


async def tags(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    ref = _ref(asked, request)
    found = await _find(asked, ref)
    if isinstance(found, Template):
        return wire.Json([views.tag(TAG_DEFAULT, found.name, found.created_at)])
    if found.name is None:
        return wire.Json([views.tag(TAG_DEFAULT, found.id, found.created_at)])
    return wire.Json(views.tags_of(await _named(asked, found.name.partition(":")[0])))


async def assign_tags(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.AssignTags)
    for text in (wanted.target, *(f"name:{tag}" for tag in wanted.tags)):
        parse("target" if text == wanted.target else "tags", text)
    await _find(asked, resolve("target", wanted.target, asked.principal))
    raise _one_tag()


async def delete_tags(request: Request) -> Response:
    asked = await Context.of(request)
    requests.no_query(request)
    wanted = await requests.body(request, models.DeleteTags)
    for tag in wanted.tags:
        parse("tags", f"name:{tag}")
    await _find(asked, resolve("name", wanted.name, asked.principal))
    raise _one_tag()


def _one_tag() -> NotSupported:
    return NotSupported(
        "a template or snapshot has the one tag that it was given when it was made: take a snapshot as name:tag"
    )


def _ref(asked: Context, request: Request, field: str = "templateID") -> Name:
    return resolve(field, unquote(request.path_params["ref"]), asked.principal)


async def _find(asked: Context, ref: Name) -> Template | Snapshot:
    """What a sandbox could be made of. Raises NotFound."""
    services, principal = asked.services, asked.principal
    if is_snapshot_id(ref):
        return await services.snapshots.get(principal, ref.name)
    try:
        return await services.templates.get(principal, ref.native)
    except NotFound:
        if ref.tag is not None:
            return await services.snapshots.get(principal, ref.native)
        named = await _named(asked, ref.name)
        if not named:
            raise
        return next((one for one in named if one.name == ref.name), named[0])


async def _named(asked: Context, name: str) -> list[Snapshot]:
    """All snapshots of a name, whatever their tags; newest first."""
    page = await asked.services.snapshots.list(
        asked.principal, name=name, any_tag=True, states=[SnapshotState.READY], newest_of_name=True, limit=TAGS
    )
    return list(page.items)
