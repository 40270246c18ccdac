"""Sandboxes that rest, and snapshots."""

import sqlalchemy as sa
from alembic import op

from skerry.store.types import UtcTime

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for column in (
        sa.Column("auto_pause", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("paused_at", UtcTime()),
        sa.Column("remaining_ms", sa.BigInteger),
        sa.Column("rested_ms", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("snapshot_id", sa.String(32)),
    ):
        op.add_column("sandboxes", column)
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128)),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("template", sa.String(257), nullable=False),
        sa.Column("memory", sa.Boolean, nullable=False),
        sa.Column("cpu", sa.Integer, nullable=False),
        sa.Column("memory_mb", sa.Integer, nullable=False),
        sa.Column("disk_mb", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("size_bytes", sa.BigInteger),
        sa.Column("stood_still_ms", sa.Float(53)),
        sa.Column("node_id", sa.String(64), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_snapshots_tenant_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_snapshots_project_id"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_snapshots_sandbox_id"),
    )
    op.create_index("ix_snapshots_sandbox_id", "snapshots", ["sandbox_id"])
    op.create_index("ix_snapshots_page", "snapshots", ["tenant_id", "created_at", "id"])
    op.create_index(
        "uq_snapshots_name",
        "snapshots",
        ["project_id", "name"],
        unique=True,
        sqlite_where=sa.text("state <> 'failed'"),
        postgresql_where=sa.text("state <> 'failed'"),
    )
