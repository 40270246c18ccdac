"""The services behind every face: keys, sandboxes, processes, files, and what keeps records and machines in step.

async with open_store(url) as store, node, open_services(store, node, ControlConfig()) as services:
    principal = await services.keys.authenticate(secret)
    sandbox = await services.sandboxes.create(principal, SandboxSpec(), idempotency_key=None)
"""

from skerry.audit import AuditEvent, Outcome
from skerry.control.config import ControlConfig
from skerry.control.egress import ProjectEgress, SandboxNetwork, Spread
from skerry.control.files import Files
from skerry.control.keys import SECRET_PATTERN
from skerry.control.ports import PortConnection
from skerry.control.principal import ALL_SCOPES, Principal, Scope
from skerry.control.server import ServerInfo
from skerry.control.services import Services, open_services
from skerry.control.streams import Held
from skerry.control.templates import Template
from skerry.control.traffic import ACTIONS as TRAFFIC_ACTIONS
from skerry.control.watching import HeldWatch
from skerry.node.contract import ImageInfo, PoolStatus
from skerry.store import ApiKey, EgressPolicy, Page

__all__ = [
    "ALL_SCOPES",
    "SECRET_PATTERN",
    "TRAFFIC_ACTIONS",
    "ApiKey",
    "AuditEvent",
    "ControlConfig",
    "EgressPolicy",
    "Files",
    "Held",
    "HeldWatch",
    "ImageInfo",
    "Outcome",
    "Page",
    "PoolStatus",
    "PortConnection",
    "Principal",
    "ProjectEgress",
    "SandboxNetwork",
    "Scope",
    "ServerInfo",
    "Services",
    "Spread",
    "Template",
    "open_services",
]
