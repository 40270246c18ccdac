"""What projects, templates and sandboxes say about what may leave."""

import sqlalchemy as sa
from alembic import op

from skerry.store.types import UtcTime, json_type

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "egress_policies",
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("template", sa.String(257), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("allow", json_type(), nullable=False),
        sa.Column("deny", json_type(), nullable=False),
        sa.Column("updated_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "template", name="pk_egress_policies"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_egress_policies_project_id"),
    )
    op.add_column("sandboxes", sa.Column("network", json_type(), nullable=False, server_default=sa.text("'{}'")))
