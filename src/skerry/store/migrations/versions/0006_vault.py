"""Tenants' keys, secrets with their versions, and who has been given which."""

import sqlalchemy as sa
from alembic import op

from skerry.store.types import UtcTime, json_type

revision = "0006"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "tenant_keys",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("root_key_id", sa.String(16), nullable=False),
        sa.Column("wrapped", sa.LargeBinary),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("destroyed_at", UtcTime()),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenant_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_tenant_keys_tenant_id"),
    )
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("updated_at", UtcTime(), nullable=False),
        sa.Column("deleted_at", UtcTime()),
        sa.PrimaryKeyConstraint("id", name="pk_secrets"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_secrets_tenant_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_secrets_project_id"),
    )
    there = sa.text("deleted_at IS NULL")
    op.create_index(
        "uq_secrets_name", "secrets", ["project_id", "name"], unique=True, sqlite_where=there, postgresql_where=there
    )
    op.create_table(
        "secret_versions",
        sa.Column("secret_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("secret_id", "version", name="pk_secret_versions"),
        sa.ForeignKeyConstraint(["secret_id"], ["secrets.id"], name="fk_secret_versions_secret_id"),
    )
    op.create_table(
        "secret_uses",
        sa.Column("holder_id", sa.String(32), nullable=False),
        sa.Column("secret_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("holder_id", "secret_id", "version", name="pk_secret_uses"),
        sa.ForeignKeyConstraint(
            ["secret_id", "version"],
            ["secret_versions.secret_id", "secret_versions.version"],
            name="fk_secret_uses_secret_id",
        ),
    )
    for column in ("secret_env", "secret_files"):
        op.add_column("sandboxes", sa.Column(column, json_type(), nullable=False, server_default=sa.text("'{}'")))
