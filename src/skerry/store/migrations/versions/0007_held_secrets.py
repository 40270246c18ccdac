"""Snapshots say whether their memory may hold secrets."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("holds_secrets", sa.Boolean, nullable=False, server_default=sa.false()))
