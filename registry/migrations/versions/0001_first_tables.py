"""The first tables: head, change log, base models, adapters and their versions."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    name_type = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    head = op.create_table(
        "head",
        sa.Column("id", sa.Integer, autoincrement=False),
        sa.Column("store_id", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_head"),
    )
    op.bulk_insert(head, [{"id": 1, "store_id": uuid.uuid4().hex, "revision": 0}])
    op.create_table(
        "changes",
        sa.Column("revision", sa.BigInteger, autoincrement=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("revision", name="pk_changes"),
    )
    op.create_table(
        "base_models",
        sa.Column("base_id", name_type),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("architecture", sa.Text, nullable=False),
        sa.Column("num_parameters", sa.BigInteger, nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("base_id", name="pk_base_models"),
    )
    op.create_table(
        "adapters",
        sa.Column("tenant", name_type),
        sa.Column("name", name_type),
        sa.Column("base_id", name_type, nullable=False),
        sa.Column("current", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.Column("update_time_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_adapters"),
        sa.ForeignKeyConstraint(["base_id"], ["base_models.base_id"], name="fk_adapters_base_id_base_models"),
    )
    op.create_table(
        "versions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True),
        sa.Column("tenant", name_type, nullable=False),
        sa.Column("name", name_type, nullable=False),
        sa.Column("version_digest", sa.Text, nullable=False),
        sa.Column("artifact_digest", sa.Text, nullable=False),
        sa.Column("base_digest", sa.Text, nullable=False),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("artifact_bytes", sa.BigInteger, nullable=False),
        sa.Column("target_modules", sa.Text, nullable=False),
        sa.Column("num_modules", sa.Integer, nullable=False),
        sa.Column("num_base_modules", sa.Integer, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.ForeignKeyConstraint(
            ["tenant", "name"],
            ["adapters.tenant", "adapters.name"],
            name="fk_versions_tenant_adapters",
            ondelete="CASCADE",
        ),
        sa.UniqueConstraint("tenant", "name", "version_digest", name="uq_versions_tenant_name_version_digest"),
    )
    op.create_index("ix_versions_artifact_digest", "versions", ["artifact_digest"])


def downgrade() -> None:
    for table in ("versions", "adapters", "base_models", "changes", "head"):
        op.drop_table(table)
