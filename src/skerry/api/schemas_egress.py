"""Shapes of what may leave sandboxes, as `schemas` has the others."""

from typing import Literal

from pydantic import Field

from skerry.api.schemas import NetworkView, Rules, Strict, View


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
