"""What the log says at the start of a service that others can reach."""

from __future__ import annotations

import structlog

from common.config import ServiceSettings, is_loopback

log = structlog.get_logger(__name__)


def warn_where_open(settings: ServiceSettings) -> None:
    """Warn where --insecure lets everybody in."""
    if settings.insecure and not is_loopback(settings.host):
        log.warning(
            "security.insecure",
            host=settings.host,
            cluster_token=settings.cluster_secret is not None,
            meaning="whoever can reach this address may use it without a credential, unless a cluster token or API "
            "keys are configured; nothing is encrypted",
        )
