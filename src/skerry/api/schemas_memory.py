"""Shapes of pause, resume, snapshots, forks, the pool and its images, as `schemas` has the others."""

from typing import Literal

from pydantic import Field

from skerry.api.schemas import ProblemView, Query, SandboxView, Strict, TimeoutMs, View
from skerry.api.schemas_env import Env
from skerry.core import limits


class PauseSandbox(Strict):
    memory: bool = Field(default=True, description="false: keep the disk alone; a resume boots")


class ResumeSandbox(Strict):
    timeout_ms: TimeoutMs | None = Field(
        default=None, description="Its end is at least so far from now; its own timeout by default"
    )
    memory: bool = Field(
        default=True, description="false: drop the memory that was kept and boot from the disk; 409 if it runs"
    )


class TakeSnapshot(Strict):
    name: str | None = Field(default=None, description="It then stands for this one, as the newest of its name")
    memory: bool = Field(default=True, description="false: the disk alone")
    secrets: Literal["refuse", "keep"] = Field(
        default="refuse", description="Of a memory that may hold secrets: refuse it with 409, or keep it"
    )


class ForkSandbox(Strict):
    """What is left out is the original's."""

    count: int = Field(default=1, ge=1, le=limits.FORK_MAX)
    timeout_ms: TimeoutMs | None = None
    env: Env | None = None
    metadata: dict[str, str] | None = None


class ListSnapshots(Query):
    name: str | None = None
    sandbox_id: str | None = None
    limit: int = Field(default=50, ge=1, le=100)
    cursor: str | None = None


class ImagesQuery(Query):
    verify: bool = Field(default=False, description="Read every byte and compare it with what was saved")


class SnapshotView(View):
    id: str
    name: str | None
    sandbox_id: str
    template: str
    memory: bool
    cpu: int
    memory_mb: int
    disk_mb: int
    state: Literal["creating", "ready", "failed"]
    error: str | None
    size_bytes: int | None
    stood_still_ms: float | None
    created_at: str
    node_id: str
    holds_secrets: bool


class SnapshotPage(View):
    items: list[SnapshotView]
    next_cursor: str | None


class PoolItem(View):
    template: str
    cpu: int
    memory_mb: int
    ready: int
    wanted: int
    hits: int
    misses: int
    oldest_s: float


class PoolView(View):
    items: list[PoolItem]


class ImageView(View):
    image_id: str
    kind: str
    template: str
    memory: bool
    size_bytes: int
    created_at: str
    used_by: list[str]
    damage: str | None


class ImageList(View):
    items: list[ImageView]


class Collected(View):
    removed: list[str]


class Copy(View):
    """One copy of a fork: what it is, or why it is not."""

    sandbox: SandboxView | None = None
    error: ProblemView | None = None


class Copies(View):
    items: list[Copy]
