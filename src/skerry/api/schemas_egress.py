"""Shapes of what may leave sandboxes, as `schemas` has the others."""

from typing import Literal

from pydantic import Field

from skerry.api.schemas import NetworkView, Query, Rules, Strict, View


class PutEgress(Strict):
    mode: Literal["deny", "allow", "open"] = Field(
        description="deny: the curated list and `allow`; allow: `allow` alone; open: every public address but `deny`"
    )
    allow: Rules = Field(
        default_factory=list, description="Rules; NAME:PORT -> HOST:PORT, too, which leads to a private service"
    )
    deny: Rules = Field(default_factory=list)


class PolicyView(View):
    template: str | None
    mode: Literal["deny", "allow", "open"]
    allow: list[str]
    deny: list[str]
    updated_at: str | None


class CuratedView(View):
    rule: str
    tool: str
    source: str


class EgressView(View):
    project_id: str
    policy: PolicyView
    templates: list[PolicyView]
    curated: list[CuratedView]
    notes: list[str]


class PolicySet(PolicyView):
    connections_cut: int
    pending: int


class EgressReset(View):
    connections_cut: int
    pending: int


class NetworkSet(NetworkView):
    connections_cut: int


class LayerView(View):
    origin: Literal["project", "template", "sandbox"]
    mode: Literal["deny", "open"]
    allow: list[str]
    deny: list[str]


class NetworkInForce(View):
    network: NetworkView | None
    layers: list[LayerView]


class NetworkEvents(Query):
    refused: bool = Field(default=False, description="Only what was not allowed")
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class NetworkEventView(View):
    id: str
    at: str
    kind: Literal["look_up", "connection", "packet"]
    allowed: bool
    rule: str
    name: str | None
    address: str | None
    port: int | None
    record: str | None
    protocol: str | None
    sent_bytes: int
    received_bytes: int
    duration_ms: float
    error: str | None
    count: int


class NetworkEventPage(View):
    items: list[NetworkEventView]
    next_cursor: str | None
