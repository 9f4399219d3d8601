"""Spans of OpenTelemetry, by its conventions for messaging.

    publish shop.OrderPlaced    (producer)  around bus.publish; its context travels in the envelope
    handle shop.OrderPlaced     (consumer)  around all that is done to handle a message in one run; a child of what
                                            published it. Each failed try is an event of it. What the handler sends
                                            carries the context of this span
    dispatch                    (producer)  around handing a batch of the outbox to the transport; linked to the spans
                                            that recorded its messages, and a child of that span if there is only one

Rules kept here:
- What is in an envelope stays: a message that is sent again, or from the outbox, keeps the context it was made with.
- A span covers the handler, not the commit: a batch has one commit, and its messages have a span each.
- Nothing here changes what a handler raises, and an interrupt of the core is not an error. Whatever the SDK raises (a
  sampler, a processor) is told, and the message goes on without a span.
"""

from collections.abc import Mapping, Sequence
from contextvars import Token
from functools import partial
from typing import Any

from opentelemetry.context import Context as Around
from opentelemetry.context import attach, detach
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from faregate.core.context import Context
from faregate.core.observer import Mishaps, Observer, Publish, Step, TraceContext
from faregate.core.verdict import first_line
from faregate.core.work import FailedAmongOthers, Work
from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.observe.trace_context import NO_PARENT, Cause, read, stamp, written

SYSTEM = {"messaging.system": "faregate"}
_MOST_LINKS = 128
"""As many as a span of the SDK keeps, unless somebody sets more."""
_NOT_TAKEN = "a span does not take what happened"


