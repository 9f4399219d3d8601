"""What tracing and metrics cost a message, on a bus in memory whose handler does nothing.

What is measured, per message, from `bus.publish_many` (100 at a time) to the settled delivery:

    off         nobody observes
    metrics     `fg.observe.Prometheus()`: durations, failures and retries of tries, what is published
    sampled     `fg.observe.OpenTelemetry()`, spans and metrics, where one trace in a hundred is recorded, as production
                does it: the SDK's own sampler, spans in batches, an exporter that throws them away
    every       the same where every trace is recorded
    singly      `off` and `sampled` where each message is published by a `bus.publish` of its own, so each is a trace
    the SDK     not Faregate at all: one span of the SDK for each message, with the attributes that `handle` has, made
                current and ended

The targets are at most 10 µs a message above `off` for `metrics`, for `sampled` and for `every`. To record a span costs
more than 10 µs in the SDK alone (`the SDK`), so `every` can be met only where that is faster. `singly` is shown and not
judged: there the SDK is asked about a trace for every message, and makes ids for it before it says no.

That observing costs nothing when it is off is no matter of measuring: pipelines and ways out are then compiled without
a step of an observer, which `tests/observe/test_off.py` shows.

Time is that of the processor, of all threads: nothing here waits, and the SDK exports in a thread of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from _harness import Contestant, Report, interleave, options
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from prometheus_client import CollectorRegistry

import faregate as fg

AT_MOST_US = 10.0
_TOGETHER = 100
_QUEUE = 1 << 20
Make = Callable[[], tuple[Any, Callable[[], None]]]
"""An observer, and what ends it."""


class Order(fg.Event):
    order_id: str
    total: int


ORDER = Order(order_id="order-000017", total=4200)


class Discard(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def tracers(sampler: Sampler) -> TracerProvider:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Discard(), max_queue_size=_QUEUE))
    return provider


def telemetry(sampler: Sampler) -> tuple[fg.observe.Observer, Callable[[], None]]:
    provider = tracers(sampler)
    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    return fg.observe.OpenTelemetry(provider, meters), provider.shutdown


def prometheus() -> tuple[fg.observe.Observer, Callable[[], None]]:
    return fg.observe.Prometheus(CollectorRegistry()), lambda: None


async def run_bus(make: Make, together: int, messages: int) -> float:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> None:
        pass

    observe, close = make()
    async with fg.Bus("memory:", nodes=[shop, billing], observe=observe) as bus:
        begin = time.process_time()
        for first in range(0, messages, together):
            if together == 1:
                await bus.publish(ORDER, node="shop")
            else:
                await bus.publish_many([ORDER] * min(together, messages - first), node="shop")
            if not first % _TOGETHER:
                await asyncio.sleep(0)
        await bus.idle()
        seconds = time.process_time() - begin
        assert bus.outcomes()["handled"] == messages
    close()
    return seconds


async def run_sdk(messages: int) -> float:
    provider = tracers(ALWAYS_ON)
    start = provider.get_tracer("bench").start_span
    attributes: dict[str, Any] = {
        "messaging.system": "faregate",
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.destination.name": "shop.Order",
        "messaging.consumer.group.name": "billing",
        "faregate.type": "Order",
    }
    parent = SpanContext(1 << 100, 1 << 50, True, TraceFlags(1))
    around = set_span_in_context(NonRecordingSpan(parent), Context())
    begin = time.process_time()
    for number in range(messages):
        about = {"messaging.message.id": f"message-{number}", "messaging.message.conversation_id": "root"}
        span = start("handle shop.Order", around, SpanKind.CONSUMER, attributes={**attributes, **about})
        token = attach(set_span_in_context(span))
        detach(token)
        span.end()
    seconds = time.process_time() - begin
    assert isinstance(span, ReadableSpan)
    provider.shutdown()
    return seconds


def contestant(name: str, make: Make, together: int = _TOGETHER) -> Contestant:
    run: Callable[[int], Awaitable[float]] = partial(run_bus, make, together)
    return Contestant(name, run)


def nobody() -> tuple[None, Callable[[], None]]:
    return None, lambda: None


def one_of_100() -> tuple[fg.observe.Observer, Callable[[], None]]:
    return telemetry(ParentBased(TraceIdRatioBased(0.01)))


def main() -> None:
    args = options(__doc__, rounds=9, messages=20_000)
    report = Report("observe", args.json)
    contestants = [
        contestant("off", nobody),
        contestant("metrics", prometheus),
        contestant("sampled", one_of_100),
        contestant("every", lambda: telemetry(ParentBased(ALWAYS_ON))),
        Contestant("sdk", run_sdk),
        contestant("off, singly", nobody, 1),
        contestant("singly", one_of_100, 1),
    ]
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    cost = {each.name: samples.cost(each.name) * 1e6 for each in contestants}
    added = {name: max(cost[name] - cost["off"], 0.001) for name in ("metrics", "sampled", "every")}
    added["singly"] = max(cost["singly"] - cost["off, singly"], 0.001)

    def row(label: str, name: str) -> tuple[str, str, str]:
        return label, f"{cost[name]:.2f}", f"{added[name]:.2f}" if name in added else ""

    report.table(
        ("per message", "µs", "more than off, µs"),
        [
            row("nobody observes", "off"),
            row("metrics", "metrics"),
            row("tracing and metrics, 1 trace of 100", "sampled"),
            row("tracing and metrics, every trace", "every"),
            row("  the SDK alone, one span", "sdk"),
            row("published singly, nobody observes", "off, singly"),
            row("published singly, 1 trace of 100", "singly"),
        ],
    )
    report.ours = {
        "off_us": cost["off"],
        "off_singly_us": cost["off, singly"],
        "metrics_us": added["metrics"],
        "sampled_us": added["sampled"],
        "every_us": added["every"],
        "singly_us": added["singly"],
    }
    report.peers = {"sdk_span_us": cost["sdk"]}
    report.goal("metrics", AT_MOST_US / added["metrics"], 1.0)
    report.goal("sampled", AT_MOST_US / added["sampled"], 1.0)
    report.goal("every", AT_MOST_US / added["every"], 1.0)
    report.finish()


if __name__ == "__main__":
    main()
