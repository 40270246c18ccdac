"""Disk-only pauses at a deadline, limits of what is kept, names that move on, keys for more than creation."""

import sqlalchemy as sa
from alembic import op

from skerry.store.types import UtcTime, json_type

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("auto_pause_memory", sa.Boolean, nullable=False, server_default=sa.true()))
    for limit in ("max_snapshots", "max_paused"):
        op.add_column("tenants", sa.Column(limit, sa.Integer, nullable=False, server_default=sa.text("100")))
    op.drop_index("uq_snapshots_name", "snapshots")
    op.create_index("ix_snapshots_name", "snapshots", ["project_id", "name", "created_at"])
    _widen_idempotency()


def _widen_idempotency() -> None:
    """SQLite cannot drop a foreign key: the table is made anew, and what it held is kept."""
    old = sa.table(
        "idempotency_0003", *(sa.column(name) for name in ("tenant_id", "key_hash", "body_hash", "sandbox_id")),
        sa.column("created_at", UtcTime()),
    )  # fmt: skip
    for index in ("ix_idempotency_sandbox_id", "ix_idempotency_created_at"):
        op.drop_index(index, "idempotency")
    op.rename_table("idempotency", "idempotency_0003")
    if op.get_bind().dialect.name == "postgresql":  # its index keeps the name that the new table's is to have
        op.execute("ALTER TABLE idempotency_0003 RENAME CONSTRAINT pk_idempotency TO pk_idempotency_0003")
    new = op.create_table(
        "idempotency",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("body_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("made", json_type(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_hash", name="pk_idempotency"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_idempotency_tenant_id"),
    )
    op.create_index("ix_idempotency_subject", "idempotency", ["subject"])
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])
    kept = [dict(row) for row in op.get_bind().execute(sa.select(old)).mappings()]
    for row in kept:
        row["subject"] = row.pop("sandbox_id")
        row["made"] = [row["subject"]]
    if kept:
        op.bulk_insert(new, kept)
    op.drop_table("idempotency_0003")
