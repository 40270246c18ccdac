"""What every handler needs first: who asks, whom to ask, and where sandboxes are reached."""

from dataclasses import dataclass
from typing import Self, cast

from starlette.requests import Request

from skerry.api.v1.access import principal_of, services_of
from skerry.control import Principal, Services
from skerry.core.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Context:
    principal: Principal
    services: Services
    domain: str | None
    """Below which sandboxes have names; None: the client knows."""
    sandbox_id: str
    """Of the path; "" where it has none."""

    @classmethod
    async def of(cls, request: Request) -> Self:
        """Raises Unauthenticated."""
        return cls(
            await principal_of(request),
            services_of(request),
            cast("str | None", request.app.state.domain),
            request.path_params.get("sandbox_id", ""),
        )

    def require_team(self, team_id: str | None) -> None:
        """E2B's teams are projects here, and a key belongs to one. Raises Forbidden for any other."""
        if team_id and team_id != self.principal.project_id:
            raise Forbidden("this key belongs to another team", team_id=team_id)
