"""Logs: one structured line per event, to stderr. Prompts, answers and keys never go into a log."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["auto", "console", "json"]


def configure_logs(service: str, *, level: str = "info", log_format: LogFormat = "auto") -> None:
    """Send this process's logs to stderr: readable on a terminal, JSON elsewhere, unless `log_format` says which."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    tail: list[structlog.typing.Processor] = [renderer] if console else [structlog.processors.dict_tracebacks, renderer]
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    # Libraries that use the standard library's logging: warnings and worse, through the same renderer.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
