"""The first schema."""

import sqlalchemy as sa
from alembic import op

from skerry.store.types import UtcTime, json_type

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("max_sandboxes", sa.Integer, nullable=False),
        sa.Column("max_lifetime_ms", sa.BigInteger, nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_projects_tenant_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_projects_tenant_id"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("scopes", json_type(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("last_used_at", UtcTime()),
        sa.Column("revoked_at", UtcTime()),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_api_keys_project_id"),
        sa.UniqueConstraint("secret_hash", name="uq_api_keys_secret_hash"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    _sandboxes()
    _records()


def _sandboxes() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("template", sa.String(257), nullable=False),
        sa.Column("cpu", sa.Integer, nullable=False),
        sa.Column("memory_mb", sa.Integer, nullable=False),
        sa.Column("disk_mb", sa.Integer, nullable=False),
        sa.Column("timeout_ms", sa.BigInteger, nullable=False),
        sa.Column("idle_timeout_ms", sa.BigInteger),
        sa.Column("metadata", json_type(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("node_id", sa.String(64), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("started_at", UtcTime()),
        sa.Column("expires_at", UtcTime(), nullable=False),
        sa.Column("ended_at", UtcTime()),
        sa.Column("end_reason", sa.String(32)),
        sa.Column("error", sa.Text),
        sa.Column("start_kind", sa.String(16)),
        sa.PrimaryKeyConstraint("id", name="pk_sandboxes"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_sandboxes_tenant_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_sandboxes_project_id"),
    )
    op.create_index("ix_sandboxes_page", "sandboxes", ["tenant_id", "created_at", "id"])
    op.create_index("ix_sandboxes_state", "sandboxes", ["state", "tenant_id"])


def _records() -> None:
    op.create_table(
        "idempotency",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("body_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_hash", name="pk_idempotency"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_idempotency_tenant_id"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_idempotency_sandbox_id"),
    )
    op.create_index("ix_idempotency_sandbox_id", "idempotency", ["sandbox_id"])
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])
    op.create_table(
        "audit_events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("at", UtcTime(), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32)),
        sa.Column("actor", sa.String(32), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(32)),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("detail", json_type(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit_events"),
        sa.UniqueConstraint("id", name="uq_audit_events_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_events_subject", "audit_events", ["subject", "seq"])
