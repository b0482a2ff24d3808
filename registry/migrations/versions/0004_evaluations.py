"""What workers measured of artifacts, end to end."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "evaluations",
        sa.Column("tenant", name),
        sa.Column("name", name),
        sa.Column("artifact_digest", sa.Text),
        sa.Column("version_digest", sa.Text, nullable=False),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("figures", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "artifact_digest", name="pk_evaluations"),
        sa.ForeignKeyConstraint(
            ["tenant", "name"],
            ["adapters.tenant", "adapters.name"],
            name="fk_evaluations_tenant_adapters",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("evaluations")
