"""Who may reach a sandbox's ports, and what its servers are called there."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("public_ports", sa.Boolean, nullable=False, server_default=sa.true()))
    op.add_column("sandboxes", sa.Column("mask_request_host", sa.String(255)))
