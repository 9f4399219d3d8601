"""W3C's trace context, between the envelope and OpenTelemetry.

Rules kept here:
- What comes with a message comes from outside: a `traceparent` that is none counts as none.
- Contexts are kept for a while: messages that are published together, and all that follow from one that is not sampled,
  carry the same one.
- A context that says that nobody looks at it (not sampled) is handed on, and gets no spans here. Who began the trace
  has decided; this is what OpenTelemetry's default sampler does, without asking it for every message.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import force_setattr
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from faregate.core.observer import TRACESTATE, TraceContext
from faregate.message import Envelope

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_EMPTY = TraceState()
_LONGEST = 512
"""Of each half: so many characters W3C asks one to hand on."""
_KEPT = 256
NO_PARENT = Context()


class Cause(NamedTuple):
    """What a message was published by."""

    span: SpanContext
    sampled: bool
    around: Context
    """In which that span is the current one, and nothing else is said."""


def read(envelope: Envelope) -> Cause | None:
    """None for a message that carries no context, or nothing that could be one."""
    traceparent = envelope.traceparent
    if traceparent is None or len(traceparent) > _LONGEST:
        return None
    tracestate = envelope.headers.get(TRACESTATE) if envelope.headers else None
    return _read(traceparent, None if tracestate is None or len(tracestate) > _LONGEST else tracestate)


@lru_cache(_KEPT)
def _read(traceparent: str, tracestate: str | None) -> Cause | None:
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = found.groups()
    state = _EMPTY if tracestate is None else TraceState.from_header([tracestate])
    span = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)), state)
    if not span.is_valid:
        return None
    return Cause(span, span.trace_flags.sampled, set_span_in_context(NonRecordingSpan(span), NO_PARENT))


def written(context: SpanContext) -> TraceContext | None:
    """What goes into a message; None for the context of nothing."""
    if not context.is_valid:
        return None
    text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
    return TraceContext(text, context.trace_state.to_header() or None if context.trace_state else None)


def stamp(envelope: Envelope, trace: TraceContext) -> None:
    """Put it into a message that has none yet and is not on its way."""
    force_setattr(envelope, "traceparent", trace.traceparent)
    if trace.tracestate:
        force_setattr(envelope, "headers", {**envelope.headers, TRACESTATE: trace.tracestate})
