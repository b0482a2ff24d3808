"""`python -m router`: the public front of a Loraplex cluster."""

from __future__ import annotations

import sys

import uvloop

from common.config import load_settings
from common.exposure import warn_where_open
from common.lifecycle import stop_on_signals
from common.telemetry import configure_logs
from common.tracing import tracing
from loraplex.errors import FailedPrecondition
from router.server import Router
from router.settings import RouterSettings


async def _run(settings: RouterSettings) -> None:
    await Router(settings).run(stop_on_signals())


def main() -> int:
    """Run until a signal. Returns 1 where the router cannot start."""
    settings = load_settings(RouterSettings, "router", sys.argv[1:])
    configure_logs("router", level=settings.log_level, log_format=settings.log_format)
    warn_where_open(settings)
    try:
        with tracing("router", settings.otlp_endpoint):
            uvloop.run(_run(settings))
    except FailedPrecondition as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
