"""Rest and its kin: pause, resume, snapshots, forks, and the images that all of it lives on."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skerry.api import operations, problems, requests, schemas, wire
from skerry.api import schemas_memory as shapes
from skerry.api.schemas_env import parted
from skerry.api.streams import attended, hung_up
from skerry.api.v1.access import metrics_of, principal_of, services_of
from skerry.core.errors import SkerryError
from skerry.core.models import Sandbox

router = APIRouter(prefix="/v1", tags=["memory"])


async def pause(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.PauseSandbox, optional=True)
    began = time.perf_counter()
    box = await services_of(request).sandboxes.pause(principal, request.path_params["sandbox_id"], memory=wanted.memory)
    metrics_of(request).pause_seconds.observe(time.perf_counter() - began)
    return wire.Json(wire.sandbox(box))


async def resume(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    wanted = await requests.body(request, shapes.ResumeSandbox, optional=True)
    began = time.perf_counter()
    box = await services_of(request).sandboxes.resume(
        principal, request.path_params["sandbox_id"], timeout_ms=wanted.timeout_ms, memory=wanted.memory
    )
    metrics_of(request).resume_seconds.observe(time.perf_counter() - began)
    return wire.Json(wire.sandbox(box))


async def take_snapshot(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    key = requests.idempotency_key(request)
    wanted = await requests.body(request, shapes.TakeSnapshot, optional=True)
    began = time.perf_counter()
    found = await services_of(request).snapshots.take(
        principal,
        request.path_params["sandbox_id"],
        wanted.name,
        memory=wanted.memory,
        keep_secrets=wanted.secrets == "keep",
        idempotency_key=key,
    )
    metrics_of(request).snapshot_seconds.observe(time.perf_counter() - began)
    return wire.Json(wire.snapshot(found), 201, {"Location": f"/v1/snapshots/{found.id}"})


async def fork(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    key = requests.idempotency_key(request)
    wanted = await requests.body(request, shapes.ForkSandbox, optional=True)
    env, secrets = parted(wanted.env or {})
    making = services_of(request).forks.fork(
        principal,
        request.path_params["sandbox_id"],
        wanted.count,
        timeout_ms=wanted.timeout_ms,
        env=env,
        secrets=secrets,
        metadata=wanted.metadata,
        idempotency_key=key,
    )
    copies = await attended(making, hung_up(request.receive))  # without a key, nobody could learn their ids any more
    request_id = requests.request_id_of(request)
    return wire.Json({"items": [_copy(copy, request_id) for copy in copies]}, 201)


def _copy(copy: Sandbox | SkerryError, request_id: str) -> dict[str, object]:
    if isinstance(copy, SkerryError):
        return {"error": problems.document(copy, request_id)}
    return {"sandbox": wire.sandbox(copy)}


async def list_snapshots(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, shapes.ListSnapshots)
    page = await services_of(request).snapshots.list(
        principal, name=asked.name, sandbox_id=asked.sandbox_id, limit=asked.limit, cursor=asked.cursor
    )
    return wire.Json({"items": [wire.snapshot(each) for each in page.items], "next_cursor": page.next_cursor})


async def get_snapshot(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    found = await services_of(request).snapshots.get(principal, request.path_params["snapshot"])
    return wire.Json(wire.snapshot(found))


async def delete_snapshot(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    await services_of(request).snapshots.delete(principal, request.path_params["snapshot"])
    return Response(status_code=204)


async def pool(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    return wire.Json({"items": [wire.pool(each) for each in services_of(request).server.pool(principal)]})


async def images(request: Request) -> Response:
    principal = await principal_of(request)
    asked = requests.query(request, shapes.ImagesQuery)
    found = await services_of(request).server.images(principal, verify=asked.verify)
    return wire.Json({"items": [wire.image(each) for each in found]})


async def collect_images(request: Request) -> Response:
    principal = await principal_of(request)
    requests.no_query(request)
    return wire.Json({"removed": list(await services_of(request).server.collect_images(principal))})


operations.add(
    router,
    "POST",
    "/sandboxes/{sandbox_id}/pause",
    pause,
    summary="Keep it on disk and free its CPU and memory; nothing happens to one that is paused",
    answers={200: schemas.SandboxView},
    errors=operations.REST,
    body=shapes.PauseSandbox,
    body_needed=False,
)
operations.add(
    router,
    "POST",
    "/sandboxes/{sandbox_id}/resume",
    resume,
    summary="Let it go on; the timeout of one that runs is only ever extended",
    answers={200: schemas.SandboxView},
    errors=operations.REST,
    body=shapes.ResumeSandbox,
    body_needed=False,
)
operations.add(
    router,
    "POST",
    "/sandboxes/{sandbox_id}/snapshots",
    take_snapshot,
    summary="Keep its state; it goes on",
    answers={201: shapes.SnapshotView},
    errors=operations.REST,
    body=shapes.TakeSnapshot,
    body_needed=False,
    headers={"Idempotency-Key": "The same key and body give the same snapshot for 24 hours"},
)
operations.add(
    router,
    "POST",
    "/sandboxes/{sandbox_id}/fork",
    fork,
    summary="Running copies of it, one result for each",
    answers={201: shapes.Copies},
    errors=operations.REST,
    body=shapes.ForkSandbox,
    body_needed=False,
    headers={"Idempotency-Key": "The same key and body give the same copies for 24 hours"},
)
operations.add(
    router,
    "GET",
    "/snapshots",
    list_snapshots,
    summary="List snapshots, newest first",
    answers={200: shapes.SnapshotPage},
    errors=operations.COMMON,
    query=shapes.ListSnapshots,
)
operations.add(
    router,
    "GET",
    "/snapshots/{snapshot}",
    get_snapshot,
    summary="One snapshot",
    answers={200: shapes.SnapshotView},
    errors=(*operations.COMMON, 404),
)
operations.add(
    router,
    "DELETE",
    "/snapshots/{snapshot}",
    delete_snapshot,
    summary="Forget it, by a name all of that name; sandboxes made of it live on",
    answers={204: None},
    errors=(*operations.COMMON, 404, 409),
)
operations.add(
    router,
    "GET",
    "/pool",
    pool,
    summary="Warm clones, by template and shape",
    answers={200: shapes.PoolView},
    errors=operations.COMMON,
)
operations.add(
    router,
    "GET",
    "/images",
    images,
    summary="Memory images and disks that the node keeps",
    answers={200: shapes.ImageList},
    errors=operations.COMMON,
    query=shapes.ImagesQuery,
)
operations.add(
    router,
    "POST",
    "/images/collect",
    collect_images,
    summary="Remove those that nothing needs",
    answers={200: shapes.Collected},
    errors=operations.COMMON,
)
