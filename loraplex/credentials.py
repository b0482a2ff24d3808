"""What a client proves itself with: an API key to the routers, the cluster token to the services behind them.

Both travel as `authorization: Bearer …`. Their text is in no repr, no message and no log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loraplex.errors import InvalidRequest
from loraplex.metadata_keys import AUTHORIZATION_KEY

Metadata = tuple[tuple[str, str], ...]
"""Pairs that go with a call."""

_KEY_VARIABLE: Final = "LORAPLEX_API_KEY"
_TOKEN_VARIABLE: Final = "LORAPLEX_CLUSTER_TOKEN"  # noqa: S105 - its name
_TOKEN_FILE_VARIABLE: Final = "LORAPLEX_CLUSTER_TOKEN_FILE"  # noqa: S105 - its name


def bearer(secret: str | None) -> Metadata:
    """Return the metadata that carries a secret; none for None."""
    return ((AUTHORIZATION_KEY, f"Bearer {secret}"),) if secret else ()


def is_visible_ascii(text: str) -> bool:
    """Tell whether a header can carry `text` as one word."""
    return text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets of one client; None is not sent. Raises InvalidRequest for what cannot be a secret."""

    api_key: str | None = field(default=None, repr=False)
    cluster_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("api_key", "cluster_token"):
            value = getattr(self, name)
            if value is not None and not is_visible_ascii(value):
                raise InvalidRequest(f"{name} has spaces or characters beyond ASCII; it is one word", field=name)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Credentials:
        """Read LORAPLEX_API_KEY and LORAPLEX_CLUSTER_TOKEN, or the file that LORAPLEX_CLUSTER_TOKEN_FILE names.

        Raises InvalidRequest where the file cannot be read.
        """
        token = environment.get(_TOKEN_VARIABLE, "").strip()
        if not token and (path := environment.get(_TOKEN_FILE_VARIABLE)):
            try:
                token = Path(path).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not text"
                raise InvalidRequest(f"{_TOKEN_FILE_VARIABLE} names {path}, which cannot be read: {why}") from error
        return cls(environment.get(_KEY_VARIABLE, "").strip() or None, token or None)

    @property
    def for_requests(self) -> Metadata:
        """What goes with a generation."""
        return bearer(self.api_key)

    @property
    def for_models(self) -> Metadata:
        """What goes with a question for models: clients and operators both may ask."""
        return bearer(self.api_key or self.cluster_token)

    @property
    def for_operators(self) -> Metadata:
        """What goes with calls to the registry and with questions for the fleet."""
        return bearer(self.cluster_token)
