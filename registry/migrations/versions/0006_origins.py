"""Versions know where the registry fetched them from."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("origin", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("versions", "origin")
