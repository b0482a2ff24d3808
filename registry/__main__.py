"""Run the registry: python -m registry --state-dir DIR."""

from __future__ import annotations

import asyncio
import sys

import structlog

from common.config import load_settings
from common.exposure import warn_where_open
from common.lifecycle import stop_on_signals
from common.telemetry import configure_logs
from common.tracing import tracing
from loraplex.errors import LoraplexError
from registry.app import serve
from registry.settings import RegistrySettings

log = structlog.get_logger(__name__)


async def run(settings: RegistrySettings) -> None:
    """Serve until a signal."""

    def on_listening(port: int) -> None:
        log.info("registry.listening", host=settings.host, port=port, state_dir=str(settings.state_dir))

    await serve(settings, stop_on_signals(), on_listening)
    log.info("registry.stopped")


def main() -> int:
    """Return the exit status."""
    settings = load_settings(RegistrySettings, "registry", sys.argv[1:])
    configure_logs("registry", level=settings.log_level, log_format=settings.log_format)
    warn_where_open(settings)
    try:
        with tracing("registry", settings.otlp_endpoint):
            asyncio.run(run(settings))
    except LoraplexError as error:
        print(f"registry: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
