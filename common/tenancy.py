"""Who owns what. There is one tenant so far; every name and every request is its."""

from __future__ import annotations

from typing import Final

DEFAULT_TENANT: Final = "default"
