"""The registry's tables. The migrations create them; a test holds both equal."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# Ordered by bytes on every database, as SQLite does: pages go by name.
NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

# One row: who this store is, and how many transactions it has seen. Its lock orders all writers.
HEAD = sa.Table(
    "head",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("store_id", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
)

# The last transactions, for watchers that resume.
CHANGES = sa.Table(
    "changes",
    METADATA,
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("payload", sa.Text, nullable=False),
)

BASE_MODELS = sa.Table(
    "base_models",
    METADATA,
    sa.Column("base_id", NAME, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("architecture", sa.Text, nullable=False),
    sa.Column("num_parameters", sa.BigInteger, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),
    sa.Column("create_time_us", sa.BigInteger, nullable=False),
)

ADAPTERS = sa.Table(
    "adapters",
    METADATA,
    sa.Column("tenant", NAME, primary_key=True),
    sa.Column("name", NAME, primary_key=True),
    sa.Column("base_id", NAME, sa.ForeignKey("base_models.base_id"), nullable=False),
    sa.Column("current", sa.Text, nullable=False),
    sa.Column("create_time_us", sa.BigInteger, nullable=False),
    sa.Column("update_time_us", sa.BigInteger, nullable=False),
    sa.Column("pin_replicas", sa.Integer, nullable=False, server_default="0"),  # workers that keep it; 0: not pinned
)

VERSIONS = sa.Table(
    "versions",
    METADATA,
    # Rises with registration: newest first is by falling id.
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("tenant", NAME, nullable=False),
    sa.Column("name", NAME, nullable=False),
    sa.Column("version_digest", sa.Text, nullable=False),
    sa.Column("artifact_digest", sa.Text, nullable=False, index=True),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("artifact_bytes", sa.BigInteger, nullable=False),
    sa.Column("target_modules", sa.Text, nullable=False),  # joined by commas
    sa.Column("num_modules", sa.Integer, nullable=False),
    sa.Column("num_base_modules", sa.Integer, nullable=False),
    sa.Column("dtype", sa.Text, nullable=False),
    sa.Column("create_time_us", sa.BigInteger, nullable=False),
    sa.Column("packer", sa.Integer, nullable=False, server_default="0"),  # 0: before formats could be chosen
    sa.Column("source_digest", sa.Text, nullable=False, server_default="", index=True),  # the artifact of format none
    sa.Column("source_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("report", sa.Text, nullable=False, server_default=""),  # JSON of a PackingReport; not in the change log
    sa.Column("origin", sa.Text, nullable=False, server_default=""),  # where it was imported from; "": uploaded
    sa.ForeignKeyConstraint(["tenant", "name"], ["adapters.tenant", "adapters.name"], ondelete="CASCADE"),
    sa.UniqueConstraint("tenant", "name", "version_digest"),
)

# What workers measured, one row per artifact, those of formats that were replaced included; not in the change log.
EVALUATIONS = sa.Table(
    "evaluations",
    METADATA,
    sa.Column("tenant", NAME, primary_key=True),
    sa.Column("name", NAME, primary_key=True),
    sa.Column("artifact_digest", sa.Text, primary_key=True),
    sa.Column("version_digest", sa.Text, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("figures", sa.Text, nullable=False),  # JSON of Figures
    sa.Column("create_time_us", sa.BigInteger, nullable=False),
    sa.ForeignKeyConstraint(["tenant", "name"], ["adapters.tenant", "adapters.name"], ondelete="CASCADE"),
)

API_KEYS = sa.Table(
    "api_keys",
    METADATA,
    sa.Column("key_id", NAME, primary_key=True),
    sa.Column("tenant", NAME, nullable=False),
    sa.Column("name", NAME, nullable=False),
    sa.Column("key_sha256", sa.Text, nullable=False),  # the key itself is kept nowhere
    sa.Column("create_time_us", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("tenant", "name"),
)
