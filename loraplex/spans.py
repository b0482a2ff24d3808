"""The spans of one request: where its time went, from the router to the engine. Values and their order; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Span:
    """A timed piece of a request. `status` is ok, error or cancelled; `status_reason` the reason of an error.

    `parent_span_id` is empty where the trace begins. A span that had not ended when the answer was sent lasts until
    then. `attributes` go by OpenTelemetry's names.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    name: str
    start_time: datetime
    duration_s: float
    status: str = "ok"
    status_reason: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """A span in its tree: `branches` says for each level from the root whether more siblings follow there."""

    span: Span
    branches: tuple[bool, ...]


def in_tree_order(spans: Sequence[Span]) -> Iterator[Placed]:
    """Yield spans depth first, siblings by their start. A span whose parent is not among them is a root.

    Every span comes once, whatever the ids say.
    """
    children: dict[str, list[Span]] = {}
    known = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda span: span.start_time):
        children.setdefault(span.parent_span_id if span.parent_span_id in known else "", []).append(span)

    def below(parent: str, branches: tuple[bool, ...]) -> Iterator[Placed]:
        mine = children.pop(parent, [])
        for at, span in enumerate(mine):
            here = (*branches, at + 1 < len(mine)) if parent else ()
            yield Placed(span, here)
            yield from below(span.span_id, here)

    yield from below("", ())
    while children:  # a circle, which no honest trace has
        yield from below(next(iter(children)), ())
