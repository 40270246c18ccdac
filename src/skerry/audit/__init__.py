"""The audit seam: one ordered, append-only record of everything that is done."""

from skerry.audit.sink import AuditBackend, AuditLog, AuditSink, AuditTransaction
from skerry.core.audit import SYSTEM, AuditEvent, Outcome

__all__ = ["SYSTEM", "AuditBackend", "AuditEvent", "AuditLog", "AuditSink", "AuditTransaction", "Outcome"]
