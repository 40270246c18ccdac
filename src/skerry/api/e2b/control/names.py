"""Names as E2B writes them: `namespace/name:tag`. The namespace is a project's id, and the tag may be left out.

A sandbox is made of "a template": one of the server's, or a snapshot by its id or name. All of these have that form.
"""

import uuid
from dataclasses import dataclass
from typing import Final

from skerry.control import Principal
from skerry.core import ids
from skerry.core.errors import InvalidRequest, NotFound
from skerry.core.limits import TAG_DEFAULT
from skerry.core.models import Snapshot

BUILDS: Final = uuid.UUID("6f6c1d8e-6b0f-5c8e-9a51-3b9a3c1b2a77")
"""The namespace of build ids: E2B's clients want a UUID, and here a template or snapshot is its only build."""


@dataclass(frozen=True, slots=True)
class Name:
    namespace: str | None
    name: str
    tag: str | None
    """None where it is not said."""

    @property
    def native(self) -> str:
        """As the services know it: the default tag is never written."""
        return self.name if self.tag in {None, TAG_DEFAULT} else f"{self.name}:{self.tag}"


def parse(field: str, text: str) -> Name:
    """Raises InvalidRequest for what has not that form. Whether the parts are legal is for the services to say."""
    namespace, slash, rest = text.rpartition("/")
    name, colon, tag = rest.partition(":")
    if not name or (slash and not namespace) or (colon and not tag) or ":" in tag or "/" in namespace:
        raise InvalidRequest.of(field, "is not of the form name, name:tag or namespace/name:tag", given=text)
    return Name(namespace or None, name, tag or None)


def resolve(field: str, text: str, principal: Principal) -> Name:
    """The same, of what the caller can see. Raises NotFound `template_not_found` for another's namespace."""
    found = parse(field, text)
    if found.namespace not in {None, principal.project_id}:
        raise NotFound(f"there is no template {text!r}", code="template_not_found", template=text)
    return found


def is_snapshot_id(name: Name) -> bool:
    return name.tag in {None, TAG_DEFAULT} and ids.is_id(name.name, ids.SNAPSHOT)


def of_snapshot(snapshot: Snapshot) -> list[str]:
    """Its full names."""
    if snapshot.name is None:
        return []
    tag = "" if ":" in snapshot.name else f":{TAG_DEFAULT}"
    return [f"{snapshot.project_id}/{snapshot.name}{tag}"]


def build_id(made_of: str) -> str:
    """The UUID of the one build of a template (by its name) or snapshot (by its id)."""
    return str(uuid.uuid5(BUILDS, made_of))
