"""API keys, by their hashes."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name_type = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "api_keys",
        sa.Column("key_id", name_type),
        sa.Column("tenant", name_type, nullable=False),
        sa.Column("name", name_type, nullable=False),
        sa.Column("key_sha256", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.UniqueConstraint("tenant", "name", name="uq_api_keys_tenant_name"),
    )


def downgrade() -> None:
    op.drop_table("api_keys")
