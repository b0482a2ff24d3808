"""What holds for every test."""

from __future__ import annotations

import os

# Services that a test starts, in this process or in others, take a free admin port unless the test says which.
os.environ.setdefault("LORAPLEX_REGISTRY_ADMIN_PORT", "0")
os.environ.setdefault("LORAPLEX_WORKER_ADMIN_PORT", "0")
