"""Logs: one structured line per event, to stderr. Prompts, answers and keys never go into a log.

A line that is written for a request carries its trace's ids.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from opentelemetry import trace

LogFormat = Literal["auto", "console", "json"]


def add_trace_ids(_: object, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put the current span's ids into a log line."""
    ids = trace.get_current_span().get_span_context()
    if ids.is_valid:
        line["trace_id"] = trace.format_trace_id(ids.trace_id)
        line["span_id"] = trace.format_span_id(ids.span_id)
    return line


def configure_logs(service: str, *, level: str = "info", log_format: LogFormat = "auto") -> None:
    """Send this process's logs to stderr: readable on a terminal, JSON elsewhere, unless `log_format` says which."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_trace_ids,
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
