"""Three nodes in a row, on a store, and what OpenTelemetry was told of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

import faregate as fg

LONG = 30  # seconds until a test that hangs is failed


class OrderPlaced(fg.Event):
    order_id: str


class ChargeCard(fg.Command):
    order_id: str


class OrderCharged(fg.Event):
    order_id: str


class Telemetry:
    """An observer with exporters in memory."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.observer = fg.observe.OpenTelemetry(self.tracers, MeterProvider([self.reader]))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def metrics(self) -> dict[str, dict[tuple[Any, ...], float]]:
        """By name, then by the values of the labels."""
        data = self.reader.get_metrics_data()
        found: dict[str, dict[tuple[Any, ...], float]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = found.setdefault(metric.name, {})
                    for point in metric.data.data_points:
                        points[tuple((point.attributes or {}).values())] = point.value  # type: ignore[union-attr]
        return found


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def links(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop turn until it is so."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


@asynccontextmanager
async def three_nodes(folder: Path, observe: Any, **options: Any) -> AsyncIterator[fg.Bus]:
    """shop -> OrderPlaced -> billing -> ChargeCard -> payments -> OrderCharged -> shop, each hop through an outbox."""
    shop, billing, payments = fg.Node("shop"), fg.Node("billing"), fg.Node("payments")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced) -> fg.Outgoing:
        return fg.send(ChargeCard(order_id=order.order_id), to="payments")

    @payments.on(ChargeCard)
    def charge(command: ChargeCard) -> OrderCharged:
        return OrderCharged(order_id=command.order_id)

    @shop.on(OrderCharged, source="payments")
    async def note(charged: OrderCharged) -> None:
        pass

    given = {"store": f"sqlite:{folder / 'shop.db'}", **options}
    async with fg.Bus("memory:", nodes=[shop, billing, payments], observe=observe, **given) as bus:
        yield bus
