"""W3C's trace context, between the envelope and OpenTelemetry.

Rules kept here:
- What comes with a message comes from outside: a `traceparent` that is none counts as none.
- A context that says that nobody looks at it (not sampled) is handed on, and gets no spans here. Who began the trace
  has decided; this is what OpenTelemetry's default sampler does, without asking it for every message.
"""

import re

from msgspec.structs import force_setattr
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from faregate.core.observer import TRACESTATE, TraceContext
from faregate.message import Envelope

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_EMPTY = TraceState()


def read(envelope: Envelope) -> SpanContext | None:
    """Of what a message was published by; None for one that carries none, or nothing that could be one."""
    found = None if envelope.traceparent is None else _FORM.fullmatch(envelope.traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = found.groups()
    header = envelope.headers.get(TRACESTATE)
    state = _EMPTY if header is None else TraceState.from_header([header])
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)), state)
    return context if context.is_valid else None


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
