"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.databases import (
    database_kind,
    database_url,
    fresh_database,
    postgres_server,
    postgres_url,
    pytest_terminal_summary,
)

__all__ = [
    "database_kind",
    "database_url",
    "fresh_database",
    "postgres_server",
    "postgres_url",
    "pytest_terminal_summary",
]

# Property tests run on shared machines: a slow example, or slow data, is no failure.
settings.register_profile("loraplex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loraplex")

# Services that a test starts, in this process or in others, take a free admin port unless the test says which.
os.environ.setdefault("LORAPLEX_REGISTRY_ADMIN_PORT", "0")
os.environ.setdefault("LORAPLEX_WORKER_ADMIN_PORT", "0")
