"""What E2B's clients send. Bounds are the services' to judge; here are the names, the types, and what is not known.

A field that is not known is refused: what it was to change would be ignored. `null` is as good as nothing.
"""

from typing import Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

TIMEOUT_V1_S: Final = 15
TIMEOUT_V2_S: Final = 300
SECONDS_MAX: Final = 2**31


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


def seconds(default: Any = ...) -> Any:
    """A whole number of them; needed, if there is no default."""
    return Field(default, ge=-SECONDS_MAX, le=SECONDS_MAX)


# --------------------------------------------------------------------------------------------------------- sandboxes


class AutoResume(Body):
    enabled: bool


class NetworkUpdate(Body):
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")


class Network(Body):
    allow_public_traffic: bool | None = None
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None
    rules: dict[str, Any] | None = None


class Iam(Body):
    tokens: dict[str, Any] | None = None


class NewSandboxV2(Body):
    template_id: str = Field(alias="templateID")
    timeout: int = seconds(TIMEOUT_V2_S)
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: Iam | None = None
    volume_mounts: list[dict[str, Any]] | None = None


class NewSandbox(NewSandboxV2):
    timeout: int = seconds(TIMEOUT_V1_S)
    secure: bool | None = None


class Connect(Body):
    timeout: int = seconds()
    memory: bool | None = None


class ConnectV2(Body):
    timeout: int = seconds(TIMEOUT_V2_S)
    memory: bool | None = None


class Resume(Body):
    timeout: int = seconds(TIMEOUT_V1_S)
    auto_pause: bool | None = None
    memory: bool | None = None


class Timeout(Body):
    timeout: int = seconds()


class Refresh(Body):
    duration: int = seconds(TIMEOUT_V1_S)


class Pause(Body):
    memory: bool | None = None
    require_healthy_guest: bool | None = None


class Fork(Body):
    timeout: int = seconds(TIMEOUT_V1_S)
    count: int = 1


class TakeSnapshot(Body):
    name: str | None = None
    memory: bool | None = None


class ListV1(Query):
    metadata: str | None = None
    team_id: str | None = Field(None, alias="teamID")


class ListV2(Query):
    metadata: str | None = None
    state: list[str] = Field(default_factory=list)
    order: Literal["asc", "desc"] | None = None
    started_after: AwareDatetime | None = None
    template: str | None = None
    next_token: str | None = None
    limit: int = 100


class ListSnapshots(Query):
    sandbox_id: str | None = Field(None, alias="sandboxID")
    name: str | None = None
    limit: int = 100
    next_token: str | None = None


# --------------------------------------------------------------------------------------------------------- telemetry


class MetricsQuery(Query):
    start: int | None = None
    end: int | None = None


class ManyMetricsQuery(Query):
    sandbox_ids: str = Field(alias="sandbox_ids")


class LogsV1(Query):
    start: int | None = Field(None, ge=0)
    limit: int = 1000


class LogsV2(Query):
    cursor: int | None = Field(None, ge=0)
    limit: int = 1000
    direction: Literal["forward", "backward"] = "forward"
    level: Literal["debug", "info", "warn", "error"] | None = None
    search: str | None = Field(None, max_length=256)


# --------------------------------------------------------------------------------------------------------- templates


class ListTemplates(Query):
    team_id: str | None = Field(None, alias="teamID")
    next_token: str | None = None
    limit: int = 100


class AssignTags(Body):
    target: str
    tags: list[str] = Field(min_length=1)


class DeleteTags(Body):
    name: str
    tags: list[str] = Field(min_length=1)