class Tracing(Observer):
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._mishaps = Mishaps()

    # --- handling ----------------------------------------------------------------------------------------------

    def around_handling(self, subscription: Subscription, step: Step) -> Step:
        wire = subscription.message_type.wire
        destination = subscription.node if subscription.source is None else f"{subscription.source}.{wire}"
        name = f"handle {destination}"
        attributes = {
            **SYSTEM,
            "messaging.operation.name": "handle",
            "messaging.operation.type": "process",
            "messaging.destination.name": destination,
            "messaging.consumer.group.name": subscription.node,
            "faregate.type": wire,
        }
        start, mishaps, end = self._tracer.start_span, self._mishaps, self._end

        async def traced(ctx: Context, again: Context | None = None) -> None:
            work, span, around = ctx._work, None, NO_PARENT
            try:
                cause = read(work.envelope)
                if cause is not None:
                    around = cause.around
                if cause is None or cause.sampled:
                    span = start(name, around, SpanKind.CONSUMER, attributes={**attributes, **_about(work)})
                    ctx._trace = partial(self._written, span.get_span_context())
                    around = set_span_in_context(span, NO_PARENT)
            except BaseException as exc:
                mishaps.tell("the span of a handler cannot start", exc)
            token = attach(around)  # without a span, too: what the handler does is no part of another one
            try:
                await step(ctx)
                if span is not None and not ctx._completed:
                    mishaps.guard(_NOT_TAKEN, span.set_attribute, "faregate.outcome", "skipped")
            except BaseException as exc:
                if span is not None:
                    mishaps.guard(_NOT_TAKEN, _note_failure, span, work, exc)
                raise
            finally:
                end(span, token)

        return traced

    def _end(self, span: Span | None, token: Token[Around]) -> None:
        detach(token)
        if span is not None:
            try:
                span.end()
            except BaseException as exc:
                self._mishaps.tell("a span cannot end", exc)

    def note_failed_try(self, ctx: Context, exc: Exception) -> None:
        """For whoever is around the tries (`measuring.py`): one more around each would cost every message."""
        self._mishaps.guard(_NOT_TAKEN, self._record_try, ctx, exc)

    def _record_try(self, ctx: Context, exc: Exception) -> None:
        get_current_span().record_exception(exc, {"faregate.attempt": ctx._attempt})

    def _written(self, context: SpanContext) -> TraceContext | None:
        """Called by the core, when something is sent."""
        try:
            return written(context)
        except BaseException as exc:
            self._mishaps.tell("a trace context cannot be handed on", exc)
            return None

    # --- sending -----------------------------------------------------------------------------------------------

    def around_publish(self, publish: Publish, *, outbox: bool = False) -> Publish:
        async def traced(envelopes: Sequence[Envelope]) -> None:
            span = None
            try:
                span = self._begin(envelopes, outbox=outbox)
            except BaseException as exc:
                self._mishaps.tell("the span of a publish cannot start", exc)
            if span is None:
                await publish(envelopes)
                return
            token = attach(set_span_in_context(span))
            try:
                await publish(envelopes)
            except Exception as exc:
                self._mishaps.guard(_NOT_TAKEN, _record, span, exc)
                raise
            finally:
                self._end(span, token)

        return traced

    def _begin(self, envelopes: Sequence[Envelope], *, outbox: bool) -> Span | None:
        """Start a span, and put its context into the messages that have none; None: nobody looks at any of them."""
        made = {envelope.traceparent: envelope for envelope in envelopes}
        new = made.pop(None, None) is not None
        causes = [cause for cause in map(read, made.values()) if cause is not None]
        causes = [cause for cause in causes if cause.sampled][:_MOST_LINKS]
        if not new and not causes:
            return None
        span = self._start(envelopes, causes, own=new and not made and not outbox, outbox=outbox)
        if new and (trace := self._written(span.get_span_context())) is not None:
            for envelope in envelopes:
                if envelope.traceparent is None:
                    stamp(envelope, trace)
        return span

    def _start(self, envelopes: Sequence[Envelope], causes: list[Cause], *, own: bool, outbox: bool) -> Span:
        """`own`: whoever publishes now is who caused it; else the messages say who did."""
        context = None if own else causes[0].around if len(causes) == 1 else NO_PARENT
        links = [Link(cause.span) for cause in causes]
        operation = "dispatch" if outbox else "publish"
        destinations = {_destination(each) for each in envelopes}
        attributes: dict[str, Any] = {
            **SYSTEM,
            "messaging.operation.name": operation,
            "messaging.operation.type": "send",
        }
        name = operation
        if len(destinations) == 1:
            [attributes["messaging.destination.name"]] = destinations
            name = f"{operation} {attributes['messaging.destination.name']}"
        if len(envelopes) == 1:
            attributes["messaging.message.id"] = envelopes[0].publication_id
            attributes["messaging.message.conversation_id"] = envelopes[0].correlation_id
        else:
            attributes["messaging.batch.message_count"] = len(envelopes)
        return self._tracer.start_span(name, context, SpanKind.PRODUCER, attributes=attributes, links=links)

    def stamp(self, envelope: Envelope) -> None:
        self._mishaps.guard("a trace context cannot be recorded", _stamp_current, envelope)


def _stamp_current(envelope: Envelope) -> None:
    trace = written(get_current_span().get_span_context())
    if trace is not None:
        stamp(envelope, trace)


def _destination(envelope: Envelope) -> str:
    if envelope.kind == "command":
        return envelope.destination or ""
    return f"{envelope.source}.{envelope.type}"


def _about(work: Work) -> Mapping[str, Any]:
    envelope = work.envelope
    found: dict[str, Any] = {
        "messaging.message.id": work.message_id,
        "messaging.message.conversation_id": envelope.correlation_id or envelope.publication_id,
    }
    if work.delivery.key is not None:
        found["faregate.key"] = work.delivery.key
    if work.delivery.redeliveries:
        found["faregate.redeliveries"] = work.delivery.redeliveries
    return found


def _note_failure(span: Span, work: Work, exc: BaseException) -> None:
    failure = work.error if isinstance(exc, FailedAmongOthers) else exc
    if not isinstance(failure, Exception):
        span.set_attribute("faregate.outcome", "interrupted")  # it runs again, or another copy was faster
        return
    if not work.handler_failed:  # a middleware's, or a resource's; those of tries are noted already
        span.record_exception(failure)
    _fail(span, failure)


def _record(span: Span, exc: Exception) -> None:
    span.record_exception(exc)
    _fail(span, exc)


def _fail(span: Span, exc: BaseException) -> None:
    span.set_status(Status(StatusCode.ERROR, first_line(exc)))
    span.set_attribute("error.type", type(exc).__qualname__)
