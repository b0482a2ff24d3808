"""Adapters that workers keep whatever the demand, and on how many."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("pin_replicas", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("adapters", "pin_replicas")
