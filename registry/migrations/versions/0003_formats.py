"""Versions know their packer, their report and the exact artifact they were made from; until now all were exact."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("packer", sa.Integer, nullable=False, server_default="0"),
        sa.Column("source_digest", sa.Text, nullable=False, server_default=""),
        sa.Column("source_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("report", sa.Text, nullable=False, server_default=""),
    ):
        op.add_column("versions", column)
    op.execute("UPDATE versions SET source_digest = artifact_digest, source_bytes = artifact_bytes")
    op.create_index("ix_versions_source_digest", "versions", ["source_digest"])


def downgrade() -> None:
    op.drop_index("ix_versions_source_digest", "versions")
    for column in ("report", "source_bytes", "source_digest", "packer"):
        op.drop_column("versions", column)
